"""Interpreters and their recipes."""
