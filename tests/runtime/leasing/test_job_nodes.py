"""One limit for a job on several nodes: the bound on its slowdown whatever one agent does, and all or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.policies.clocks.power_limit import LimitPoint, PowerLimitTuner
from joulery.runtime.leasing.job_nodes import JobNodes, NodeReport, careful_tuner
from joulery.store.jobs import NodeNotes

PERIOD_S, LEASE_S, HORIZON_S = 1.0, 6.0, 1000
PLAIN = PowerLimitTuner(1.0, 1.3, trial_s=10.0, settle_s=2.0, period_s=PERIOD_S, review_s=900.0)
HALF = (LimitPoint(0.5, 1.0, 0.5),)
"""What was best for an earlier job of the kind, which did not slow down at all: it is tried first."""


def careful() -> PowerLimitTuner:
    tuner = careful_tuner(PLAIN, LEASE_S)
    assert tuner is not None
    return tuner


class Disk:
    """A shared disk on which a note becomes visible some steps after it was written, and which may refuse."""

    def __init__(self, delay: int = 0) -> None:
        self.delay, self.step = delay, 0
        self.written: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        self.refuses: set[str] = set()

    def write(self, job: int, node: str, note: Mapping[str, Any]) -> bool:
        if node in self.refuses:
            return False
        self.written.setdefault(node, []).append((self.step, note))
        return True

    def read(self, job: int, node: str) -> Mapping[str, Any] | None:
        written = reversed(self.written.get(node, []))
        return next((note for step, note in written if step + self.delay <= self.step), None)

    def remove(self, job: int, node: str) -> None:
        self.written.pop(node, None)


@dataclass
class Agent:
    """The agent of a node, and its devices: limited, they do ``ratio ** slope`` of their work, and draw ``ratio``."""

    name: str
    slope: float
    rate: float
    ahead_s: float
    agrees: JobNodes | None = None
    ratio: float = 1.0
    set_s: float = 0.0
    cycles: float = 0.0
    energy_j: float = 0.0
    why_not: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return float(self.ratio**self.slope)


class Together:
    """A job whose every step waits for its slowest node; all clocks differ.

    ``worst`` is the most time lost beyond the bound; what was earned before the policy counts it does not count.
    """

    def __init__(
        self, slopes: list[float], delay: int = 0, spins: bool = True, known: tuple[LimitPoint, ...] = ()
    ) -> None:
        self.known = known
        self.disk, self.spins, self.now_s, self.work_s = Disk(delay), spins, 0.0, 0.0
        self.agents = [Agent(f"g{at}", slope, 10.0 + 3 * at, 1e6 * at) for at, slope in enumerate(slopes)]
        self.worst, self.ahead_s = 0.0, 0.0
        for agent in self.agents:
            self.begin(agent)

    def begin(self, agent: Agent) -> None:
        """A new agent on a node."""
        hosts = [one.name for one in self.agents]
        tuner, session = careful(), f"{agent.name} at {self.now_s}"
        agent.agrees = JobNodes(7, hosts, agent.name, tuner, self.disk, LEASE_S, session)
        agent.ratio = 1.0

    def run(self, seconds: float, progress: bool = False) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for agent in self.agents:
                self._step(agent, progress)
            self.disk.step += 1
            speed = min(agent.speed for agent in self.agents)
            for agent in self.agents:
                agent.cycles += agent.rate * PERIOD_S * (agent.speed if self.spins else speed)
                agent.energy_j += 400.0 * agent.ratio * PERIOD_S
            self.now_s += PERIOD_S
            self.work_s += speed * PERIOD_S
            late_s = self.now_s - PLAIN.max_slowdown * self.work_s
            leader = self.agents[0].agrees
            if leader is not None and leader.state.full_rate > 0 and not self.ahead_s:
                self.ahead_s = -late_s - leader.state.credit_s
            self.worst = max(self.worst, late_s + self.ahead_s)

    def _step(self, agent: Agent, progress: bool) -> None:
        if agent.agrees is None:  # its watchdog reverts the limit at the end of its lease
            agent.ratio = 1.0 if self.now_s - agent.set_s >= LEASE_S else agent.ratio
            return
        now_s = self.now_s + agent.ahead_s
        report = NodeReport(now_s, agent.cycles, agent.energy_j, 400.0, agent.ratio, agent.why_not)
        ratio, reason = agent.agrees.step(now_s, report, (self.work_s, now_s) if progress else None, self.known)
        agent.ratio, agent.set_s = 1.0 if agent.why_not else ratio, self.now_s
        agent.reasons.append(reason)

    @property
    def ratios(self) -> list[float]:
        return [agent.ratio for agent in self.agents]


@pytest.mark.parametrize("progress", [False, True])
def test_all_nodes_have_the_limit_that_suits_the_slowest(progress: bool) -> None:
    """A cost that minds energy alone takes the lowest limit within the bound: 0.583 ** 0.45 is 1 / 1.27."""
    job = Together([0.1, 0.45, 0.2])
    job.run(HORIZON_S, progress)
    assert len(set(job.ratios)) == 1 and job.ratios[0] == pytest.approx(0.583)
    assert job.worst <= 1e-6


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0]) | st.floats(0.0, 4.0), min_size=2, max_size=4),
    st.integers(0, 1),
    st.sampled_from(["cycles", "cycles that wait", "progress"]),
    st.sampled_from([(), HALF]),
    st.lists(st.tuples(st.sampled_from(["kill", "begin", "disk", "refuse"]), st.integers(0, 3), st.integers(0, 200)),
             max_size=4),
)  # fmt: skip
def test_the_job_is_never_slower_than_the_bound_whatever_one_agent_does(
    slopes: list[float],
    delay: int,
    work: str,
    known: tuple[LimitPoint, ...],
    events: list[tuple[str, int, int]],
) -> None:
    """One agent at a time dies, begins anew, loses its disk, or its devices refuse."""
    job, progress = Together(slopes, delay, work == "cycles", known), work == "progress"
    job.run(150, progress)
    for what, which, pause in events:
        agent = job.agents[which % len(slopes)]
        job.disk.refuses.clear()
        for other in job.agents:
            other.why_not = ""
            if other.agrees is None:
                job.begin(other)
        if what == "kill":
            agent.agrees = None
        elif what == "begin":
            job.begin(agent)
        elif what == "disk":
            job.disk.refuses.add(agent.name)
        else:
            agent.why_not = "the driver refuses"
        job.run(LEASE_S + 6 * PERIOD_S, progress)
        if what != "begin":
            assert set(job.ratios) == {1.0}, "all or nothing"
        job.run(pause, progress)
    job.run(500, progress)
    assert job.worst <= 1e-6


@pytest.mark.parametrize("which", [0, 1])
def test_killed_at_any_moment_of_a_trial_the_job_keeps_within_the_bound(which: int) -> None:
    """A trial at a sixteenth of the speed; the limit of the dead agent's node outlives it by a lease."""
    at_trial = 0
    for steps in range(60, 140):
        job = Together([0.0, 4.0], known=HALF)
        job.run(steps * PERIOD_S)
        at_trial += min(job.ratios) < 1
        job.agents[which].agrees = None
        job.run(LEASE_S + 6 * PERIOD_S)
        assert job.ratios == [1.0, 1.0]
        assert job.worst <= 1e-6
    assert at_trial > 5


def test_a_node_that_leaves_frees_the_others_and_the_job_begins_anew_with_those_it_has() -> None:
    job = Together([0.1, 0.1, 0.1])
    job.run(HORIZON_S)
    assert max(job.ratios) < 1
    last = job.agents.pop()
    assert last.agrees is not None
    last.agrees.leave()
    job.run(4 * PERIOD_S)
    assert job.ratios == [1.0, 1.0]
    assert "g2 does not answer" in job.agents[0].reasons[-1]
    for agent in job.agents:
        job.begin(agent)
    job.run(HORIZON_S)
    assert max(job.ratios) < 1


def test_notes_of_an_agent_that_is_gone_count_for_nothing() -> None:
    """They look recent: clocks of nodes are not compared."""
    job = Together([0.1, 0.1])
    job.agents[1].agrees = None
    job.disk.written["g1"] = [(-9, {"session": "old", "count": 9, "at_s": 0.0, "work": 1.0, "energy_j": 1.0,
                                    "full_w": 400.0, "ratio": 1.0, "why_not": "", "wants": 0.5})]  # fmt: skip
    job.run(300)
    assert job.ratios == [1.0, 1.0]
    assert set(job.agents[0].reasons) == {"the agent of node g1 does not answer"}


@pytest.mark.parametrize("wants", ["", "x", None, -1, 0, 7, math.nan])
def test_a_note_that_says_nothing_is_no_limit(wants: object) -> None:
    job = Together([0.1, 0.1])
    base = {"at_s": 0.0, "work": 1.0, "energy_j": 1.0, "full_w": 1.0, "ratio": 1.0, "why_not": "", "session": "s"}
    follower = job.agents[1].agrees
    assert follower is not None
    for count in range(3):
        job.disk.written["g0"] = [(0, {**base, "count": count, "wants": wants})]
        assert follower.step(float(count), NodeReport(0.0, 1.0, 1.0, 1.0, 1.0), None, ())[0] == 1.0


def test_without_work_to_count_a_job_keeps_full_power() -> None:
    job = Together([0.1, 0.1])
    for agent in job.agents:
        agent.cycles = math.nan
    job.run(400)
    assert job.ratios == [1.0, 1.0]
    assert "too rarely" in job.agents[0].reasons[-1]


def test_a_trial_must_outlast_a_lease() -> None:
    assert careful_tuner(PLAIN, LEASE_S) == PowerLimitTuner(
        1.0, 1.3, trial_s=10.0, settle_s=2.0, period_s=9.0, review_s=900.0
    )
    assert careful_tuner(PLAIN, 8.0) is None


def test_notes_on_a_disk_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    notes = NodeNotes(tmp_path / "nodes")
    assert notes.read(7, "g1") is None
    assert notes.write(7, "g1", {"count": 1, "work": math.nan, "reason": "long " * 40})
    assert notes.write(7, "g1", {"count": 2, "work": math.nan})
    assert notes.read(7, "g1") == {"count": 2, "work": None}, "a shorter note leaves nothing of the longer one"
    (file,) = (tmp_path / "nodes").iterdir()
    content = file.read_bytes()
    for cut in range(len(content)):
        file.write_bytes(content[:cut])
        assert notes.read(7, "g1") is None
    file.write_bytes(content.replace(b"2", b"3", 1))
    assert notes.read(7, "g1") is None
    notes.remove(7, "g1")
    notes.remove(7, "g1")
    assert not list((tmp_path / "nodes").iterdir())
    (tmp_path / "file").write_text("")
    assert not NodeNotes(tmp_path / "file").write(7, "g1", {}), "no folder"
