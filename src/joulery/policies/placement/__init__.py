"""Placement of models on GPUs and on slices of GPUs."""
