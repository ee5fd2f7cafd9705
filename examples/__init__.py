"""Runnable examples: environments on the OpenEnv SDK and tours of the commands."""
