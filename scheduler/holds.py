"""Calls and tasks kept until a breaker closes, in order. Later work (resilience)."""
