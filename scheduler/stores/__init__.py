"""Backends of the task store behind one protocol."""
