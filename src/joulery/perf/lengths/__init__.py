"""Output-length prediction: classes, features, model."""
