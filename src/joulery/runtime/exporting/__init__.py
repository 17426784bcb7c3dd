"""The node exporter: meters, workloads and engines of one node, read at intervals into books of joules and grams."""
