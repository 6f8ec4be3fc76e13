"""Named locks of a worker, with hooks for an unwinding holder; a lock kept past it is BROKEN_DIRTY.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
