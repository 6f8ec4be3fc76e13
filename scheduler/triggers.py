"""Next firing, phase, jitter, stampede guard; the time zone is a parameter. Pure. Later work."""
