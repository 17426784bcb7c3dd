"""Device settings: clocks, power limits, MIG, MPS, sleep. Every change takes full effect or is rolled back."""
