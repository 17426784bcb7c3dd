import asyncio
from dataclasses import dataclass

import pytest

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ActuationError
from joulery.runtime.session.driver import ADVISED, APPLIED, SUPERSEDED, LiveDriver


@dataclass(frozen=True)
class EveryThird:
    wake_s: float | None = None

    def initial(self) -> int:
        return 0

    def step(self, state: int, observation: float, /) -> Step[int]:
        decide = (Decision("set", "x", observation, "third", f"step {state}"),) if state % 3 == 0 else ()
        return Step(state + 1, decide, self.wake_s)


class Log:
    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.records = []
        self.acted: list[float] = []

    async def act(self, decision: Decision) -> tuple[str, str]:
        self.acted.append(decision.value)
        return APPLIED, "done"


def driver(log: Log, *, policy=EveryThird(), act=None, period_s: float = 0.01) -> LiveDriver[int, float]:
    return LiveDriver(
        policy,
        observe=lambda now_s: now_s,
        act=act or log.act,
        watch=lambda seen, step: log.steps.append((seen, step.state)),
        record=log.records.append,
        period_s=period_s,
    )


async def test_each_step_is_watched_and_each_decision_carried_out_and_recorded():
    log = Log()
    loop = driver(log)
    for now_s in range(7):
        await loop.step(float(now_s))
    assert log.steps == [(float(k), k + 1) for k in range(7)]
    assert log.acted == [0.0, 3.0, 6.0] and loop.state == 7
    assert [(record.outcome, record.detail, record.decision.value) for record in log.records] == [
        ("applied", "done", 0.0),
        ("applied", "done", 3.0),
        ("applied", "done", 6.0),
    ]
    assert 0 <= loop.busy_cpu_s < 1


async def test_an_action_that_fails_is_recorded_and_the_loop_goes_on():
    log = Log()

    async def refuse(decision: Decision) -> tuple[str, str]:
        raise ActuationError("no room")

    loop = driver(log, act=refuse)
    for now_s in range(4):
        await loop.step(float(now_s))
    assert [(record.outcome, record.detail) for record in log.records] == [("failed", "no room")] * 2
    assert isinstance(loop.failure, ActuationError)
    assert loop.state == 4


async def test_a_bug_is_not_swallowed():
    async def broken(decision: Decision) -> tuple[str, str]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await driver(Log(), act=broken).step(0.0)


async def test_a_policy_that_names_a_time_is_left_alone_until_then():
    log = Log()
    loop = driver(log, policy=EveryThird(wake_s=5.0))
    for now_s in range(7):
        await loop.step(float(now_s))
    assert [seen for seen, _ in log.steps] == [0.0, 5.0, 6.0]


async def test_it_runs_until_cancelled_and_a_slow_action_delays_the_next_step():
    log, running, enough = Log(), [], asyncio.Event()

    async def slow(decision: Decision) -> tuple[str, str]:
        running.append(len(log.steps))
        await asyncio.sleep(0.05)
        running.append(len(log.steps))
        if len(log.steps) > 4:
            enough.set()
        return ADVISED, ""

    task = asyncio.create_task(driver(log, act=slow).run())
    await enough.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running[:2] == [1, 1], "not stepped while the decision was carried out"
    assert len(log.records) >= 1


@dataclass(frozen=True)
class Scripted:
    """Decides what its script says at each step."""

    script: tuple[tuple[str, ...], ...]

    def initial(self) -> int:
        return 0

    def step(self, state: int, observation: float, /) -> Step[int]:
        kinds = self.script[state] if state < len(self.script) else ()
        return Step(state + 1, tuple(Decision(kind, "x", state, "scripted", "because") for kind in kinds))


async def test_a_slow_decision_is_overridden_and_quick_ones_are_carried_out_beside_it():
    log, begun, ended = Log(), [], []
    forever, done = asyncio.Event(), asyncio.Event()

    async def act(decision: Decision) -> tuple[str, str]:
        begun.append((decision.kind, decision.value))
        if decision.kind == "slow" and decision.value == 0:
            try:
                await forever.wait()
            finally:
                ended.append(decision.value)
        if decision.kind == "slow" and decision.value == 2:
            done.set()
        return APPLIED, "done"

    loop = LiveDriver(
        Scripted((("slow",), ("quick",), ("quick", "slow"))),
        observe=lambda now_s: now_s,
        act=act,
        watch=lambda seen, step: log.steps.append((seen, step.state)),
        record=log.records.append,
        period_s=0.01,
        quick=frozenset({"quick"}),
    )
    task = asyncio.create_task(loop.run())
    await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == [("slow", 0), ("quick", 1), ("quick", 2), ("slow", 2)] and ended == [0]
    outcomes = {(record.decision.kind, record.decision.value): record.outcome for record in log.records}
    assert outcomes["slow", 0] == SUPERSEDED and outcomes["slow", 2] == APPLIED and not loop.acting


async def test_a_defect_in_a_slow_decision_ends_the_loop():
    async def broken(decision: Decision) -> tuple[str, str]:
        raise ZeroDivisionError

    loop = LiveDriver(
        Scripted((("slow",),)),
        observe=lambda now_s: now_s,
        act=broken,
        watch=lambda seen, step: None,
        record=lambda record: None,
        period_s=0.01,
        quick=frozenset(),
    )
    with pytest.raises(ZeroDivisionError):
        await loop.run()


async def test_ending_the_loop_ends_the_decision_that_is_carried_out():
    began, ended = asyncio.Event(), []

    async def act(decision: Decision) -> tuple[str, str]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return APPLIED, ""

    log = Log()
    loop = driver(log, policy=Scripted((("slow",),)), act=act)
    loop._quick = frozenset()
    task = asyncio.create_task(loop.run())
    await began.wait()
    assert loop.acting
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
