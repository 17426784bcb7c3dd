"""The event kernel, random streams, arrivals, the policy driver, comparisons."""
