"""Held calls between the pipeline and the store: rows, their execution, followers and pushes."""
