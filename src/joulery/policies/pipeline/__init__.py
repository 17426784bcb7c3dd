"""Models cut into stages and shards, and placed on groups of devices (AlpaServe, OSDI'23; μ-Serve, ATC'24)."""
