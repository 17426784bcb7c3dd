"""Power limits of devices, and what a device under a limit has done: energy and work."""
