"""What the node exporter publishes: Prometheus metrics over HTTP, and OpenTelemetry metrics pushed to a collector."""
