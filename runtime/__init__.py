"""The worker: sandboxed agents that can be stopped anywhere."""
