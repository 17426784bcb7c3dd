"""Runs that know their operations: recorded, accounted, read back."""
