"""A session's control: which mode touches the engine, and what is recorded of it."""

import time

import pytest

from joulery.app.serving.service import choose
from joulery.config.site import Mode
from joulery.runtime.serving.controller import PolicyControl, Revision, queue_limit
from joulery.runtime.serving.driver import ADVISED, APPLIED
from joulery.runtime.serving.history import DECISIONS_KEPT, WARNINGS_KEPT, SessionHistory
from joulery.runtime.serving.intensity import LiveIntensity
from joulery.runtime.serving.requests import RequestWindow
from joulery.runtime.serving.running_service import RunningService
from joulery.store.run.directory import create_run, open_run
from tests.app.serving.test_service import opened, profile
from tests.runtime.serving.test_controller import PaperEngine


class LimitedEngine(PaperEngine):
    """Runs nothing; remembers the limits of its queues."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, int | None] = {}

    def limit_queue(self, service, waiting):
        self.limits[service] = waiting


@pytest.fixture
def history(tmp_path):
    with create_run(tmp_path / "run", kind="up") as writer:
        yield SessionHistory(writer)


def control(tmp_path, history, mode: Mode) -> tuple[PolicyControl, RunningService, LimitedEngine]:
    site, config, setup = opened(tmp_path)
    chosen = choose(site, config, setup, profile())
    one = RunningService(setup, chosen, profile(), RequestWindow("sums", 4.0))
    engine = LimitedEngine()
    grid = LiveIntensity(None, lambda section: pytest.fail("no grid"), time.time)
    return PolicyControl({"sums": one}, engine, history, grid, mode, 1.0), one, engine


async def test_acting_runs_the_first_layout_and_limits_the_queue(tmp_path, history):
    made, one, engine = control(tmp_path, history, Mode.ACT)
    await made.start()
    assert engine.limits == {"sums": queue_limit(one.chosen)} and engine.limits["sums"] > 0
    assert len(one.layouts) == 1 and one.advised is None and not made.on_trial
    assert [record.outcome for record in history.decisions] == [APPLIED]
    assert [entry["kind"] for entry in open_run(history.writer.path).log()] == ["policy", "step", "decision"]


async def test_advice_runs_the_baseline_and_refuses_no_request(tmp_path, history):
    made, one, engine = control(tmp_path, history, Mode.ADVISE)
    await made.start()
    assert engine.limits == {}
    assert [layout for _, layout in one.layouts] == [one.chosen.base] and one.advised is not None
    assert [record.outcome for record in history.decisions] == [ADVISED]


async def test_a_changed_slo_changes_policy_and_queue(tmp_path, history):
    made, one, engine = control(tmp_path, history, Mode.ACT)
    await made.start()
    wide = engine.limits["sums"]
    site, config, setup = opened(tmp_path, {"500 ms": "50 ms"})
    tight = choose(site, config, setup, profile()).policy
    made.revise(Revision("sums", tight, setup.slo))
    assert one.setup.slo.latency_s == 0.05 and one.chosen.policy is tight and made.drivers[0].policy is tight
    assert 0 < engine.limits["sums"] < wide / 5


def test_a_history_keeps_the_latest_and_logs_all(tmp_path, history):
    from joulery.domain.decisions import Decision
    from joulery.domain.serving.timeline import DecisionRecord

    seen = []
    history.on_decision(seen.append)
    for k in range(DECISIONS_KEPT + 50):
        history.add_decision(DecisionRecord(float(k), Decision("keep_layout", "sums", None, "p", "r"), APPLIED))
    for k in range(WARNINGS_KEPT + 50):
        history.warn(f"warning {k}")
        history.warn("warning 0")
    assert (len(history.decisions), history.decision_count) == (DECISIONS_KEPT, DECISIONS_KEPT + 50) and len(
        seen
    ) == 250
    assert history.decisions[-1].t_s == DECISIONS_KEPT + 49 and len(history.warnings) == WARNINGS_KEPT
    run = open_run(history.writer.path)
    assert sum(1 for _ in run.log("decision")) == 250 and sum(1 for _ in run.log("warning")) >= 250
