"""The only place that makes adapters: a file a kind of adapter."""
