"""Engines: what runs model replicas. ``local`` runs them as worker processes on CPU slices of this machine."""
