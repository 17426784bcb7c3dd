"""Callbacks for training frameworks that log joules and grams beside the loss; each imports its framework on use."""
