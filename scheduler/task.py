"""State table of a task: the only legal transitions. Pure. Later work (execution tier)."""
