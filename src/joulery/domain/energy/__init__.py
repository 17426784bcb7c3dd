"""Power, joules, grams and their footprints."""
