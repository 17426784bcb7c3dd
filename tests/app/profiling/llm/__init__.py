"""Tests of :mod:`joulery.app.profiling.llm`."""
