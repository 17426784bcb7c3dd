"""Profiles: measured here, fitted from runs, or read from files."""
