"""Joules of a service on two cores with and without empty slices, at three loads: ``consolidation --live``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks import _burst_world as world
from benchmarks.consolidation import LOADS
from joulery.store.run.directory import open_run

LIVE_S = 75.0
SITE = """
joulery: 1
name: consolidation
mode: act
carbon: {kind: constant, intensity: 100 g/kWh}
fleet: {cpu: {slices: [1, 1]}}
services:
  - name: sums
    family:
      variants:
VARIANTS
    slo: {latency: 150 ms, quantile: 95 %}
    audit: {share: 0 %}
    policy: {kind: clover, lambda: 2 %, base_intensity: 200 g/kWh, consolidate: WHETHER}
serving: {listen: "127.0.0.1:0"}
load: {kind: poisson, rate: RATE /s, duration: LENGTH s, seed: 3}
"""


def live(rate_rps: float, *, on: bool) -> dict[str, Any]:
    """Run ``joulery up`` once; its report, with ``empty``: the number of changes that left a core empty.

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
        text = SITE.replace("VARIANTS", variants).replace("WHETHER", str(on).lower())
        text = text.replace("RATE", f"{rate_rps:g}").replace("LENGTH", f"{LIVE_S:g}")
        (folder / "site.yaml").write_text(text)
        line = ["-m", "joulery", "up", str(folder / "site.yaml"), "--out", str(folder / "run"), "--json"]
        done = subprocess.run([sys.executable, *line], cwd=Path(__file__).parents[1], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"joulery up ended with {done.returncode}: {done.stderr[-500:]}")
        report = dict(json.loads(done.stdout))
        changes = [one for one in open_run(folder / "run").log("decision") if one["decision"]["kind"] == "set_layout"]
        report["empty"] = sum(one["decision"]["cause"] == "consolidation" for one in changes)
        return report


def run() -> Result:
    """Run each load with and without consolidation, one after the other."""
    load, rows, changes, kept = os.getloadavg()[0], [], 0, 1.0
    for name, rate_rps in LOADS.items():
        on, off = (live(rate_rps, on=each) for each in (True, False))
        above = [one["energy_j"] - one["idle_j"] for one in (on, off)]
        what = f"{name}, {rate_rps:g} /s, {on['quality']}"
        attained = f"{on['attainment_ratio']:.2%} / {off['attainment_ratio']:.2%}"
        failed = f"{on['failed']} / {off['failed']}"
        rows.append(
            [what, f"{above[0]:,.1f} J", f"{above[1]:,.1f} J", f"{above[0] / above[1] - 1:+.1%}", attained, failed]
        )
        changes, kept = changes + on["empty"], min(kept, on["attainment_ratio"])
    return Result(
        "Consolidation, live: slices left empty while demand is low",
        ("load", "with", "without", "change", "within the SLO, with / without", "failed or refused"),
        rows,
        notes=(
            f"`joulery up` for {LIVE_S:g} s each on two cores, load average {load:.1f} at the start. Joules above idle "
            "of the whole run, gateway and load generator included, by the meter of the machine; a modelled meter sees "
            "CPU time alone, and no deeper sleep of a core that is left empty.",
        ),
        checks=(
            (f"a core was left empty at low load: {changes} changes", changes > 0),
            (f"at least 99 % of the answers within the SLO: {kept:.2%}", kept >= 0.99),
        ),
    )
