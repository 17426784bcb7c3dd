import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.policies.placement.pipelines.by_sensitivity import (
    Partition,
    PlacementLimits,
    improve_placement,
    place_partitions,
    scatter,
)
from tests.data_folder import data_folder


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[Partition], PlacementLimits]:
    partitions = [
        Partition(
            number,
            draw(st.integers(0, 4)),
            draw(st.floats(-0.1, 2.1)),
            draw(st.floats(0.1, 4)),
            draw(st.floats(0.1, 3)),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    devices = draw(st.integers(1, 5))
    return partitions, PlacementLimits((draw(st.floats(1, 20)),) * devices, draw(st.integers(1, 3)))


def respects(partitions: list[Partition], assignment: dict, limits: PlacementLimits) -> bool:
    used = np.zeros(len(limits.capacity_bytes))
    devices: dict = {}
    for partition in partitions:
        used[assignment[partition.key]] += partition.memory_bytes
        devices.setdefault(partition.model, set()).add(assignment[partition.key])
    memory = bool(np.all(used <= np.array(limits.capacity_bytes) * (1 + 1e-12)))
    return memory and all(len(d) <= limits.devices_per_model for d in devices.values())


@given(instances())
def test_a_placement_is_whole_and_feasible_or_an_error(instance: tuple[list[Partition], PlacementLimits]) -> None:
    partitions, limits = instance
    try:
        assignment = place_partitions(partitions, limits)
    except InfeasibleError as error:
        assert error.binding in {"memory", "devices per model"}
        return
    assert set(assignment) == {partition.key for partition in partitions}
    assert respects(partitions, assignment, limits)
    better = improve_placement(partitions, assignment, limits)
    assert respects(partitions, better, limits)
    assert scatter(partitions, better) <= scatter(partitions, assignment) + 1e-9


def test_golden_placements() -> None:
    cases = json.loads((data_folder("muserve") / "cases_alg2_placement_examples.json").read_text())
    for case in cases:
        partitions = [Partition(p["id"], p["model"], p["score"], p["mem"], p["weight"]) for p in case["partitions"]]
        limits = PlacementLimits((case["capacity"],) * case["n_devices"], case["CT"], case["tau_empty"])
        if case["assignment"] is None:
            with pytest.raises(InfeasibleError):
                place_partitions(partitions, limits)
            continue
        assignment = place_partitions(partitions, limits)
        assert assignment == {int(key): device for key, device in case["assignment"].items()}
        assert scatter(partitions, assignment) == pytest.approx(case["within_device_scatter"], abs=1e-6)


def test_moves_and_swaps_bring_the_scatter_well_below_the_greedy_one() -> None:
    rng = np.random.default_rng(7)
    greedy = searched = 0.0
    for _ in range(12):
        kinds = rng.choice([0.0, 0.9, 2.0], 16) + rng.normal(0, 0.08, 16)
        partitions = [
            Partition(i, i % 5, float(kinds[i]), float(rng.uniform(0.3, 4)), float(rng.uniform(0.3, 3)))
            for i in range(16)
        ]
        limits = PlacementLimits((14.0,) * 4, 3)
        first = place_partitions(partitions, limits)
        greedy += scatter(partitions, first)
        searched += scatter(partitions, improve_placement(partitions, first, limits))
    assert searched <= 0.70 * greedy


def test_a_swap_happens_where_no_move_fits() -> None:
    partitions = [
        Partition("a", 0, 2.0, 1, 1),
        Partition("b", 1, 0.0, 1, 1),
        Partition("c", 2, 2.0, 1, 1),
        Partition("d", 3, 0.0, 1, 1),
    ]
    limits = PlacementLimits((2.0, 2.0))
    better = improve_placement(partitions, {"a": 0, "b": 0, "c": 1, "d": 1}, limits)
    assert scatter(partitions, better) == pytest.approx(0.0, abs=1e-12)


def test_the_model_that_is_too_wide_is_named() -> None:
    partitions = [Partition(f"p{i}", "m", 1.0, 1.0, 1.0) for i in range(3)]
    with pytest.raises(InfeasibleError, match="p2 of model m") as caught:
        place_partitions(partitions, PlacementLimits((1.0, 1.0, 1.0), devices_per_model=2))
    assert caught.value.binding == "devices per model"
    with pytest.raises(InfeasibleError) as caught:
        place_partitions(partitions, PlacementLimits((1.0, 1.0)))
    assert caught.value.binding == "memory"


def test_bad_partitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight"):
        Partition("a", 0, 1.0, 1.0, 0.0)
    with pytest.raises(ConfigError, match="memory"):
        Partition("a", 0, 1.0, -1.0, 1.0)
    with pytest.raises(ConfigError, match="distinct"):
        place_partitions([Partition("a", 0, 1.0, 1.0, 1.0)] * 2, PlacementLimits((9.0,)))
