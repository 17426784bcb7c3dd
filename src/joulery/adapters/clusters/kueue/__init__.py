"""Cluster backend for Kueue, the job queue of Kubernetes, through the API server; nothing is installed."""
