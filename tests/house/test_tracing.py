"""Tests are traced for coverage while they bring something new (``tests/conftest.py``), in workers too."""

import os
import sys

MORE_THAN_TRACED_S = 20.0


def test_what_computes_for_long_is_not_traced_to_its_end() -> None:
    """Trivial without ``--cov``: nothing is traced."""
    end_s = os.times().user + MORE_THAN_TRACED_S
    while sys.gettrace() is not None and os.times().user < end_s:
        sum(range(10_000))
    assert sys.gettrace() is None
