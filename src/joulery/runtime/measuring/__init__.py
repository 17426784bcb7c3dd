"""Energy measurement of a run: the sampler process, the command beside it, the account at its end."""
