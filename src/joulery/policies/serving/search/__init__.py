"""Searches for the layout of a service: annealing over layouts, predicted, tried or learned."""
