"""A run directory: everything one run found out, readable while it lasts and after a kill."""
