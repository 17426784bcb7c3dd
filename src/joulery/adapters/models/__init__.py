"""Real models: published weights read without the framework that wrote them, as graphs an engine can run."""
