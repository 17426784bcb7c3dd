"""Papers' figures and claims as pages."""
