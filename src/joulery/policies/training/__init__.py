"""Which training jobs run, on how many GPUs: GREEN and its baselines."""
