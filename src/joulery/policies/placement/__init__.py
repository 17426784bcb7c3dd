"""Which model runs on which part of which GPU."""
