"""Agent2Agent. Later: `protocols.md` §8 names what is known of version 1.0 and its card."""
