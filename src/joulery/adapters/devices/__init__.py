"""Device settings: clocks, power, MIG, MPS, sleep. One file a vendor surface; every change is whole or undone."""
