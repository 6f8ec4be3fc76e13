"""What an agent did before.

Comes with the execution tier; nothing here yet, and nothing imports it.
"""
