"""The embedded engine: worker processes on this machine."""
