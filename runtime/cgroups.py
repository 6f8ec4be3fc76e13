"""Limits of a worker and its tools.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
