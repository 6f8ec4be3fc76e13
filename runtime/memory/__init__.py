"""The four memory tiers of an agent."""
