"""Interference of co-located inference (iGniter): model, fit, calibration."""
