"""Pure codecs: bytes and mappings in, values out. No clock, no JSON text decoded here."""
