"""Nodes of a Ray cluster that the site file names: slices, meters, and the order of their grids."""
