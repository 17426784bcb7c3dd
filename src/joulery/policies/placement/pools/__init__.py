"""Pools of partitioned GPUs: variants on slices, with a bound."""
