"""Governed devices of ``joulery up``: their clocks, or their power limits."""
