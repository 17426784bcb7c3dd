"""Tests of :mod:`joulery.perf.llm`."""
