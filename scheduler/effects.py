"""The idempotency ledger. Later work (tool plane)."""
