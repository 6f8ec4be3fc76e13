"""What a value must be: JSON Schema, conditions of policy, patterns in text. All bounded."""
