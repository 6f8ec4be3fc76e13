"""The tool plane (MCP): many servers of two eras behind one endpoint, under the same governance."""
