"""Adapters to meters, carbon services, engines, devices, clusters and tracers; one file a vendor, each with a fake."""
