"""Meter the nodes of a cluster while a site is served, rank them by their grids, and let empty ones sleep."""
