"""Small made-up tasks: one decision, or a few, and something to learn."""
