"""The exporter of one node, on an injected clock."""

import math

import numpy as np
import pytest

from joulery.adapters.meters.fake import Script
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.energy.workload import ENDED, OTHER, ModelCounters, NodeWorkload
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.exporting.intensity_feed import HOLD_S, IntensityFeed
from joulery.runtime.exporting.node import ENDED_AFTER_S, MAX_WORKLOADS
from tests.runtime.exporting.nodes import START_S, Node, StatedEngine

JOB, WEB = NodeWorkload("slurm", "7"), NodeWorkload("service", "web.service")


def joules(node, workload, device="cpu"):
    return sum(total.energy_j for key, total in node.book.workloads.items() if key[:2] == (workload, device))


def divided(node):
    books = (node.book.workloads, node.book.idle, node.book.unattributed)
    return math.fsum(total.energy_j for book in books for total in book.values())


def test_workloads_have_their_share_above_idle():
    node = Node()
    node.use.processes = {1: (JOB, 3.0), 2: (WEB, 1.0)}
    node.run(10)
    assert (joules(node, JOB), joules(node, WEB)) == pytest.approx((450.0, 150.0))
    assert node.book.idle["cpu", Quality.ASSUMED].energy_j == pytest.approx(400.0)
    assert divided(node) == pytest.approx(1000.0)


def test_a_counter_that_is_reset_leaves_its_interval_out_and_is_said():
    node = Node(Script(((0.0, 100.0),), start_j=5000.0))
    node.use.processes = {1: (JOB, 40.0)}
    node.run(10)
    node.meter._scripts = (Script(((0.0, 100.0),)),)  # the driver was loaded again
    node.run(10)
    assert divided(node) == pytest.approx(1000.0)
    assert math.isnan(node.exporter.readers.channels.channels[0].power_w)
    node.run(10)
    assert divided(node) == pytest.approx(2000.0)
    assert sum("was reset" in text for text in node.said) == 1
    assert node.exporter.readers.channels.channels[0].faults == 1


def test_a_silent_counter_makes_up_for_it_and_a_silent_power_meter_does_not():
    counter = Node(Script(((0.0, 100.0),), silent_s=((15.0, 25.0),)))
    power = Node(Script(((0.0, 100.0),), silent_s=((15.0, 25.0),), kind=ReadingKind.POWER))
    for node in (counter, power):
        for _ in range(4):
            node.run(10)
    assert divided(counter) == pytest.approx(4000.0)
    assert divided(power) == pytest.approx(2000.0)
    assert sum("gives nothing" in text for text in counter.said) == 1


def test_power_between_renewals_of_a_counter_is_held():
    node = Node()
    (channel,) = node.exporter.readers.channels.channels
    slow = channel.channel.__class__("gpu:0", "board", ReadingKind.COUNTER, "dcgm", Quality.MEASURED, update_s=30.0)
    now = channel.__class__(slow)
    shown = []
    for at_s, value in ((0, 0.0), (10, 0.0), (20, 0.0), (30, 3000.0), (40, 3000.0), (60, 6000.0)):
        now.advance(value, float(at_s))
        shown.append(now.power_w)
    assert shown[3:] == pytest.approx([100.0] * 3) and all(math.isnan(watts) for watts in shown[:3])


def test_workloads_are_bounded_and_small_commands_have_no_name():
    node = Node()
    node.use.processes = {pid: (NodeWorkload("service", f"s{pid}"), 0.01) for pid in range(2 * MAX_WORKLOADS)}
    node.use.processes[10_000] = (NodeWorkload("process", "tiny"), 0.01)
    node.run(10)
    shown = {key[0] for key in node.book.workloads}
    assert len(shown) == MAX_WORKLOADS + 1 and OTHER in shown
    assert NodeWorkload("process", "tiny") not in shown
    assert divided(node) == pytest.approx(1000.0)


def test_a_workload_that_vanished_keeps_its_joules_in_the_sum():
    node = Node()
    node.use.processes = {1: (JOB, 4.0)}
    node.run(10)
    before = joules(node, JOB)
    node.use.processes = {}
    node.run(10)
    assert joules(node, JOB) == before
    node.run(ENDED_AFTER_S)
    assert (joules(node, JOB), joules(node, ENDED)) == (0.0, before)


def gpu(held, **more):
    return Node(Script(((0.0, 200.0),), device="gpu:0"), held={"gpu:0": held}, **more)


def test_a_board_is_its_holders_and_one_without_a_known_holder_is_unattributed():
    node = gpu({1: 0.25, 2: 0.75})
    node.use.processes = {1: (JOB, 0.0), 2: (WEB, 0.0)}
    node.run(10)
    assert (joules(node, JOB, "gpu:0"), joules(node, WEB, "gpu:0")) == (500.0, 1500.0)
    unknown = gpu(None)
    unknown.run(10)
    assert unknown.book.unattributed["gpu:0", Quality.ASSUMED].energy_j == 2000.0


def drawing(*steps, held, engines=(), **more):
    """A node with one board that draws these watts from these seconds on."""
    node = Node(Script(tuple(steps), device="gpu:0"), held={"gpu:0": held}, engines=engines, **more)
    node.use.processes = dict.fromkeys((held or {}), (JOB, 0.0))
    return node


def idle_j(node):
    return node.book.idle["gpu:0", Quality.ASSUMED].energy_j


def test_a_single_holder_does_not_pay_for_the_idle_board():
    node = drawing((0.0, 60.0), (10.0, 300.0), held={1: 1.0})
    node.meter.computed = {"gpu:0": False}
    node.run(10)
    assert (joules(node, JOB, "gpu:0"), idle_j(node)) == (0.0, 600.0)
    node.meter.computed = {"gpu:0": True}
    node.run(10)
    assert (joules(node, JOB, "gpu:0"), idle_j(node)) == (2400.0, 1200.0)
    assert divided(node) == pytest.approx(3600.0)


def test_idle_power_of_a_board_is_learned_while_no_process_is_there_and_only_falls():
    node = drawing((0.0, 40.0), (10.0, 200.0), (20.0, 55.0), (30.0, 30.0), held={})
    for _ in range(2):  # 200 W without a process are no sign of work
        node.run(10)
    node.meter.held = {"gpu:0": {1: 1.0}}
    node.use.processes = {1: (JOB, 0.0)}
    node.run(10)
    assert (joules(node, JOB, "gpu:0"), idle_j(node)) == (150.0, 2800.0)
    node.run(10)
    assert joules(node, JOB, "gpu:0") == 150.0


@pytest.mark.parametrize("computed", [{}, {"gpu:0": None}, {"gpu:0": True}])
def test_where_idle_power_is_not_known_the_holder_has_the_board(computed):
    node = drawing((0.0, 200.0), held={1: 1.0})
    node.meter.computed = computed
    node.run(10)
    assert (joules(node, JOB, "gpu:0"), idle_j(node)) == (2000.0, 0.0)


def test_what_an_idle_board_draws_is_in_no_token():
    engine = StatedEngine(pid=1, counted=answered(0.0, 0.0))
    node = drawing((0.0, 100.0), (10.0, 300.0), held={1: 1.0}, engines=(engine,))
    node.meter.computed = {"gpu:0": False}
    node.run(10)
    node.meter.computed = {"gpu:0": True}
    engine.counted = answered(1.0, 100.0)
    node.run(10)
    (watch,) = node.exporter.engines
    assert watch.book.per_unit("m", node.now_s).output_token_j == 20.0
    assert (watch.book.idle.energy_j, watch.book.total.energy_j) == (2000.0, 4000.0)


def test_counters_of_rays_agent_are_not_divided_by_the_agents_joules():
    engine = StatedEngine(pid=50, counted=answered(0.0, 0.0), by_agent=True)
    node = gpu({60: 1.0}, engines=(engine,))
    node.use.processes = {50: (WEB, 1.0), 60: (JOB, 1.0)}
    for tokens in (100.0, 200.0):
        engine.counted = answered(1.0, tokens)
        node.run(10)
    assert node.exporter.engines[0].book.total.energy_j == 0.0
    assert sum("Ray's agent" in text for text in node.said) == 1
    named = gpu({60: 1.0}, engines=(StatedEngine(counted=answered(0.0, 0.0), by_agent=True),), gpus=("gpu:0",))
    named.run(10)
    assert named.exporter.engines[0].book.total.energy_j == 2000.0


def answered(requests, tokens):
    return {"m": ModelCounters(requests, 0.0, tokens)}


def test_joules_per_token_of_an_engine_found_by_its_process():
    engine = StatedEngine(pid=50, counted=answered(0.0, 0.0), active=1.0)
    node = gpu({51: 1.0}, engines=(engine,))
    node.use.processes = {50: (JOB, 0.0), 51: (JOB, 0.0)}
    node.use.families = {50: frozenset({50, 51})}
    engine.counted = answered(4.0, 500.0)
    node.run(10)
    (watch,) = node.exporter.engines
    per = watch.book.per_unit("m", node.now_s)
    assert (per.output_token_j, per.request_j) == (4.0, 500.0)


def test_an_engine_whose_gpus_are_not_known_has_no_joules_and_that_is_said_once():
    engine = StatedEngine(pid=50, counted=answered(0.0, 0.0))
    node = gpu(None, engines=(engine,))
    node.use.processes = {50: (JOB, 1.0)}
    for tokens in (500.0, 900.0):
        engine.counted = answered(1.0, tokens)
        node.run(10)
    (watch,) = node.exporter.engines
    assert watch.book.models == {} and watch.book.total.energy_j == 0.0
    assert sum("name its GPUs" in text for text in node.said) == 1


def test_an_engine_with_its_own_gpus_has_them_whole():
    engine = StatedEngine(counted=answered(0.0, 0.0))
    node = gpu(None, engines=(engine,), gpus=("gpu:0",))
    engine.counted = answered(1.0, 100.0)
    node.run(10)
    assert node.exporter.engines[0].book.per_unit("m", node.now_s).output_token_j == 20.0


def test_an_engine_that_is_restarted_and_one_that_is_away_are_said_once():
    engine = StatedEngine(counted=answered(9.0, 900.0))
    node = gpu(None, engines=(engine,), gpus=("gpu:0",))
    engine.down = True
    node.run(10)
    node.run(10)
    assert not node.exporter.engines[0].up
    engine.down, engine.counted = False, answered(1.0, 10.0)
    node.run(10)
    (watch,) = node.exporter.engines
    assert watch.up and watch.book.restarts == 1 and watch.book.models == {}
    assert sum("does not answer" in text for text in node.said) == 1
    assert sum("started again" in text for text in node.said) == 1


def series(g_per_kwh, start_s=START_S, step_s=1800.0):
    edges = start_s + step_s * np.arange(len(g_per_kwh) + 1)
    return CarbonSeries("GB", edges, g_per_kwh, source="a test")


def test_grams_follow_the_intensity_and_unknown_joules_are_counted():
    feed = IntensityFeed(lambda now_s: series([360.0]), lambda: START_S)
    feed.first()
    node = Node(intensity=feed)
    node.use.processes = {1: (JOB, 4.0)}
    node.run(10)
    feed.series = None
    node.run(10)
    (total,) = node.book.devices.values()
    assert (total.carbon_g, total.unknown_j) == pytest.approx((0.1, 1000.0))


def test_the_last_intensity_is_held_for_an_hour():
    feed = IntensityFeed(lambda now_s: series([100.0, 200.0]), lambda: START_S)
    assert math.isnan(feed.at(START_S))
    feed.first()
    shown = [feed.at(START_S + after_s) for after_s in (-1.0, 0.0, 1800.0, 3600.0 + HOLD_S - 1, 3600.0 + HOLD_S)]
    assert shown == pytest.approx([math.nan, 100.0, 200.0, 200.0, math.nan], nan_ok=True)


def test_a_source_that_fails_is_said_once_and_a_wrong_flag_at_once():
    answers = [DataError("no net"), DataError("no net"), series([1.0])]

    def ask(now_s):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    feed = IntensityFeed(ask, lambda: START_S)
    feed.first()
    feed.first()
    assert len(feed.notes()) == 1
    feed.first()
    assert feed.notes() == ["the carbon intensity is known again"]
    answers.append(ConfigError("no such zone"))
    with pytest.raises(ConfigError):
        feed.first()
