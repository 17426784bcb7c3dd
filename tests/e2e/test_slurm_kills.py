"""A scheduler that is killed again and again loses, doubles and holds no job, and changes no owner's comment."""

from __future__ import annotations

import pytest

from tests.e2e.slurm_kills import play
from tests.slurm_accounting import accounting_missing
from tests.slurm_cluster import missing

_REASON = missing() or accounting_missing()
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]


def test_killed_as_an_operator_among_limits_partitions_arrays_and_qos() -> None:
    """As an operator, whose marks are in the owners' Comment; ``python -m tests.e2e.slurm_kills`` kills 25 times."""
    report = play(4, operator=True)
    assert not report.faults
    assert report.kills == 4 and report.held and report.reasons, "it was killed while it held jobs that said why"
