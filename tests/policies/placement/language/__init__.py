"""Tests of :mod:`joulery.policies.placement.language`."""
