"""Quantities, quota and borrowing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.clusters.kueue.quotas import ClusterQueue, FlavorQuota, free_units, parse_queue, resource_amount
from joulery.domain.errors import DataError


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2.0), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("1e3", 1000.0), ("3k", 3000.0), (4, 4.0), ("+1", 1.0),
     (".5", 0.5), ("1E", 1e18), ("2E2", 200.0), ("0", 0.0)],
)  # fmt: skip
def test_quantities_of_kubernetes(text: object, value: float) -> None:
    assert resource_amount(text) == value


@pytest.mark.parametrize("text", ["", "two", "1 Gi", "1gi", "--1", None, "0x10", "1e", "nan", "inf"])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(DataError, match="not a quantity"):
        resource_amount(text)


def test_a_queue_without_the_resource_is_none_and_nonsense_is_refused() -> None:
    assert parse_queue({"metadata": {"name": "q"}, "spec": {}}, "nvidia.com/gpu") is None
    with pytest.raises(DataError):
        parse_queue({"spec": []}, "nvidia.com/gpu")


_QUEUES = st.lists(
    st.tuples(
        st.integers(0, 8), st.none() | st.integers(0, 8), st.none() | st.integers(0, 8), st.sampled_from(["", "c"])
    ),
    min_size=1,
    max_size=4,
)


@given(_QUEUES, st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_whatever_is_taken_from_what_is_free_fits_the_cohort(
    rows: list[tuple[int, int | None, int | None, str]], draws: list[int]
) -> None:
    """Taking free units one queue after another never exceeds a queue's limit nor a cohort's nominal quota."""
    queues = [
        ClusterQueue(
            f"q{at}", cohort, "",
            {"a": FlavorQuota(
                nominal, (math.inf if borrowing is None else borrowing) if cohort else 0.0,
                nominal if lending is None or not cohort else min(nominal, lending),
            )},
        )
        for at, (nominal, borrowing, lending, cohort) in enumerate(rows)
    ]  # fmt: skip
    used: dict[tuple[str, str], float] = {}
    for at, wanted in enumerate(draws):
        key = queues[at % len(queues)].name, "a"
        used[key] = used.get(key, 0.0) + min(float(wanted), free_units(queues, used)[key])
    for cohort in ("", "c"):
        members = [queue for queue in queues if queue.cohort == cohort]
        for queue in members:
            quota = queue.flavors["a"]
            assert used.get((queue.name, "a"), 0.0) <= quota.nominal + quota.borrowing
        if cohort:
            total = sum(queue.flavors["a"].nominal for queue in members)
            assert sum(used.get((queue.name, "a"), 0.0) for queue in members) <= total
    free = free_units(queues, used)
    assert all(value >= 0 for value in free.values())


def test_what_is_not_borrowable_stays_with_its_owner() -> None:
    keeps = ClusterQueue("keeps", "c", "", {"a": FlavorQuota(4, math.inf, 1)})
    wants = ClusterQueue("wants", "c", "", {"a": FlavorQuota(0, math.inf, 0)})
    assert free_units([keeps, wants], {}) == {("keeps", "a"): 4.0, ("wants", "a"): 1.0}
    assert free_units([keeps, wants], {("wants", "a"): 1.0}) == {("keeps", "a"): 3.0, ("wants", "a"): 0.0}
