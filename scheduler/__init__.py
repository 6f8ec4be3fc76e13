"""Durable tasks, holds and effects: the room below gateway and runtime."""
