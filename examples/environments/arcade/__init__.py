"""Games with the rules people know, dealt by a seed."""
