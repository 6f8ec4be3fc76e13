"""Admission: what may be sent when, by whom, and what it cost (`core.py` decides, `local.py` acts)."""
