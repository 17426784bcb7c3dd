"""Joules of operations: events aligned with power, estimators, trees, rows and their precision."""
