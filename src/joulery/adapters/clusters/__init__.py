"""Cluster backends for training jobs: this machine, Slurm, Kueue."""
