"""Policies in virtual time: the grid, quiescence, pokes."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.decisions import Decision, Step
from joulery.sim.core.driver import Driver
from joulery.sim.core.kernel import Kernel, Rank


@dataclass(frozen=True)
class Script:
    """Says what was observed; sleeps until the time its script gives for this instant."""

    wakes: dict[float, float | None]

    def initial(self) -> int:
        return 0

    def step(self, state: int, observation: float, /) -> Step[int]:
        decision = Decision("note", "log", observation, "script", f"step {state}")
        return Step(state + 1, (decision,), self.wakes.get(observation))


@dataclass(frozen=True)
class Threshold:
    """Acts when the signal crosses a level; declares honestly until when the signal is known not to change."""

    changes_s: tuple[float, ...]
    quiescent: bool

    def initial(self) -> bool:
        return False

    def step(self, state: bool, observation: float, /) -> Step[bool]:
        high = sum(change <= observation for change in self.changes_s) % 2 == 1
        decisions = (Decision("switch", "plant", high, "threshold", "the level was crossed"),) if high != state else ()
        ahead = [change for change in self.changes_s if change > observation]
        return Step(high, decisions, (min(ahead) if ahead else math.inf) if self.quiescent else None)


def drive(policy, *, period_s, until_s, start_s=None, prepare=lambda kernel, driver: None):
    kernel, acted = Kernel(), []
    driver = Driver(
        kernel, "p", policy, lambda t_s: t_s, lambda t_s, d: acted.append((t_s, d)), period_s=period_s, start_s=start_s
    )
    prepare(kernel, driver)
    kernel.run(until_s)
    return driver, acted


def instants(acted):
    return [t_s for t_s, _ in acted]


def test_steps_on_the_grid_from_its_start_and_threads_the_state():
    driver, acted = drive(Script({}), period_s=2.0, until_s=7.0, start_s=1.0)
    assert instants(acted) == [1.0, 3.0, 5.0]
    assert [decision.reason for _, decision in acted] == ["step 0", "step 1", "step 2"]
    assert driver.state == driver.steps == 3
    assert driver.due_s == 7.0


def test_grid_does_not_drift():
    _, acted = drive(Script({}), period_s=0.1, until_s=1000.0)
    assert instants(acted) == [k * 0.1 for k in range(10_000)]


def test_wake_skips_to_the_first_grid_instant_at_or_after():
    _, acted = drive(Script({0.0: 3.5, 4.0: 6.0, 6.0: 6.5, 7.0: 1.0}), period_s=1.0, until_s=9.5)
    assert instants(acted) == [0.0, 4.0, 6.0, 7.0, 8.0, 9.0]


def test_wake_at_infinity_sleeps_for_ever():
    driver, acted = drive(Script({2.0: math.inf}), period_s=1.0, until_s=100.0)
    assert instants(acted) == [0.0, 1.0, 2.0]
    assert driver.due_s == math.inf


def test_poke_wakes_a_quiescent_policy_at_its_next_grid_instant_once():
    def prepare(kernel, driver):
        kernel.on("change", Rank.ARRIVAL, lambda t_s, _: driver.poke())
        for t_s in (3.2, 3.4, 6.0):
            kernel.at(t_s, "change")

    _, acted = drive(Script({0.0: 50.0, 4.0: 50.0}), period_s=1.0, until_s=8.5, prepare=prepare)
    assert instants(acted) == [0.0, 4.0, 6.0, 7.0, 8.0]


def test_poke_before_the_start_waits_for_the_start():
    def prepare(kernel, driver):
        kernel.on("change", Rank.ARRIVAL, lambda t_s, _: driver.poke())
        kernel.at(1.0, "change")

    for period_s in (2.0, None):
        _, acted = drive(Script({5.0: 5.0}), period_s=period_s, until_s=6.0, start_s=5.0, prepare=prepare)
        assert instants(acted)[0] == 5.0


def test_poke_after_the_step_of_an_instant_waits_for_the_next():
    def prepare(kernel, driver):
        kernel.on("other policy", Rank.POLICY, lambda t_s, _: driver.poke())
        kernel.on("later", Rank.ARRIVAL, lambda t_s, _: kernel.at(2.0, "other policy"))
        kernel.at(1.5, "later")

    _, acted = drive(Script({2.0: 50.0, 3.0: 50.0}), period_s=1.0, until_s=9.0, prepare=prepare)
    assert instants(acted) == [0.0, 1.0, 2.0, 3.0]


def test_without_a_period_it_runs_when_woken_or_poked():
    def prepare(kernel, driver):
        kernel.on("change", Rank.COMPLETION, lambda t_s, _: driver.poke())
        for t_s in (1.25, 1.25, 4.0):
            kernel.at(t_s, "change")

    driver, acted = drive(Script({0.0: 2.5}), period_s=None, until_s=9.0, prepare=prepare)
    assert instants(acted) == [0.0, 1.25, 4.0]
    assert driver.due_s == math.inf
    _, acted = drive(Script({0.0: 2.5, 2.5: 0.0}), period_s=None, until_s=9.0)
    assert instants(acted)[:2] == [0.0, 2.5]


def test_its_own_decisions_do_not_wake_it():
    kernel = Kernel()
    driver = Driver(kernel, "p", Script({}), lambda t_s: t_s, lambda t_s, d: driver.poke(), period_s=None)
    assert kernel.run() == 1
    assert driver.steps == 1


def test_policies_decide_after_everything_else_of_the_instant():
    def prepare(kernel, driver):
        kernel.on("meter", Rank.TELEMETRY, lambda t_s, _: order.append("meter"))
        kernel.at(0.0, "meter")

    order: list[str] = []
    kernel = Kernel()
    driver = Driver(kernel, "p", Script({}), lambda t_s: order.append("policy") or t_s, lambda t_s, d: None, period_s=9)
    prepare(kernel, driver)
    kernel.run(1.0)
    assert order == ["meter", "policy"]


def test_watch_sees_observation_and_step():
    kernel, seen = Kernel(), []
    Driver(
        kernel,
        "p",
        Script({}),
        lambda t_s: t_s,
        lambda t_s, d: None,
        period_s=1.0,
        watch=lambda t_s, observation, step: seen.append((t_s, observation, step.state)),
    )
    kernel.run(2.0)
    assert seen == [(0.0, 0.0, 1), (1.0, 1.0, 2)]


@pytest.mark.parametrize("period_s", [0.0, -1.0, math.inf, math.nan])
def test_nonsense_periods_are_refused(period_s):
    with pytest.raises(ValueError, match="positive, finite period"):
        Driver(Kernel(), "p", Script({}), lambda t_s: t_s, lambda t_s, d: None, period_s=period_s)


@given(
    st.lists(st.floats(0.0, 50.0), max_size=8).map(sorted).map(tuple),
    st.floats(0.3, 9.0),
    st.floats(0.0, 5.0),
)
def test_an_honest_wake_changes_no_decision(changes_s, period_s, start_s):
    runs = [
        drive(Threshold(changes_s, quiescent), period_s=period_s, until_s=60.0, start_s=start_s)
        for quiescent in (False, True)
    ]
    assert runs[0][1] == runs[1][1]
    assert runs[1][0].steps <= min(runs[0][0].steps, len(changes_s) + 1)
