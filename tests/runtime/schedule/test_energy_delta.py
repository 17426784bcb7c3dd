"""Every joule is counted once, by any number of readers."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.cluster import JobEnergy
from joulery.domain.quality import Quality
from joulery.runtime.schedule.energy import NO_TOTALS, SourceTotal, energy_delta


def booked(*totals: tuple[str, float]) -> tuple[list[float], Mapping[str, SourceTotal]]:
    """What is booked look by look, where slots draw half."""
    seen, joules = NO_TOTALS, []
    for source, energy_j in totals:
        grown_j, slot_j, seen = energy_delta(seen, JobEnergy(energy_j, energy_j / 2, Quality.MEASURED, source))
        assert slot_j == pytest.approx(grown_j / 2)
        joules.append(grown_j)
    return joules, seen


def test_what_a_total_grew_by_and_a_counter_that_starts_anew() -> None:
    assert booked(("a", 10.0), ("a", 10.0), ("a", 25.0))[0] == [10.0, 0.0, 15.0]
    assert booked(("a", 10.0), ("a", 4.0), ("a", 5.0))[0] == [10.0, 4.0, 1.0]
    assert booked(("a", 10.0), ("b", 4.0), ("b", 6.0))[0] == [10.0, 4.0, 2.0]


def test_either_total_that_falls_starts_both_anew() -> None:
    _, _, seen = energy_delta(NO_TOTALS, JobEnergy(10.0, 8.0, Quality.MEASURED, "a"))
    assert energy_delta(seen, JobEnergy(12.0, 3.0, Quality.MEASURED, "a"))[:2] == (12.0, 3.0)
    assert energy_delta(seen, JobEnergy(9.0, 8.5, Quality.MEASURED, "a"))[:2] == (9.0, 8.5)


def test_a_source_that_is_back_adds_what_was_not_booked_in_its_place() -> None:
    # Measured 100 J, then away; 30 J assumed meanwhile; back with 180 J: 80 J were drawn, 30 are booked.
    assert booked(("agent", 100.0), ("stated", 10.0), ("stated", 30.0), ("agent", 180.0))[0] == [
        100.0,
        10.0,
        20.0,
        50.0,
    ]
    # Assumed too much: nothing more is booked until the measurement has caught up.
    joules, seen = booked(("agent", 100.0), ("stated", 90.0), ("agent", 150.0), ("agent", 170.0), ("agent", 200.0))
    assert joules == [100.0, 90.0, 0.0, 0.0, 10.0] and seen["agent"] == SourceTotal(200.0, 100.0)


def test_only_so_many_sources_are_remembered_the_latest() -> None:
    _, seen = booked(*((f"stated-{at}", 1.0) for at in range(20)))
    assert list(seen) == [f"stated-{at}" for at in range(12, 20)]


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 50.0), st.floats(0.0, 50.0)), max_size=30))
def test_once_the_measuring_source_is_back_the_sum_is_its_total_or_what_was_assumed_too_much(
    looks: list[tuple[bool, float, float]],
) -> None:
    measured, assumed, totals = 0.0, 0.0, []
    for away, really_j, stated_j in looks:
        measured += really_j
        assumed += stated_j if away else 0.0
        totals.append(("stated", assumed) if away else ("agent", measured))
    joules, seen = booked(("agent", 0.0), *totals, ("agent", measured))
    assert sum(joules) == pytest.approx(measured + seen["agent"].beside_j)
    assert all(one >= 0 for one in joules)
