"""Queueing predictors: pools, batches, pipelines."""
