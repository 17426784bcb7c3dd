"""Measured costs of variants on this machine's slices, shares and clocks."""
