"""JSON-RPC over MCP: ids with their exact type, eras, header rules. Later.

What is fixed already: an id is echoed as the raw JSON it came as, so `0`, `"0"` and
9007199254740993 survive (rust-sdk#1017); `null`, fractions and objects are no ids; our own error
codes lie outside -32768 to -32000 (`refusals.py`). Rules: `protocols.md` §5.1 to §5.3.
"""
