"""Shares of GPUs under interference: iGniter, the cheapest plan with a bound, and baselines."""
