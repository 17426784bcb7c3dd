"""Conversion of a solution into a plan: GPUs with named instances, and a certificate that others can check."""
