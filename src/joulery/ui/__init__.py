"""The faces: command line, gateway, dashboard, reports, metrics."""
