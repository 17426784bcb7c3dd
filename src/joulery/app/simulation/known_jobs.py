"""Power and speed of a trace's jobs, where its file knows them: the columns ``gpu_w`` and ``speedup``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from joulery.domain.errors import DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, NodePower
from joulery.sim.training.plant import Jobs
from joulery.sim.training.site_machines import SiteMachines, classes_of
from joulery.tabular import csv_header, read_csv

_COLUMNS = ("gpu_w", "speedup")


def with_known(jobs: Jobs, file: Path | None, node: NodePower) -> tuple[Jobs, tuple[JobClass, ...]]:
    """The jobs of a trace with what its file knows of each, and the kinds of jobs there are then.

    Args:
        jobs: The first jobs of the file, each of a drawn kind.
        file: The trace; None where it is made up.
        node: What a job's power includes of its node.

    Raises:
        DataError: A cell is no power, or no speed-up.
    """
    wanted = () if file is None else tuple(name for name in _COLUMNS if name in csv_header(file))
    if file is None or not wanted:
        return jobs, RTX3090_CLASSES
    table = read_csv(file)
    places = {name: table.header.index(name) for name in wanted}
    watts = np.full(len(jobs), np.nan)
    rows, speedups = np.full(len(jobs), -1, np.int64), dict[str, int]()
    lines = [(number, cells) for number, cells in table.lines if cells][: len(jobs)]
    for at, (number, cells) in enumerate(lines):
        said = {name: cells[place].strip() if place < len(cells) else "" for name, place in places.items()}
        if text := said.get("gpu_w"):
            watts[at] = _positive(text, "gpu_w", file, number)
        if text := said.get("speedup"):
            if text not in speedups:
                _speedup(text, file, number)
                speedups[text] = len(speedups)
            rows[at] = speedups[text]
    known = tuple(_speedup(text, file, 0) for text in speedups)
    machines = SiteMachines(node, watts, speedups=known, speedup_of=rows)
    classes, kind = classes_of(jobs.kind, jobs.requested, machines, int(jobs.max_gpus.max(initial=1)))
    return replace(jobs, kind=kind), classes


def _speedup(text: str, file: Path, row: int) -> Mapping[int, float]:
    """``1:1 2:1.9 4:3.4``: speed by number of GPUs over that on the smallest."""
    found: dict[int, float] = {}
    for part in text.split():
        gpus, _, ratio = part.partition(":")
        if not gpus.isdecimal() or not int(gpus):
            raise DataError(f"speedup is {text!r}, expected such as '1:1 2:1.9 4:3.4'", file=str(file), row=row)
        found[int(gpus)] = _positive(ratio, "speedup", file, row)
    if found.get(min(found, default=0)) != 1.0:
        raise DataError(f"speedup is {text!r}, expected 1 for the fewest GPUs", file=str(file), row=row)
    return found


def _positive(text: str, column: str, file: Path, row: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise DataError(f"{column} is {text!r}, expected a number above 0", file=str(file), row=row)
    return value
