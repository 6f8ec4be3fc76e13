"""Admission: what may be sent when, and what it cost; `core.py` decides, `local.py` acts."""
