"""Keys and versions that outlive a task.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
