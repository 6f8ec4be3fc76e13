"""The tool plane (MCP); comes with its own issue."""
