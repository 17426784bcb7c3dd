"""A session's control: which mode touches the engine, and what is recorded of it."""

import time
from dataclasses import replace

import pytest

from joulery.app.runs.replay import decide_again
from joulery.app.serving.service import choose
from joulery.config.site import Mode
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.runtime.serving.controller import PolicyControl, Revision
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.session.driver import ADVISED, APPLIED
from joulery.runtime.session.history import DECISIONS_KEPT, WARNINGS_KEPT, SessionHistory
from joulery.runtime.session.requests import RequestWindow
from joulery.store.run.directory import create_run, open_run
from tests.app.serving.test_service import opened, profile
from tests.runtime.serving.test_controller import PaperEngine

CAPACITY_RPS = 2 / 0.0044
"""Of two of the small variant, the leanest layout."""


class LimitedEngine(PaperEngine):
    """Runs nothing; remembers the limits of its queues."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, QueueLimit | None] = {}

    def limit_queue(self, service, limit):
        self.limits[service] = limit


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


def arriving(one: RunningService, rate_rps: float, until_s: float) -> None:
    for k in range(int(3 * rate_rps)):
        end_s = until_s - 3 + k / rate_rps
        one.window.add(RequestRecord("sums", "small", "r", end_s, end_s, end_s, Outcome.OK, 0.0, 0.0, 1, None))


async def test_acting_runs_the_first_layout(tmp_path, history):
    made, one, _ = control(tmp_path, history, Mode.ACT)
    await made.start()
    assert len(one.layouts) == 1 and one.advised is None and not made.on_trial
    assert [record.outcome for record in history.decisions] == [APPLIED]
    kinds = [entry["kind"] for entry in open_run(history.writer.path).log()]
    assert kinds == ["policy", "step", "decision", "warning"]
    assert "does not steer requests" in history.warnings[0], "the stand-in has no set_mix"


@pytest.mark.parametrize(("mode", "limited"), [(Mode.ACT, True), (Mode.ADVISE, False)])
async def test_requests_past_the_leanest_layouts_capacity_are_refused_early_in_mode_act(
    tmp_path, history, mode, limited
):
    made, one, engine = control(tmp_path, history, mode)
    await made.start()
    (driver,) = made.drivers
    arriving(one, 0.5 * CAPACITY_RPS, 1000.0)
    await driver.step(1000.0)
    assert engine.limits.get("sums") is None, "a queue alone refuses nothing"
    arriving(one, 1.5 * CAPACITY_RPS, 2000.0)
    await driver.step(2000.0)
    limit = engine.limits.get("sums")
    assert (limit is not None) == limited
    assert limit is None or limit.waiting == pytest.approx(CAPACITY_RPS * 0.9 * 0.5, rel=0.03)
    arriving(one, 0.5 * CAPACITY_RPS, 3000.0)
    await driver.step(3000.0)
    assert engine.limits.get("sums") is None


async def test_advice_runs_the_baseline(tmp_path, history):
    made, one, _ = control(tmp_path, history, Mode.ADVISE)
    await made.start()
    assert [layout for _, layout in one.layouts] == [one.chosen.base] and one.advised is not None
    assert [record.outcome for record in history.decisions] == [ADVISED]


async def test_a_changed_slo_changes_policy_and_queue(tmp_path, history):
    made, one, engine = control(tmp_path, history, Mode.ACT)
    await made.start()
    (driver,) = made.drivers
    _, _, setup = opened(tmp_path, {"500 ms": "50 ms"})
    tight = choose(*opened(tmp_path, {"500 ms": "50 ms"}), profile())
    made.revise(Revision(setup, tight))
    assert one.setup.slo.latency_s == 0.05 and one.chosen is tight
    assert driver.policy == one.chosen.driven and driver.policy.policy is tight.policy
    arriving(one, 2 * CAPACITY_RPS, 1000.0)
    await driver.step(1000.0)
    assert 0 < engine.limits["sums"].waiting < CAPACITY_RPS * 0.5 / 5


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
    assert (len(history.decisions), history.plan_count) == (DECISIONS_KEPT, DECISIONS_KEPT + 50) and len(seen) == 250
    assert history.decisions[-1].t_s == DECISIONS_KEPT + 49 and len(history.warnings) == WARNINGS_KEPT
    run = open_run(history.writer.path)
    assert sum(1 for _ in run.log("decision")) == 250 and sum(1 for _ in run.log("warning")) >= 250


async def test_periods_of_the_baseline_are_kept_and_the_log_is_decided_again(tmp_path, history):
    site, config, setup = opened(tmp_path)
    chosen = choose(site, config, setup, profile())
    chosen = replace(chosen, audit=replace(chosen.audit, share_ratio=0.2, period_s=3.0))
    one = RunningService(setup, chosen, profile(), RequestWindow("sums", 4.0))
    grid = LiveIntensity(None, lambda section: pytest.fail("no grid"), time.time)
    made = PolicyControl({"sums": one}, LimitedEngine(), history, grid, Mode.ACT, 1.0)
    await made.start()
    (driver,) = made.drivers
    start_s = time.time() + 10.0
    for second in range(120):
        arriving(one, 40.0, start_s + second)
        await driver.step(start_s + second)
    assert len(one.periods) == one.tally.periods >= 2 and one.tally.arrived > 0
    assert all(period.until_s > period.from_s >= start_s for period in one.periods)
    assert one.shadow is not None and one.shadow.variant == "large"
    again = decide_again(open_run(history.writer.path).log())
    assert again.steps >= 120 and not again.differences


async def test_without_a_share_or_outside_of_act_nothing_is_audited(tmp_path, history):
    for changed, mode in (({"policy:": "audit: {share: 0}\n    policy:"}, Mode.ACT), (None, Mode.ADVISE)):
        site, config, setup = opened(tmp_path, changed)
        chosen = choose(site.model_copy(update={"mode": mode}), config, setup, profile())
        assert chosen.audit is None and chosen.driven is chosen.policy
