"""One module of gateway.admission each."""
