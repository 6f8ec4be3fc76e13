"""Repeated meaning is cooled down or refused (`admission.md` §13.1). Later work (resilience)."""
