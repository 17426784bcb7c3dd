"""What a run draws: the sampler process, the command beside it, the account at its end."""
