"""Plans that split models into stages and place the stages by clock sensitivity (μ-Serve, AlpaServe)."""
