"""What to do when the provider pushes back: pure decisions."""
