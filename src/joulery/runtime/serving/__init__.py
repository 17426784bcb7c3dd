"""Services that run: engine, load, controllers, ticks, the summary."""
