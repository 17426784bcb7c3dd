"""Scenario files: one section class a kind of study."""
