"""Meters of energy and power: RAPL, GPUs, the host, a labelled CPU model, a recorded trace, a scripted fake."""
