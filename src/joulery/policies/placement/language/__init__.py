"""Plans for language models: variant, GPU type, GPUs a replica, requests at once and replicas."""
