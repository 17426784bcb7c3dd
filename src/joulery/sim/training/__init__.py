"""A simulated training cluster and the studies on it."""
