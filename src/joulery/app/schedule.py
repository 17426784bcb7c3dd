"""Training jobs of a site: schedule them, release their holds, submit, list and cancel them.

``joulery schedule`` is :func:`run_schedule`: it opens the site's cluster, takes the lock of the state folder, and runs
a :class:`~joulery.runtime.schedule.scheduler.Scheduler` until a signal ends it.
"""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.accounting.forecasts import JobForecast, coverage
from joulery.accounting.training_jobs import MeasureRules
from joulery.adapters.clusters.local import LocalBackend
from joulery.app.limits_config import LimitsConfig, limits_config
from joulery.app.power_limits import job_limits
from joulery.app.wiring.cluster import (
    cluster_backend,
    energy_source,
    green_policy,
    jobs_of,
    local_backend,
    machine_slots,
    one_cluster,
    priority_step,
    site_intensity,
)
from joulery.config.jobs import JobsConfig
from joulery.config.parsing.reading import load
from joulery.config.site import Mode, Site
from joulery.domain.cluster import ClusterJob, JobState
from joulery.domain.errors import ConfigError, JouleryError
from joulery.domain.ports import ClusterBackend
from joulery.policies.training.green import LEAN
from joulery.runtime.process import part_environment, process_command
from joulery.runtime.schedule.expected import expected_starts, job_forecasts, waiting_line, why_waits
from joulery.runtime.schedule.intensity_tracker import IntensityTracker
from joulery.runtime.schedule.polling import run_one_round, run_scheduler
from joulery.runtime.schedule.polling import stopped_by_signals as stopped_by_signals
from joulery.runtime.schedule.rounds import SchedulerTiming
from joulery.runtime.schedule.scheduler import Scheduler, release_all
from joulery.runtime.schedule.state import SchedulerState
from joulery.runtime.schedule.usage import SEPARATOR as SEPARATOR
from joulery.runtime.schedule.usage import LiveUse as LiveUse
from joulery.runtime.schedule.usage import ended_jobs, live_state
from joulery.runtime.schedule.usage import used_by as used_by
from joulery.runtime.schedule.watchdog import SchedulerLock
from joulery.store.jobs import JobBook
from joulery.store.journal import Journal
from joulery.store.run.directory import create_run, new_run_id

_LEAST_RUN_S = 300.0
_LISTED_S = 2 * 86_400.0
"""Age up to which ended jobs are looked up in the log; jobs are listed for a day."""

Log = Callable[[Mapping[str, Any]], None]
"""Receives every line of the scheduler's log."""


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """The flags of ``joulery schedule``; None where the site file decides.

    Attributes:
        site: The site file.
        backend: ``local``, ``slurm`` or ``kueue``.
        mode: advise, shadow or act.
        once: Whether to run one round and its actions instead of a loop.
        argv: The command line, for the manifest.
        cluster: Name of one of the site's clusters; None where the site has one cluster.
    """

    site: Path
    backend: str | None = None
    mode: Mode | None = None
    once: bool = False
    argv: Sequence[str] = ()
    cluster: str | None = None


def run_schedule(request: ScheduleRequest, say: Log, stop: threading.Event) -> None:
    """Schedule the jobs of a site until ``stop`` is set, or for one round.

    Args:
        request: The flags.
        say: Receives every line of the log.
        stop: Set to end the scheduler.

    Raises:
        ConfigError: The site is wrong, or another scheduler holds its state folder.
        CapabilityError: The cluster cannot be used from here.
    """
    site = one_cluster(load(request.site), request.cluster)
    jobs = _with_backend(jobs_of(site), request.backend)
    site = site.model_copy(update={"jobs": jobs})
    mode = request.mode or site.mode
    folder = jobs.state.absolute()
    with _closing(cluster_backend(jobs)) as backend, SchedulerLock(folder):
        details = {"mode": mode, "backend": jobs.backend, "policy": green_policy(jobs).name, "site": str(request.site)}
        run_folder = folder / "runs" / new_run_id(time.time())
        with (
            create_run(run_folder, kind="schedule", argv=request.argv, details=details) as run,
            Journal(folder / f"journal-{mode}.jsonl") as journal,
        ):
            last: list[Mapping[str, Any]] = [{}]

            def log(kind: str, fields: Mapping[str, Any]) -> None:
                run.log(kind, **fields)
                failed = {**fields, "reason": ""} if fields.get("outcome") == "failed" else {}
                if not failed or failed != last[0]:  # an action that is tried at every look is said once
                    say({"kind": kind, **fields})
                last[0] = failed or ({} if kind == "action" else last[0])

            scheduler = _scheduler(site, mode, backend, journal, log)
            acts = mode is Mode.ACT and jobs.backend != "local"
            limits = None if request.once else limits_config(jobs)
            patience_s = 2 * jobs.quantum_s + jobs.patience_s if request.once else jobs.patience_s
            watchdog = start_watchdog(request, jobs.backend, patience_s, folder / "watchdog.log") if acts else None
            if request.once:
                run_one_round(scheduler, jobs.poll_s, jobs.grace_s, stop)
                return
            with _own_limits(jobs, backend, limits if mode is Mode.ACT else None, log, stop):
                run_scheduler(scheduler, jobs.poll_s, stop, lambda text: say({"kind": "note", "text": text}))
            if acts:
                released = release_all(backend)
                log("note", {"text": f"stopped: released {len(released)} held jobs"})
            if watchdog is not None:
                watchdog.terminate()
                with suppress(subprocess.TimeoutExpired):
                    watchdog.wait(5)


def _scheduler(
    site: Site, mode: Mode, backend: ClusterBackend, journal: Journal, log: Callable[[str, Mapping[str, Any]], None]
) -> Scheduler:
    """Create the scheduler of a site for an open cluster."""

    def note(text: str) -> None:
        log("note", {"text": text})

    jobs = jobs_of(site)
    if journal.damaged:
        note(f"{journal.path.name}: {journal.damaged} damaged lines are left out")
    if jobs.backend == "kueue" and jobs.policy.kind in LEAN:
        note(f"policy {jobs.policy.kind} sets no power limits beside Kueue: it only orders jobs")
    return Scheduler(
        backend,
        green_policy(jobs),
        journal,
        energy_source(site, backend, note),
        IntensityTracker(site_intensity(site), jobs.window_s, note),
        log,
        mode=mode,
        timing=SchedulerTiming(
            jobs.quantum_s,
            jobs.restart_s,
            MeasureRules(jobs.measure_s),
            least_run_s=min(_LEAST_RUN_S, jobs.quantum_s / 4) if jobs.least_run_s is None else jobs.least_run_s,
            start_s=jobs.start_within_s,
        ),
        priority_step=priority_step(jobs),
    )


def _own_limits(
    jobs: JobsConfig,
    backend: ClusterBackend,
    limits: LimitsConfig | None,
    log: Callable[[str, Mapping[str, Any]], None],
    stop: threading.Event,
) -> AbstractContextManager[None]:
    """Limit the power of this machine's jobs; on Slurm's nodes the agents do this."""
    if limits is None or not isinstance(backend, LocalBackend):
        return nullcontext()

    def say(entry: Mapping[str, Any]) -> None:
        fields = {key: value for key, value in entry.items() if key != "kind"}
        if entry["kind"] == "limit":
            fields["text"] = f"job {entry['job']} at {100 * entry['ratio']:.0f} % of its power: {entry['text']}"
        log(entry["kind"], fields)

    book = JobBook(jobs.state)
    return job_limits(
        limits, backend.placements, lambda job: book.folder(job) / "progress", say, stop, cpus=jobs.slots.kind == "cpu"
    )


def start_watchdog(request: ScheduleRequest, backend: str, patience_s: float, log: Path) -> subprocess.Popen[bytes]:
    """Start the watchdog of a site in a session of its own: a signal to the scheduler's group does not end it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            process_command(
                "joulery.app.schedule_watchdog", str(request.site), backend, str(patience_s), request.cluster or ""
            ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=part_environment(),
            start_new_session=True,
        )


def release_now(site_file: Path, backend_kind: str | None, cluster: str | None = None) -> list[int]:
    """Release every job that joulery holds; return their numbers. Only possible while no scheduler runs.

    Raises:
        ConfigError: A scheduler runs.
    """
    jobs = _with_backend(jobs_of(one_cluster(load(site_file), cluster)), backend_kind)
    with _closing(cluster_backend(jobs)) as backend, SchedulerLock(jobs.state.absolute()):
        return release_all(backend)


def submit_job(
    site: Site,
    job: Mapping[str, Any],
    min_slots: int,
    max_slots: int,
    *,
    stoppable: bool = True,
    deadline_s: float | None = None,
    limit_s: float | None = None,
) -> int:
    """Queue a command for this machine's scheduler and return its number.

    Args:
        site: The site.
        job: Command, cwd, environment, name and owner.
        min_slots, max_slots: Smallest and largest number of slots that the job can use.
        stoppable: Whether the scheduler may stop the running job.
        deadline_s: Latest time for the job to end, Unix seconds; None for none.
        limit_s: Longest time that the job runs on ``min_slots``; None for no limit.

    Raises:
        ConfigError: The jobs run on a cluster, or this machine has fewer slots than ``min_slots``.
    """
    jobs = jobs_of(one_cluster(site, None))
    if jobs.backend == "kueue":
        raise ConfigError("jobs of Kueue are submitted with kubectl", hint="see docs/how-to/kueue.md")
    if jobs.backend != "local":
        raise ConfigError("jobs of Slurm are submitted with sbatch", hint="see docs/how-to/slurm.md")
    slots = len(machine_slots(jobs.slots))
    if min_slots > slots:
        raise ConfigError(
            "the job can never run here", pointer="--min", got=str(min_slots), expected=f"at most {slots} slots"
        )
    sizes = {"min_slots": min_slots, "max_slots": min(max_slots, slots), "stoppable": stoppable}
    times = {"deadline_s": deadline_s, "limit_s": limit_s, "submit_s": time.time()}
    return JobBook(jobs.state).add({**job, **sizes, **times})


def cancel_job(site: Site, job: int, cluster: str | None = None) -> str:
    """End a job of this machine for good and return its state.

    Raises:
        ConfigError: The jobs run on a cluster.
        ActuationError: There is no such job, or it has ended.
    """
    jobs = jobs_of(one_cluster(site, cluster))
    if jobs.backend == "kueue":
        raise ConfigError(
            "jobs of Kueue are cancelled with kubectl", got=f"--cancel {job}", hint="kubectl delete job NAME"
        )
    if jobs.backend != "local":
        raise ConfigError("jobs of Slurm are cancelled with scancel", got=f"--cancel {job}", hint=f"scancel {job}")
    return local_backend(jobs).cancel(job)


def jobs_by_cluster(site: Site, cluster: str | None = None) -> tuple[list[dict[str, Any]], dict[str, JouleryError]]:
    """List the jobs of all clusters as :func:`list_jobs` does, each with its ``cluster`` where the site has several.

    Args:
        site: The site.
        cluster: One of its clusters; all when None.

    Returns:
        The rows, and the error of each cluster that could not be listed; the other clusters are still listed.

    Raises:
        CapabilityError: The only cluster does not answer.
        ConfigError: There is no such cluster, or the only one is configured wrongly.
    """
    names = [one.name for one in site.clusters]
    if cluster is not None or len(names) < 2:
        return list_jobs(site, cluster), {}
    rows: list[dict[str, Any]] = []
    problems: dict[str, JouleryError] = {}
    for name in names:
        try:
            rows += [{"cluster": name, **row} for row in list_jobs(site, name)]
        except JouleryError as error:
            problems[name] = error
    return rows, problems


def list_jobs(site: Site, cluster: str | None = None) -> list[dict[str, Any]]:
    """List the jobs that have not ended or ended within a day, one row each; unknown values are None.

    Args:
        site: The site.
        cluster: One of its clusters, where it lists several.

    Raises:
        CapabilityError: The cluster does not answer.
        ConfigError: There is no such cluster, or the site lists several and none is named.
    """
    site = one_cluster(site, cluster)
    jobs = jobs_of(site)
    with _closing(cluster_backend(jobs)) as backend:
        snapshot = backend.snapshot()
    folder = jobs.state.absolute()
    state = live_state(folder)
    now_s = time.time()
    ended = {int(entry["job"]): entry for entry in ended_jobs(folder, now_s - _LISTED_S)}
    line = waiting_line(snapshot.jobs, state)
    starts = expected_starts(snapshot, state, line, now_s)
    made = job_forecasts(snapshot, state, math.nan, now_s)
    return [
        {
            **_row(job, state, ended.get(job.id, {})),
            **_wait(job, state, line),
            "expected_start_s": starts.get(job.id),
            **_expected(made.get(job.id, ()), now_s),
            "deadline_s": job.deadline_s if math.isfinite(job.deadline_s) else None,
        }
        for job in snapshot.jobs
    ]


def _expected(made: Sequence[JobForecast], now_s: float) -> dict[str, float | None]:
    """Interval of the start, and the expected end with its interval, Unix seconds; None where unknown."""
    by_kind = {forecast.kind: forecast for forecast in made}
    unknown = JobForecast("end", now_s, math.nan)
    start, end = by_kind.get("start", unknown), by_kind.get("end", unknown)
    after_s = {
        "expected_start_low_s": start.low,
        "expected_start_high_s": start.high,
        "expected_end_s": end.amount,
        "expected_end_low_s": end.low,
        "expected_end_high_s": end.high,
    }
    return {name: None if math.isnan(seconds) else now_s + seconds for name, seconds in after_s.items()}


def forecast_coverage(site: Site, cluster: str | None = None) -> list[dict[str, Any]]:
    """Accuracy and coverage of the scheduler's forecasts, one row for each kind.

    Raises:
        ConfigError: There is no such cluster, or the site lists several and none is named.
    """
    folder = jobs_of(one_cluster(site, cluster)).state.absolute()
    return [row.as_dict() for row in coverage(live_state(folder).scores)]


def _wait(job: ClusterJob, state: SchedulerState, line: Sequence[ClusterJob]) -> dict[str, Any]:
    """Rank of a waiting job, from 1, and its reason to wait; None for other jobs and where nothing is decided."""
    if job.state is not JobState.WAITING:
        return {"rank": None, "waits_because": None}
    rank, reason = why_waits(job, state, line, time.time())
    return {"rank": rank, "waits_because": reason}


def _row(job: ClusterJob, state: SchedulerState, ended: Mapping[str, Any]) -> dict[str, Any]:
    """Row of a job with its cost: from the scheduler's state while it has the job, else from the log of its end."""
    tally = state.tallies.get(job.id)
    energy_j = tally.energy_j if tally is not None and tally.energy_j > 0 else ended.get("energy_j") or None
    if tally is not None and tally.carbon_covered_j > 0:
        carbon_g: Any = tally.carbon_g
    else:
        carbon_g = ended.get("carbon_g") if ended.get("carbon_covered_j") else None
    return {
        "job": job.id,
        "name": job.name,
        "owner": job.owner,
        "partition": job.partition or None,
        "state": str(job.state),
        "slots": job.slots,
        "min_slots": job.min_slots,
        "max_slots": job.max_slots,
        "meant_slots": state.target.get(job.id),
        "progress_ratio": None if math.isnan(job.progress_ratio) else job.progress_ratio,
        "restarts": job.restarts,
        "submit_s": job.submit_s,
        "exit_code": job.exit_code,
        "held": job.held_by_us,
        "left_alone": job.exempt or None,
        "energy_j": energy_j,
        "carbon_g": carbon_g,
        "quality": (ended.get("quality") if tally is None else str(tally.quality)) if energy_j else None,
        "power_w": tally.slot_w * job.slots if tally is not None and job.slots and tally.slot_w >= 0 else None,
    }


def _with_backend(jobs: JobsConfig, backend: str | None) -> JobsConfig:
    return jobs if backend is None else jobs.model_copy(update={"backend": backend})


@contextmanager
def _closing(backend: ClusterBackend) -> Iterator[ClusterBackend]:
    try:
        yield backend
    finally:
        backend.close()
