"""Queues request by request: pools, batches, one server."""
