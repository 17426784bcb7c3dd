"""Plans for many different services: patterns and bounds by knapsacks, and plans in batches for very many."""
