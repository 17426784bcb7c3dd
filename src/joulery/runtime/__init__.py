"""Live loops: sampling, tracing, profiling, serving, scheduling, leases. They take ports; ``app`` wires them."""
