"""Gateways that share an engine: their metrics, pages, labels and language models."""
