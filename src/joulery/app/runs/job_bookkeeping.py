"""Record the cost of a scheduler's jobs in the ledger, by owner and month, from its state folder."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from joulery.app.runs.bookkeeping import CHARGED
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.months import month_of, next_month_s
from joulery.runtime.schedule.usage import job_costs, state_folders
from joulery.store.ledger import CarbonEntry, EnergyEntry, Ledger, RunEntry

_HOUR_S = 3600


def book_clusters(folders: Sequence[Path], ledger: Ledger, now_s: float) -> list[str]:
    """Record the jobs of every scheduler in some folders, each as one run; schedulers without jobs are left out.

    Returns:
        The names of the runs.

    Raises:
        ConfigError, CapabilityError: As :func:`book_jobs`.
        DataError: No job ran in any of them.
    """
    names = []
    for folder in state_folders(*folders).values():
        with suppress(DataError):
            names.append(book_jobs(folder, ledger, now_s))
    if folders and not names:
        raise DataError("no job ran", file=", ".join(map(str, folders)))
    return names


def book_jobs(folder: Path, ledger: Ledger, now_s: float) -> str:
    """Record the jobs of a scheduler as one run; an earlier record of them is replaced.

    A job's cost is known by month, not by hour: it is recorded in the hour in which the job ended, the cost of an
    earlier month in the last hour of that month, and the cost of a running job in the present hour.

    Returns:
        The run's name in the ledger.

    Raises:
        ConfigError: The folder does not contain the state of a scheduler.
        DataError: No job ran.
        CapabilityError: The ledger cannot be written.
    """
    if not (folder / "runs").is_dir():
        raise ConfigError("no scheduler wrote to this folder", got=str(folder), hint="name jobs.state of its site file")
    jobs = job_costs(folder)
    if not jobs:
        raise DataError("no job ran", file=str(folder))
    kinds = [job["pieces"][-1] for job in jobs if "scope" in job["pieces"][-1]]
    latest: Mapping[str, Any] = kinds[-1] if kinds else {}
    energy, carbon = [], []
    for piece in (piece for job in jobs for piece in job["pieces"]):
        owner, workload = str(piece.get("owner") or "unknown"), str(piece.get("name") or "unknown")
        hour_s, quality = _hour_s(piece, now_s), Quality(piece.get("quality") or Quality.MEASURED)
        if (energy_j := float(piece.get("energy_j") or 0.0)) > 0:
            energy.append(EnergyEntry(owner, workload, "", hour_s, CHARGED, quality, energy_j))
        kind = piece if "scope" in piece else latest
        if float(piece.get("carbon_covered_j") or 0.0) > 0 and "scope" in kind:
            signal, scope = Signal(kind["signal"]), Scope(kind["scope"])
            carbon.append(CarbonEntry(owner, workload, hour_s, signal, scope, float(piece["carbon_g"])))
    name = f"jobs:{folder.absolute()}"
    started_s = min((entry.hour_s for entry in energy), default=math.floor(now_s))
    entry = RunEntry(name, "schedule", str(folder.absolute()), "", socket.gethostname(), started_s, None, "")
    ledger.record(entry, energy, carbon)
    return name


def _hour_s(piece: Mapping[str, Any], now_s: float) -> int:
    """The hour in which a part of a job is recorded."""
    end_s, month = piece.get("t_s"), str(piece["month"])
    at_s = float(end_s) if isinstance(end_s, (int, float)) else now_s
    if month != "unknown" and month and month_of(at_s, UTC) != month:
        begin_s = datetime.fromisoformat(f"{month}-01T00:00:00+00:00").timestamp()
        at_s = next_month_s(begin_s, UTC) - _HOUR_S
    return math.floor(at_s / _HOUR_S) * _HOUR_S
