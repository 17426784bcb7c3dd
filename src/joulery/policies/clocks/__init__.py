"""GPU and CPU clocks within the SLO (μ-Serve)."""
