"""Schemas, approvals, effect ledger. Later work (tool plane)."""
