"""Opens what a site file names: meters, devices, engines, carbon sources, tracers."""
