"""What an agent knows, by meaning.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
