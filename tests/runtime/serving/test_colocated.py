"""Work counted at the speed of a clock that changes while it is done."""

import pytest

from joulery.runtime.session.progress_clock import ProgressClock


def test_work_advances_more_slowly_while_the_clock_is_low() -> None:
    now = [10.0]
    clock = ProgressClock(lambda: now[0])
    begun = clock.now_s()
    now[0] += 2.0
    clock.run_at(0.5)
    now[0] += 2.0
    assert clock.now_s() - begun == pytest.approx(3.0)
    clock.run_at(1.0)
    now[0] += 1.0
    assert clock.now_s() - begun == pytest.approx(4.0)


def test_no_time_is_lost_when_the_rate_changes() -> None:
    reads = [0.0]

    def ticking() -> float:
        reads.append(reads[-1] + 1.0)
        return reads[-1]

    clock = ProgressClock(ticking)
    begun_s = reads[-1]
    for _ in range(10):
        clock.run_at(1.0)
    assert clock.now_s() == reads[-1] - begun_s
