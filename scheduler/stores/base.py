"""The TaskStore protocol. Later work."""
