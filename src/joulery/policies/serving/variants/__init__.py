"""Variants that join, leave or share the requests of a running service; families of language models."""
