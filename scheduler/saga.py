"""Order of compensation. Pure. Later work."""
