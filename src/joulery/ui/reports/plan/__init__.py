"""Plans as text and pages."""
