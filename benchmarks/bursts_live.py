"""The step burst with real processes on two cores, and a crowd beyond the leanest layout: ``bursts --live``.

Each run is ``joulery up`` on a site of three variants that burn 15, 6 and 2 ms of CPU time a request.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Result
from benchmarks import _burst_world as world
from joulery.domain.serving.engine import Outcome
from joulery.store.run.directory import open_run

ROOT = Path(__file__).parents[1]
SLO_S = 0.15
CALM_RPS, BURST_RPS, CROWD_RPS = 20.0, 150.0, 600.0
BEGIN_S, END_S, LENGTH_S = 30.0, 60.0, 80.0
BEFORE_RATIO = 0.748
"""Share of the answers within the SLO of the same run on 22 November 2026, before requests were steered."""
SITE = """
joulery: 1
name: burst
mode: act
carbon: {kind: constant, intensity: 100 g/kWh}
fleet: {cpu: {cores: 2}}
services:
  - name: sums
    family:
      variants:
VARIANTS
    slo: {latency: 150 ms, quantile: 95 %}
    rate: 20 /s
    policy: {kind: clover, lambda: 2 %, base_intensity: 200 g/kWh}
serving: {listen: "127.0.0.1:0"}
load: {kind: trace, path: arrivals.csv, duration: 80 s}
"""


@dataclass(frozen=True, slots=True)
class Play:
    """Result of one run.

    Attributes:
        report: The report of ``joulery up``.
        requests: Requests that reached the gateway.
        refused: Requests answered with 429.
        answered, late: Answers, and those beyond the SLO.
        reaction_s: Seconds from the burst to the first decision under a threat; infinite for none.
    """

    report: dict[str, Any]
    requests: int
    refused: int
    answered: int
    late: int
    reaction_s: float

    @property
    def attainment_ratio(self) -> float:
        """Share of the answers within the SLO."""
        return 1.0 - self.late / max(1, self.answered)


def run() -> Result:
    """Run the step burst and the crowd."""
    step, crowd = play(BURST_RPS), play(CROWD_RPS)
    return Result(
        "Bursts, live",
        ("play", "requests", "refused (429)", "within the SLO", "reaction"),
        [_row("20 to 150 requests/s for 30 s", step), _row("20 to 600 requests/s for 30 s", crowd)],
        notes=(
            f"`joulery up` on two cores, worker processes that burn 15, 6 and 2 ms of CPU time, SLO p95 within "
            f"{1e3 * SLO_S:.0f} ms, one load generator on the same cores. Within the SLO: share of the answers, by the "
            "gateway's clock. Reaction: from the burst's first request to the first decision under a threat; the slack "
            f"of the queue steers single requests before that. Before requests were steered the first play kept "
            f"{BEFORE_RATIO:.1%}.",
        ),
        checks=(
            (
                f"150 /s: at least 99 % of answers within the SLO: {step.attainment_ratio:.2%}",
                step.attainment_ratio >= 0.99,
            ),
            (
                f"600 /s: at least 99 % of answers within the SLO: {crowd.attainment_ratio:.2%}",
                crowd.attainment_ratio >= 0.99,
            ),
            (f"reaction within 2 s: {crowd.reaction_s:.1f} s to 600 /s", crowd.reaction_s <= 2.0),
        ),
    )


def _row(name: str, one: Play) -> list[str]:
    reaction = f"{one.reaction_s:.1f} s" if np.isfinite(one.reaction_s) else "no threat"
    return [name, f"{one.requests:,}", f"{one.refused:,}", f"{one.attainment_ratio:.2%}", reaction]


def play(burst_rps: float) -> Play:
    """Run ``joulery up`` with one burst.

    Raises:
        RuntimeError: ``joulery up`` failed.
    """
    with tempfile.TemporaryDirectory(prefix="jb-") as name:
        folder = Path(name)
        variants = "\n".join(
            f"        - {{name: {variant}, accuracy: {100 * world.ACCURACY[variant]:g} %, accuracy_source: assumed, "
            f'model: {{kind: python, target: "benchmarks._trivial:Busy", options: {{ms: {ms:g}}}}}}}'
            for variant, ms in world.MS.items()
        )
        (folder / "site.yaml").write_text(SITE.replace("VARIANTS", variants))
        with (folder / "arrivals.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["arrival_s"])
            writer.writerows([f"{at_s:.6f}"] for at_s in arrivals(burst_rps))
        line = [
            sys.executable,
            "-m",
            "joulery",
            "up",
            str(folder / "site.yaml"),
            "--out",
            str(folder / "run"),
            "--json",
        ]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"joulery up ended with {done.returncode}: {done.stderr[-500:]}")
        return outcome(folder / "run", json.loads(done.stdout))


def arrivals(burst_rps: float) -> list[float]:
    """Poisson arrivals with a burst, seconds."""
    rng, found, now_s = np.random.default_rng(1), [], 0.0
    while now_s < LENGTH_S:
        now_s += rng.exponential(1.0 / (burst_rps if BEGIN_S <= now_s < END_S else CALM_RPS))
        found.append(now_s)
    return found[:-1]


def outcome(folder: Path, report: dict[str, Any]) -> Play:
    """The result of a run, from its recorded requests and decisions."""
    run = open_run(folder)
    requests = run.series("requests")
    arrival_s, end_s = np.asarray(requests["arrival_s"]), np.asarray(requests["end_s"])
    outcomes = np.asarray(requests["outcome"])
    answered = outcomes == Outcome.OK.value
    late = answered & (end_s - arrival_s > SLO_S)
    begin_s = float(arrival_s.min()) + BEGIN_S
    decisions = [entry for entry in run.log("decision") if entry["decision"]["cause"] == "threat"]
    reactions_s = [entry["t_s"] - begin_s for entry in decisions if entry["t_s"] >= begin_s]
    return Play(
        report=report,
        requests=len(outcomes),
        refused=int((outcomes == Outcome.OVERLOADED.value).sum()),
        answered=int(answered.sum()),
        late=int(late.sum()),
        reaction_s=min(reactions_s, default=float("inf")),
    )
