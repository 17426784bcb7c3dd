"""Pure predictors of latency, interference, clock and power, queueing and output length, and their fits."""
