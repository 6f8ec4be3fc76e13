"""Validation and readiness of task graphs. Pure. Later work."""
