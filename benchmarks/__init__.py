"""Figures with their peers, each a ratio measured side by side in one run."""
