"""User interfaces: command line, dashboard, reports."""
