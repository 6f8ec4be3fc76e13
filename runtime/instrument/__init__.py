"""Preparing modules so that they can be suspended."""
