"""The shared store: the only Redis client. Later work (fleet)."""
