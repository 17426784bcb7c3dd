"""Nodes of a Ray cluster that the site file names: their slices, meters, and order by carbon intensity."""
