"""Predictors: latency, interference, clock and power, queueing, output length; and their fits. Pure."""
