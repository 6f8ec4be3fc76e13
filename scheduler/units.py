"""Units of this room: Micros, Fuel, Tier. Later work."""
