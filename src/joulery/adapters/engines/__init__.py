"""Engines, which run model replicas: in worker processes of this machine, on other servers, or on Ray Serve."""
