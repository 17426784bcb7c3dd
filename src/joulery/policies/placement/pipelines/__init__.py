"""Models cut into stages and placed by clock sensitivity (μ-Serve, AlpaServe)."""
