"""The shared pool on real servers."""
