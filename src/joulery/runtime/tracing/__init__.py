"""Traced runs: record their operations, account their energy and read them back."""
