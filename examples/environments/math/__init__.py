"""Families of exact problems: one question, one answer, reward 1 or 0."""
