"""The node exporter: Prometheus metrics over HTTP, and OpenTelemetry metrics pushed to a collector."""
