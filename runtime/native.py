"""Tools as bounded child processes.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
