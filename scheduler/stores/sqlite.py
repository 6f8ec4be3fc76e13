"""SQLite behind the TaskStore protocol: one writer thread, group commit. Later work."""
