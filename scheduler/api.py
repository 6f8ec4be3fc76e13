"""The one door into this room: tasks, holds, effects, approvals, usage, revisions. Later work."""
