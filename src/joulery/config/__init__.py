"""The one site file: models, units, and errors that point at the line."""
