"""Policy files: read, checked, compiled and watched. pydantic and YAML stay in this room."""
