"""The outside world, one file a vendor, each with a fake: meters, carbon, engines, devices, clusters, tracers."""
