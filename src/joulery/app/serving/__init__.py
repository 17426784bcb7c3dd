"""Serve a site: `joulery up` and `joulery serve`."""
