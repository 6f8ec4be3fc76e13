"""What becomes of overlapping firings: skip, latest, collect. Pure. Later work."""
