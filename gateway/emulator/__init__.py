"""A model provider to run against: real meters, real shapes, faults on demand."""
