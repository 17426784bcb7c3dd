"""XLA traces of JAX and TensorFlow 2."""
