"""The context window of a task.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
