"""Placement of models on parts of GPUs."""
