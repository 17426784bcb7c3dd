"""The end of a served run: its charge, its comparison with the baseline, its report."""
