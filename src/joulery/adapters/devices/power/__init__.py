"""Power limits of devices, and counters of the energy and work of a device under a limit."""
