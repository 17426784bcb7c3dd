import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.clock_profile import ScoredOperator
from joulery.domain.trace.operators import OperationCost, OperatorKind
from joulery.perf.catalog.architectures import operations_of
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.sensitivity import emulated_profile
from joulery.policies.placement.pipelines.sharding import Cut, Link, choices_of, shard, solve, turning_s

LINK = Link(1e9, 1e-5)


def operator(kind=OperatorKind.DOT, time_s=1.0, output_bytes=1e6, weights=1e6, name="op", count=1.0) -> ScoredOperator:
    cost = OperationCost(name, 1.0, 1.0, count, "t", "forward", weights, output_bytes, kind)
    return ScoredOperator(cost, 1.0, time_s)


kinds = st.sampled_from([OperatorKind.DOT, OperatorKind.ELEMENTWISE, OperatorKind.NORM, OperatorKind.SOFTMAX])
operators = st.builds(
    operator,
    kind=kinds,
    time_s=st.floats(1e-4, 1e-2),
    output_bytes=st.floats(1e3, 1e7),
    weights=st.sampled_from([0.0, 1e6]),
    count=st.sampled_from([1.0, 64.0]),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(operators, min_size=1, max_size=5), st.sampled_from([2, 4]), st.sampled_from([1, 8]))
def test_the_cheapest_of_all_cuts_is_found(chain, devices, batch) -> None:
    options = [choices_of(each, devices, 1e-5, LINK, batch) for each in chain]
    found = solve(options, chain, devices, LINK)
    cheapest = min(cost_of(chain, picked, devices) for picked in itertools.product(*options))
    assert found.total_s == pytest.approx(cheapest, rel=1e-12)
    assert cost_of(chain, found.choices, devices) == pytest.approx(found.total_s, rel=1e-9)


def cost_of(chain, picked, devices) -> float:
    total, leaves, size, count = 0.0, Cut.WHOLE, 0.0, 0.0
    for each, choice in zip(chain, picked, strict=True):
        total += choice.time_s + count * turning_s(leaves, choice.needs, size, devices, LINK)
        leaves, size, count = choice.leaves, each.cost.output_bytes, each.cost.count
    return total + count * turning_s(leaves, Cut.WHOLE, size, devices, LINK)


def test_two_products_are_cut_by_columns_and_then_by_what_they_sum() -> None:
    up, act, down = (
        operator(name="layer0.up"),
        operator(OperatorKind.ELEMENTWISE, weights=0.0, name="layer0.act"),
        operator(name="layer0.down"),
    )
    cut = shard([up, act, down], 2, 1e-5, LINK)
    assert [(choice.needs, choice.leaves) for choice in cut.choices] == [
        (Cut.WHOLE, Cut.COLUMNS),
        (Cut.COLUMNS, Cut.COLUMNS),
        (Cut.COLUMNS, Cut.WHOLE),
    ]
    assert [choice.weight_ratio for choice in cut.choices] == [0.5, 1.0, 0.5]
    assert cut.total_s == pytest.approx(1.5 + LINK.reduce_s(1e6, 2))


def test_a_slow_link_leaves_everything_whole() -> None:
    cut = shard([operator(), operator()], 4, 1e-5, Link(1e3, 1.0))
    assert {choice.leaves for choice in cut.choices} == {Cut.WHOLE}
    assert cut.total_s == 2.0


def test_one_device_cuts_nothing_and_launches_do_not_shrink() -> None:
    assert shard([operator()], 1, 1e-5, LINK).total_s == 1.0
    launched = operator(time_s=64e-5, count=64.0)
    assert shard([launched], 4, 1e-5, LINK).total_s == pytest.approx(64e-5)


def test_a_published_model_gets_faster_and_lighter() -> None:
    profile = emulated_profile("BERT-base", operations_of("BERT-base"), V100)
    one, two, four = (shard(profile.operators, devices, 1e-5, Link()) for devices in (1, 2, 4))
    assert one.total_s == pytest.approx(profile.latency_s[-1])
    assert one.total_s > two.total_s > four.total_s > one.total_s / 4
    held = np.array([choice.weight_ratio for choice in four.choices])
    weights = np.array([each.cost.parameter_bytes for each in profile.operators])
    assert held @ weights < 0.6 * weights.sum()


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="a stage needs devices"):
        shard([operator()], 0, 1e-5, LINK)
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        Link(0.0)
