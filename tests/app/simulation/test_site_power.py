"""Power of a site's own jobs, from sacct and from a scheduler's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from joulery.app.simulation.site_power import known_power
from joulery.domain.cluster import PastJob
from joulery.domain.errors import ConfigError


def past(number: int, name: str = "train", **more: Any) -> PastJob:
    fields = {"owner": "ada", "account": "lab", "partition": "gpu", "state": "COMPLETED", "submit_s": 0.0,
              "start_s": 0.0, "end_s": 3600.0, "elapsed_s": 3600.0, "gpus": 2, "cpus": 8, "nodes": 1}  # fmt: skip
    return PastJob(id=str(number), name=name, **{**fields, **more})


def test_measured_then_learned_then_assumed() -> None:
    jobs = [
        past(1, measured_j=2 * 400.0 * 3600.0),
        past(2, measured_j=4 * 600.0 * 3600.0, gpus=4),
        past(3),
        past(4, owner="bob"),
        past(5, "other", measured_j=1e12),
        past(6, "other", measured_j=0.0),
    ]
    known = known_power(jobs)
    assert known.job_w[:3] == pytest.approx([400.0, 600.0, (2 * 400.0 + 4 * 600.0) / 6])
    assert np.isnan(known.job_w[3:]).all(), "another owner's job is another kind; 139 kW a GPU is no measurement"
    assert (known.measured, known.learned, known.assumed, known.implausible) == (2, 1, 3, 1)


def test_what_agents_measured_counts_and_what_was_assumed_does_not(tmp_path: Path) -> None:
    run = tmp_path / "runs/r1"
    run.mkdir(parents=True)
    ended = {"kind": "over", "owner": "ada", "unmetered_s": 0.0, "slot_s": 100.0, "quality": "measured"}
    entries = [
        {**ended, "job": 1, "name": "train", "energy_j": 30_000.0},
        {**ended, "job": 2, "name": "stated", "energy_j": 25_000.0, "quality": "assumed"},
        {**ended, "job": 3, "name": "gap", "energy_j": 25_000.0, "unmetered_s": 5.0},
        {**ended, "job": 4, "name": "none", "energy_j": 0.0, "slot_s": 0.0},
    ]
    (run / "log.jsonl").write_bytes(b"\n".join(map(orjson.dumps, entries)) + b"\n{torn")
    known = known_power([past(at, name) for at, name in enumerate(("train", "stated", "gap", "none"))], tmp_path)
    assert known.job_w[0] == 300.0 and np.isnan(known.job_w[1:]).all() and known.learned == 1
    with pytest.raises(ConfigError, match="no scheduler wrote"):
        known_power([past(1)], tmp_path / "elsewhere")
