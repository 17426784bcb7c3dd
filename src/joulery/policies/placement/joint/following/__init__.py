"""The next joint plan from the one that runs, and when to make it."""
