import time
from pathlib import Path

import joulery
from joulery.steady_time import unix_s

SOURCE = Path(joulery.__file__).parent
ONE_TIMELINE = ("adapters/engines", "runtime/serving", "gateway")
"""Requests, decisions and readings of a run are compared by their times there."""
NO_TIMELINE = ("_created_s = ",)


def test_it_is_the_wall_clock_until_that_steps(monkeypatch):
    assert abs(unix_s() - time.time()) < 60.0, "but for what the machine's clock has moved since the tests began"
    before_s = unix_s()
    monkeypatch.setattr(time, "time", lambda: before_s - 3600.0)
    assert before_s <= unix_s() < before_s + 60.0


def test_nothing_that_a_run_compares_is_stamped_with_a_clock_that_steps():
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for part in ONE_TIMELINE
        for path in sorted((SOURCE / part).rglob("*.py"))
        for line in path.read_text().splitlines()
        if "time.time" in line and not any(known in line for known in NO_TIMELINE)
    ]
    assert found == []
