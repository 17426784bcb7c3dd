"""Tracer and readers for XLA traces of JAX and TensorFlow 2."""
