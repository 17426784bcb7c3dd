"""Plans for many different services: patterns by knapsacks, a bound by a relaxation, and batches for very many."""
