"""The jobs of a site as people ask for them, scheduler running or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from joulery.app.schedule import cluster_backend, jobs_of, local_backend, state_folder
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.runtime.schedule.state import remembered
from joulery.runtime.schedule.usage import ended as ended_jobs
from joulery.runtime.schedule.usage import lines


def list_jobs(site: Site) -> list[dict[str, Any]]:
    """One row a job that is not over or ended within a day; what nobody measured is None.

    Raises:
        CapabilityError: The cluster does not answer.
    """
    backend = cluster_backend(jobs_of(site))
    snapshot = backend.snapshot()
    backend.close()
    memory, _ = remembered(_journal(site))
    ended: dict[int, dict[str, Any]] = {}
    for entry in ended_jobs(state_folder(site)):
        ended[int(entry["job"])] = entry
    rows = []
    for job in snapshot.jobs:
        tally = memory.tallies.get(job.id)
        cost = ended.get(job.id, {})
        energy_j = tally.energy_j if tally is not None and tally.energy_j > 0 else cost.get("energy_j") or None
        grams = tally if tally is not None and tally.carbon_covered_j > 0 else None
        carbon_g = (
            grams.carbon_g if grams is not None else cost.get("carbon_g") if cost.get("carbon_covered_j") else None
        )
        rows.append(
            {
                "job": job.id,
                "name": job.name,
                "owner": job.owner,
                "partition": job.partition or None,
                "state": str(job.state),
                "slots": job.slots,
                "min_slots": job.min_slots,
                "max_slots": job.max_slots,
                "meant_slots": memory.target.get(job.id),
                "progress_ratio": None if math.isnan(job.progress_ratio) else job.progress_ratio,
                "restarts": job.restarts,
                "submit_s": job.submit_s,
                "exit_code": job.exit_code,
                "held": job.held_by_us,
                "left_alone": job.exempt or None,
                "energy_j": energy_j,
                "carbon_g": carbon_g,
                "quality": str(tally.quality) if tally is not None and energy_j else cost.get("quality"),
            }
        )
    return rows


def cancel_job(site: Site, job: int) -> str:
    """End a job of this machine for good; says what it is now.

    Raises:
        ConfigError: The jobs are Slurm's.
        ActuationError: There is no such job, or it is over.
    """
    jobs = jobs_of(site)
    if jobs.backend != "local":
        raise ConfigError("jobs of Slurm are cancelled with scancel", got=f"--cancel {job}", hint=f"scancel {job}")
    return local_backend(jobs).cancel(job)


def _journal(site: Site) -> Iterator[dict[str, Any]]:
    """What the scheduler in force wrote down; a torn line is left out."""
    file = state_folder(site) / "journal-act.jsonl"
    if file.exists():
        yield from lines(file)
