"""The tool plane, driven through the edge in virtual time."""
