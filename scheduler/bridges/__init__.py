"""Ways in from other engines and queues."""
