"""Levels, quanta, demotion and choice of the multi-level feedback queue. Pure. Later work."""
