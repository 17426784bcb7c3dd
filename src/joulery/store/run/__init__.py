"""A run directory: the results of one run, readable while it runs and after a kill."""
