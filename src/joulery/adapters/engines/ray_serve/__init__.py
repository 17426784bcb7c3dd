"""Ray Serve as an engine."""
