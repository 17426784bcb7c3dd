"""Language models: power, throughput and token latency of a replica, by requests in flight."""
