"""Readers of the traces of PyTorch's profiler (Kineto)."""
