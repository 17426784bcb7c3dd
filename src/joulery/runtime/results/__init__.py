"""Account a served run at its end: its charge, its comparison with the baseline and its report."""
