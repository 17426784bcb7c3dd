"""Devices, partitions, layouts, clock profiles, plans."""
