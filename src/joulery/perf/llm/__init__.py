"""Language models: what a replica draws, writes and how long tokens take, by requests in flight."""
