"""Plans for pools of partitioned GPUs: variants on slices, with a lower bound on the cost."""
