"""Joules of machines that several nodes share: divided, and none lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.cluster_nodes import NodeReading, by_node, machine_parts
from joulery.domain.quality import Quality

JOULES = st.floats(0.0, 1e9)


def reading(machine: str, energy_j: float, own_j: float, opened: str = "1", covered_s: float = 1.0) -> NodeReading:
    return NodeReading(machine, energy_j, own_j, covered_s, Quality.MODELLED, ("cpu-model",), opened)


@given(JOULES, st.lists(JOULES, min_size=1, max_size=5))
def test_the_nodes_of_a_machine_sum_to_it(total_j, own_j):
    parts = machine_parts(total_j, own_j)
    assert math.fsum(whole for whole, _ in parts) == pytest.approx(total_j, rel=1e-9, abs=1e-9)
    assert all(0 <= own <= whole * (1 + 1e-12) for whole, own in parts)
    if math.fsum(own_j) <= total_j:
        assert [own for _, own in parts] == own_j


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.sampled_from("xyz"), JOULES, JOULES), min_size=1))
def test_the_nodes_of_a_cluster_sum_to_its_machines(nodes):
    readings = {name: reading(*values) for name, values in nodes.items()}
    parts = by_node(readings)
    machines = {each.machine: each.energy_j for each in reversed(list(readings.values()))}
    assert parts.keys() == readings.keys()
    assert math.fsum(whole for whole, _ in parts.values()) == pytest.approx(
        math.fsum(machines.values()), rel=1e-9, abs=1e-9
    )


def test_a_node_alone_has_all_of_its_machine_and_equal_rest_is_shared():
    assert by_node({"a": reading("x", 10.0, 4.0)}) == {"a": (10.0, 4.0)}
    assert by_node({"a": reading("x", 10.0, 4.0), "b": reading("x", 11.0, 2.0)}) == {"a": (6.0, 4.0), "b": (4.0, 2.0)}


def test_meters_that_were_opened_anew_count_from_zero():
    before = reading("x", 10.0, 4.0, covered_s=5.0)
    since = reading("x", 12.0, 4.5, covered_s=6.0).since(before)
    assert since is not None and (since.energy_j, since.own_j, since.covered_s) == (2.0, 0.5, 1.0)
    assert reading("x", 12.0, 4.5, opened="2").since(before) is None and before.since(None) is None
