"""Counters that inference engines publish on ``/metrics``, read without a proxy in the path of their requests."""
