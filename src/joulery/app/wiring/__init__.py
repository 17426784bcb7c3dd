"""Open the resources that a site file names: meters, devices, engines, carbon sources, tracers."""
