"""Every metric of a worker, by its name in sandbox.md, section 13: published in its heartbeat row.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
