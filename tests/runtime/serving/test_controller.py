import math
from dataclasses import replace

import numpy as np
import pytest

from joulery.app.runs.replay import decide_again
from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, DataError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.engine import (
    ModelKind,
    ModelRef,
    Outcome,
    QueuedRequest,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestRecord,
    Transition,
)
from joulery.domain.serving.service import Slice, Slo
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT
from joulery.runtime.serving.controller import ServiceObserver
from joulery.runtime.serving.layout_actuator import LayoutActuator, running_layout
from joulery.runtime.session.driver import LiveDriver
from joulery.runtime.session.history import POLICY, STEP, policy_entry, step_entry
from joulery.runtime.session.requests import RequestWindow, summarise
from tests.policies.serving.test_predictive_policy import ONE, TWO, policy

MODELS = {name: ModelRef(ModelKind.ONNX, f"{name}.onnx") for name in ("lite0", "lite1", "lite2")}


class PaperEngine:
    """Runs nothing, but remembers its target."""

    def __init__(self) -> None:
        self.views: list[ReplicaView] = []
        self.refuse = False

    def replicas(self) -> tuple[ReplicaView, ...]:
        return tuple(self.views)

    async def apply(self, target) -> Transition:
        if self.refuse:
            raise ActuationError("a replica died")
        before = [view.spec for view in self.views]
        self.views = [ReplicaView(f"r{k}", spec, ReplicaState.READY) for k, spec in enumerate(target)]
        started = tuple(spec for spec in target if spec not in before)
        return Transition(started, tuple(s for s in before if s not in target), (), 0.0, 0.25, 0.4, 0.3)


def record(end_s: float, latency_s: float = 0.01, **changes) -> RequestRecord:
    blank = RequestRecord(
        "photos", "lite2", "r0", end_s - latency_s, end_s - 0.009, end_s, Outcome.OK, 0.009, 0.009, 1, None
    )
    return blank._replace(**changes)


def layout(*pairs: tuple[str, Slice]) -> Layout:
    return Layout(Instance(variant, piece) for variant, piece in pairs)


def test_a_window_keeps_what_ended_lately():
    window = RequestWindow("photos", 2.0)
    for end_s in (1.0, 2.0, 3.0, 3.5):
        window.add(record(end_s))
    window.add(record(3.6, service="other"))
    assert [r.end_s for r in window.since(4.0)] == [2.0, 3.0, 3.5]
    assert [r.end_s for r in window.since(5.2)] == [3.5]
    assert window.since(9.0) == [] == window.since(4.0), "what was dropped stays dropped"


def test_a_summary_counts_answers_only():
    records = [record(1.0, 0.01 * k, variant="lite0" if k < 3 else "lite2") for k in range(1, 11)]
    records.append(record(1.0, 9.0, outcome=Outcome.OVERLOADED, variant=""))
    latency_s, attained, count, served = summarise(records, Slo(0.0501, 0.9))
    assert latency_s == pytest.approx(np.quantile(0.01 * np.arange(1, 11), 0.9))
    assert attained == 0.5 and count == 10 and served == {"lite0": 2, "lite2": 8}
    nothing = summarise(records[-1:], Slo(0.05))
    assert math.isnan(nothing[0]) and math.isnan(nothing[1]) and nothing[2:] == (0, {})


def observer(engine: PaperEngine, window: RequestWindow) -> ServiceObserver:
    return ServiceObserver(window, engine, Slo(0.1), lambda now_s: 100.0 + now_s, lambda: 42.0)


async def test_an_observation_has_requests_grid_power_and_the_running_layout():
    engine, window = PaperEngine(), RequestWindow("photos", 2.0)
    await LayoutActuator(engine, "photos", MODELS).carry_out(
        Decision(SET_LAYOUT, "photos", layout(("lite2", TWO)).names(), "p", "r")
    )
    window.add(record(7.0))
    for k in range(40):
        window.add(record(8.0 + 0.05 * k, 0.02))
    window.add(record(9.97, 0.5, outcome=Outcome.FAILED))
    seen = observer(engine, window).observe(10.0)
    assert (seen.now_s, seen.g_per_kwh, seen.power_w) == (10.0, 110.0, 42.0)
    assert seen.rate_rps == pytest.approx(20.0), "one arrived before the window; a failed request is demand too"
    assert (seen.requests, seen.served) == (40, {"lite2": 40}) and seen.latency_s == pytest.approx(0.02)
    assert seen.running == layout(("lite2", TWO))


class Overloaded(PaperEngine):
    """Answers 10 of the 100 requests that arrive each second."""

    def backlog(self):
        waiting = [QueuedRequest("photos", 7.0 + k / 100) for k in range(30, 300)]
        return (QueuedRequest("photos", 7.29, "lite2", 9.9), QueuedRequest("other", 1.0), *waiting)


def test_demand_counts_arrivals_when_the_service_is_overloaded():
    engine, window = Overloaded(), RequestWindow("photos", 3.0)
    for k in range(30):
        window.add(record(7.2 + k / 10, 7.2 + k / 10 - (7.0 + k / 100)))
    seen = observer(engine, window).observe(10.0)
    assert seen.rate_rps == pytest.approx(100.0, abs=1.0), "not the 10 a second that are answered"
    assert seen.arrival_rps == pytest.approx(100.0, abs=1.0)
    assert (seen.queued, seen.oldest_wait_s) == (270, pytest.approx(2.7))
    assert seen.latency_s > 2.0


def test_a_burst_shows_within_two_seconds_and_a_low_rate_is_no_noise():
    window = RequestWindow("photos", 10.0)
    for k in range(50):
        window.add(record(0.2 * k, 0.0))
    assert window.recent_rps(10.0) == pytest.approx(5.0, abs=0.5)
    for k in range(200):
        window.add(record(10.0 + k / 100, 0.0))
    assert window.recent_rps(12.0) == pytest.approx(100.0, abs=1.0)
    assert window.rate_rps(12.0) < 30.0
    slow = RequestWindow("photos", 10.0)
    for k in range(11):
        slow.add(record(float(k), 0.0))
    assert slow.recent_rps(10.5) == slow.rate_rps(10.5) == 1.0
    assert math.isnan(RequestWindow("photos", 10.0).recent_rps(5.0))


def test_a_window_that_has_hardly_begun_gives_no_rate():
    window = RequestWindow("photos", 2.0)
    assert math.isnan(window.rate_rps(10.0))
    window.add(record(10.4, 0.4))
    window.add(record(11.0, 0.4))
    assert math.isnan(window.rate_rps(11.9)) and window.rate_rps(12.1) == 0.5
    assert window.rate_rps(20.0) == 0.0, "a service that is not asked any more has no demand"


def test_draining_replicas_and_other_services_do_not_run():
    engine = PaperEngine()
    assert running_layout(engine, "photos") is None
    spec = ReplicaSpec("photos", "lite0", ONE, MODELS["lite0"])
    engine.views = [
        ReplicaView("a", spec, ReplicaState.READY),
        ReplicaView("b", replace(spec, variant="lite1"), ReplicaState.RESTARTING),
        ReplicaView("c", replace(spec, variant="lite2"), ReplicaState.DRAINING),
        ReplicaView("d", replace(spec, service="other"), ReplicaState.READY),
    ]
    assert running_layout(engine, "photos") == layout(("lite0", ONE), ("lite1", ONE))


async def test_other_services_are_left_as_they_are():
    engine = PaperEngine()
    other = ReplicaSpec("other", "big", ONE, ModelRef(ModelKind.ONNX, "big.onnx"))
    engine.views = [ReplicaView("a", other, ReplicaState.READY)]
    outcome, said = await LayoutActuator(engine, "photos", MODELS).carry_out(
        Decision(SET_LAYOUT, "photos", layout(("lite2", ONE), ("lite0", ONE)).names(), "p", "r")
    )
    assert sorted(view.spec.variant for view in engine.views) == ["big", "lite0", "lite2"]
    assert outcome == "applied"
    assert said == "lite0+lite2 took over after 0.25 s, 2 replicas started, 0 stopped, 0.30 CPU seconds"


async def test_keeping_a_layout_touches_nothing():
    engine = PaperEngine()
    engine.refuse = True
    _, said = await LayoutActuator(engine, "photos", MODELS).carry_out(
        Decision(KEEP_LAYOUT, "photos", layout(("lite1", TWO)).names(), "p", "r")
    )
    assert said == "lite1 (2 cores) runs already"


@pytest.mark.slow
async def test_a_day_of_the_controller_replays_from_its_log_alone():
    engine, log, records = PaperEngine(), [], []
    window = RequestWindow("photos", 2.0)
    chosen = policy(requests=200)
    log.append({"kind": POLICY, **policy_entry(chosen)})
    grid = 190 + 180 * np.sin(np.arange(60) / 9.0)
    watched = ServiceObserver(
        window, engine, chosen.objectives.slo, lambda now_s: float(grid[int(now_s)]), lambda: 42.0
    )
    loop = LiveDriver(
        chosen,
        watched.observe,
        LayoutActuator(engine, "photos", MODELS).carry_out,
        watch=lambda seen, step: log.append({"kind": STEP, **step_entry("photos", seen, step)}),
        record=records.append,
    )
    for second in range(60):
        engine.refuse = 15 <= second < 40
        for k in range(50):
            window.add(record(second + k / 50, 0.01 + 0.0002 * (k % 7) * second))
        await loop.step(float(second) + 0.99)
    kinds = {entry.decision.kind for entry in records}
    assert kinds == {SET_LAYOUT, KEEP_LAYOUT} and len(records) > 10
    assert {"applied", "failed"} == {entry.outcome for entry in records}
    assert running_layout(engine, "photos") == loop.state.layout, "what failed was tried again"
    replayed = decide_again(log)
    assert (replayed.steps, replayed.decisions, replayed.differences) == (60, len(records), ())
    tampered = [dict(entry) for entry in log]
    at = next(k for k in range(30, 60) if tampered[k]["decisions"])
    tampered[at] = {**tampered[at], "observation": {**tampered[at]["observation"], "g_per_kwh": 999.0}}
    assert decide_again(tampered).differences[0].t_s == at - 0.01, "an altered observation is noticed"


async def test_what_is_asked_for_changes_while_it_runs_and_the_log_replays():
    engine, log, records = PaperEngine(), [], []
    window, chosen = RequestWindow("photos", 2.0), policy(requests=200)
    log.append({"kind": POLICY, **policy_entry(chosen)})
    loop = LiveDriver(
        chosen,
        ServiceObserver(window, engine, chosen.objectives.slo, lambda now_s: 400.0, lambda: 42.0).observe,
        LayoutActuator(engine, "photos", MODELS).carry_out,
        watch=lambda seen, step: log.append({"kind": STEP, **step_entry("photos", seen, step)}),
        record=records.append,
    )
    await loop.step(1.0)
    assert set(loop.state.layout.counts) == {"lite0"}
    terms = replace(chosen.objectives, minimum_accuracy_ratio=0.776)
    loop.policy = replace(chosen, objectives=terms)
    assert loop.policy.objectives == terms
    log.append({"kind": POLICY, **policy_entry(loop.policy)})
    await loop.step(2.0)
    assert set(loop.state.layout.counts) == {"lite2"} and records[-1].decision.cause == "terms"
    replayed = decide_again(log)
    assert (replayed.steps, replayed.decisions, replayed.differences) == (2, 2, ())


def test_a_log_without_a_policy_or_with_damage_is_one_clear_error():
    with pytest.raises(DataError, match="names no policy"):
        decide_again([{"kind": "tick"}])
    with pytest.raises(DataError, match="cannot be replayed"):
        decide_again([{"kind": STEP, "service": "photos", "observation": {}}])
    with pytest.raises(DataError, match="cannot be replayed"):
        decide_again([{"no": "kind"}])
