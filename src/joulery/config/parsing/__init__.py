"""From YAML text to typed values, and errors that name file, line and key."""
