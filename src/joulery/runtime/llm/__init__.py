"""Serve language models: queue requests, predict the length of answers and charge the energy of each request."""
