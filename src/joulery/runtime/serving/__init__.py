"""Run services: engine, load, controllers, ticks and the summary."""
