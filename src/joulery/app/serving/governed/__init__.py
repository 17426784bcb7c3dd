"""Governed devices of ``joulery up``: control of their clocks or their power limits."""
