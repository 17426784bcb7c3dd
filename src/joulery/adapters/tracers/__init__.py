"""Tracers: readers of framework profilers' files, and recorders that run inside traced programs."""
