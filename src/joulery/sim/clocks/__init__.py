"""Simulated devices whose clock changes while requests run."""
