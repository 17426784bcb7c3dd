"""Kueue, the queue of Kubernetes, through the API server: workloads are held and admitted, nothing is installed."""
