"""Scheduling of training jobs and their number of GPUs: GREEN and its baselines."""
