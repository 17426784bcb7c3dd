"""Meters of energy and power: RAPL, GPUs, the host, a CPU model, recorded traces and scripted fakes."""
