"""The report of past jobs: energy and carbon by owner from sacct's output, a stated power and an intensity."""

from __future__ import annotations

import csv
import io
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from joulery.accounting.past import HeldPower, PastUse, past_use, split_at, within
from joulery.adapters.clusters.sacct import read_sacct
from joulery.app.simulation.site_limits import SiteLimits, known_limits
from joulery.app.simulation.site_power import KnownPower, known_power
from joulery.app.simulation.site_speed import KnownSpeed, known_speed
from joulery.app.wiring.carbon import source_from_flags
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.cluster import PastJob
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError, DataError
from joulery.months import month_of, next_month_s
from joulery.perf.job_speed import LearnedRatio as LearnedRatio
from joulery.perf.power.training_power import RTX3090_W
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.node_groups import NodeGroup, groups_of
from joulery.sim.training.savings import BASE as BASE
from joulery.sim.training.savings import Savings as Savings
from joulery.sim.training.savings import Spread as Spread
from joulery.sim.training.savings import most_at_once, savings
from joulery.sim.training.site_machines import SiteMachines, node_of
from joulery.sim.training.study import scheme as scheme
from joulery.store.files import disk_errors, write_atomically

BY = ("owner", "account", "partition", "state", "name", "cluster", "month")
"""Keys that past jobs can be grouped by."""
_SEPARATOR = " / "


@dataclass(frozen=True, slots=True)
class PastJobsRequest:
    """The flags of a report of past jobs.

    Attributes:
        file: Output of sacct.
        since_s: Age of the oldest jobs to report, in seconds; None for all jobs.
        by: Some of :data:`BY`, separated by commas. With ``month`` jobs are split at the end of each month.
        gpu_w, cpu_w, node_w: Power per held GPU, core and node; ``gpu_w`` is None only if all jobs were measured.
        pue: Facility energy per IT energy.
        timezone: Time zone of the times in the file; None for this machine's.
        carbon: Flags that name the source of carbon intensity; empty for none.
        month: Report only this calendar month, as ``2026-11``; None for all.
    """

    file: Path
    since_s: float | None
    by: str
    gpu_w: float | None
    cpu_w: float
    node_w: float
    pue: float
    timezone: str | None
    carbon: Mapping[str, str]
    month: str | None = None


@dataclass(frozen=True, slots=True)
class PastReport:
    """Energy and carbon of past jobs.

    Attributes:
        uses: Energy and carbon by key.
        total: Energy and carbon of all jobs.
        jobs: The jobs counted.
        left_out: Number of rows left out, by reason.
        notes: Remarks for the reader, one sentence each.
        intensity: Carbon intensity over the time of the jobs; None where no source was named.
        by: The keys of the grouping.
        values: The value of each key, by the rows' key.
    """

    uses: tuple[PastUse, ...]
    total: PastUse
    jobs: tuple[PastJob, ...]
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    intensity: CarbonSeries | None = None
    by: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The report as a JSON-ready dictionary; grams are null where no intensity is known."""
        return {
            "rows": [_row(use) | self.keys_of(use) for use in self.uses],
            "total": _row(self.total),
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }

    def keys_of(self, use: PastUse) -> dict[str, str]:
        """Keys of a row with their values; empty where there is one key alone, which is the key of the row."""
        return dict(zip(self.by, self.values[use.key], strict=True)) if len(self.by) > 1 else {}


def report_past(wanted: PastJobsRequest, now_s: float | None = None) -> PastReport:
    """Energy and carbon of the jobs of a file.

    Raises:
        ConfigError: A flag is invalid, or the power of a GPU is needed and not stated.
        DataError: The file cannot be used, or nothing in it is recent enough.
    """
    log = read_sacct(wanted.file, _zone(wanted.timezone))
    now_s = time.time() if now_s is None else now_s
    jobs = log.jobs if wanted.since_s is None else within(log.jobs, now_s - wanted.since_s)
    if not jobs:
        newest = time.strftime("%F", time.gmtime(max(job.end_s for job in log.jobs)))
        raise DataError(f"no job ran since then; the newest ended on {newest}", file=str(wanted.file))
    unmeasured = sum(1 for job in jobs if job.gpus and math.isnan(job.measured_j))
    if wanted.gpu_w is None and unmeasured:
        raise ConfigError(
            f"{unmeasured} jobs held GPUs and were not measured",
            pointer="--gpu-power",
            hint='state the power of a GPU while a job holds it: --gpu-power "250 W"',
        )
    power = HeldPower(wanted.gpu_w or 0.0, wanted.cpu_w, wanted.node_w, wanted.pue)
    carbon = _carbon(wanted.carbon, jobs)
    by, zone = tuple(wanted.by.split(",")), _zone(wanted.timezone)
    pieces = split_at(jobs, lambda t_s: next_month_s(t_s, zone)) if "month" in by or wanted.month else tuple(jobs)
    if wanted.month is not None:
        pieces = _of_month(pieces, wanted.month, zone, wanted.file)
    values = {_SEPARATOR.join(parts): parts for parts in {_values(piece, by, zone) for piece in pieces}}
    uses = past_use(pieces, power, carbon, lambda job: _SEPARATOR.join(_values(job, by, zone)))
    if "month" in by:
        uses = tuple(sorted(uses, key=lambda use: values[use.key][by.index("month")]))
    (total,) = past_use(pieces, power, carbon, lambda _: "total")
    notes = (*log.notes, *_notes(log.left_out, total, power, carbon))
    return PastReport(uses, total, tuple(jobs), log.left_out, notes, carbon, by, values)


def _values(job: PastJob, by: tuple[str, ...], zone: ZoneInfo | None) -> tuple[str, ...]:
    return tuple(month_of(job.start_s, zone) if key == "month" else str(getattr(job, key)) or "unknown" for key in by)


def _of_month(pieces: Sequence[PastJob], month: str, zone: ZoneInfo | None, file: Path) -> tuple[PastJob, ...]:
    kept = tuple(piece for piece in pieces if month_of(piece.start_s, zone) == month)
    if not kept:
        known = sorted({month_of(piece.start_s, zone) for piece in pieces})
        raise DataError(f"no job ran in {month}", file=str(file), hint=f"jobs ran from {known[0]} to {known[-1]}")
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class HeldGpus:
    """Past jobs that held GPUs, in order of submission, as input of a simulation.

    Attributes:
        ids: Ids of the jobs.
        submit_s, start_s: Seconds since ``first_s``, float64[n].
        elapsed_s: Run time of each job, float64[n].
        gpus: Number of GPUs of each job, int64[n].
        first_s: The hour of the first submission, Unix seconds.
        jobs: The jobs themselves.

    Jobs submitted before any of them started count as submitted at the first start: the log has no record of the
    time before, and a simulation would assume an idle cluster then.
    """

    ids: tuple[str, ...]
    submit_s: FloatArray
    start_s: FloatArray
    elapsed_s: FloatArray
    gpus: IntArray
    first_s: float
    jobs: tuple[PastJob, ...] = ()


def held_gpus(jobs: Sequence[PastJob]) -> HeldGpus:
    """Select the jobs that held GPUs.

    Raises:
        DataError: No job held a GPU.
    """
    held = sorted((job for job in jobs if job.gpus), key=_submitted_s)
    if not held:
        raise DataError("no job held a GPU: there is nothing to simulate")
    began_s = min(job.start_s for job in held)
    submit_s = np.array([max(_submitted_s(job), began_s) for job in held])
    first_s = math.floor(began_s / 3600.0) * 3600.0
    return HeldGpus(
        tuple(job.id for job in held),
        submit_s - first_s,
        np.array([job.start_s - first_s for job in held]),
        np.array([job.elapsed_s for job in held]),
        np.array([job.gpus for job in held], np.int64),
        first_s,
        tuple(held),
    )


def hourly_from(series: CarbonSeries, first_s: float) -> FloatArray:
    """Hourly means of a series from ``first_s`` to its end, g/kWh.

    Raises:
        DataError: An hour is unknown.
    """
    hours = int((series.end_s - first_s) // 3600.0)
    values = np.array([series.mean(first_s + 3600.0 * h, first_s + 3600.0 * (h + 1)) for h in range(hours)])
    if not hours or bool(np.any(np.isnan(values))):
        at = time.strftime(
            "%F %H:00", time.gmtime(first_s + 3600.0 * int(np.argmax(np.isnan(values))) if hours else first_s)
        )
        raise DataError(
            f"{series.zone}: the intensity from {at} UTC on is not known", hint="use a source that covers the jobs"
        )
    return values


def write_trace(jobs: Sequence[PastJob], path: Path, folder: Path | None = None) -> int:
    """Write the jobs of :func:`held_gpus` as a file for ``joulery simulate --trace``; the first is submitted at 0 s.

    A job's duration is its time on one GPU: elapsed time times GPUs if it scales ideally, or as learned where the speed
    of its kind on several numbers of GPUs is known (column ``speedup``, ``1:1 2:1.9 4:3.4``). The file has a column of
    GPU types where the log names any, and of power where it is known (``gpu_w``: W per GPU with a share of the node).

    Args:
        jobs: The jobs.
        path: The file.
        folder: State folder of a scheduler with the measurements of agents; None for none.

    Raises:
        DataError: No job held a GPU.
        CapabilityError: The file cannot be written.
        ConfigError: The folder is not the state folder of a scheduler.
    """
    held = held_gpus(jobs)
    power, speed = known_power(held.jobs, folder), known_speed(held.jobs, folder)
    submit_s = np.rint(held.submit_s - held.submit_s[0]).astype(np.int64).tolist()
    speedups = [speed.speedup(at) for at in range(len(held.jobs))]
    work = [_work_ratio(int(gpus), speedup) for gpus, speedup in zip(held.gpus, speedups, strict=True)]
    duration_s = (held.elapsed_s * np.array(work)).round(3).tolist()
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = {"job_id": held.ids, "submit_s": submit_s, "duration_s": duration_s, "num_gpus": held.gpus.tolist()}
    if any(job.gpu_type for job in held.jobs):
        columns["gpu_type"] = tuple(job.gpu_type for job in held.jobs)
    if any(speedups):
        columns["speedup"] = tuple(" ".join(f"{n}:{ratio:.4g}" for n, ratio in sorted(one.items())) for one in speedups)
    if power.assumed < len(held.jobs):
        columns["gpu_w"] = tuple("" if math.isnan(watts) else f"{watts:.4g}" for watts in power.job_w.tolist())
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    with disk_errors(path):
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))
    return len(held.ids)


def _work_ratio(gpus: int, speedup: Mapping[int, float]) -> float:
    """Speed of a job relative to one GPU: ideal up to the smallest known number of GPUs, then as known."""
    points = sorted(speedup)
    if len(points) < 2 or gpus <= points[0]:
        return float(gpus)
    logs = [math.log(speedup[n] * points[0] / n) for n in points]
    return float(gpus * np.exp(min(0.0, np.interp(gpus, points, logs))))


def _submitted_s(job: PastJob) -> float:
    return job.start_s if math.isnan(job.submit_s) else min(job.submit_s, job.start_s)


def _zone(name: str | None) -> ZoneInfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise ConfigError(
            "is not a time zone", pointer="--sacct-timezone", got=name, expected="Europe/London"
        ) from None


def _carbon(flags: Mapping[str, str], jobs: Sequence[PastJob]) -> CarbonSeries | None:
    source = source_from_flags(flags)
    if source is None:
        return None
    first_s = min(job.start_s for job in jobs)
    return source.history(math.floor(first_s / 3600.0) * 3600.0, max(job.end_s for job in jobs) + 3600.0)


def _notes(
    left_out: Mapping[str, int], total: PastUse, power: HeldPower, carbon: CarbonSeries | None
) -> tuple[str, ...]:
    notes = []
    if total.measured_j < total.energy_j:
        notes.append(
            f"modelled: elapsed time x {power.gpu_w:g} W a GPU, {power.cpu_w:g} W a core, {power.node_w:g} W a node, "
            "as stated"
        )
    if total.measured_j > 0:
        notes.append(
            "measured by Slurm: all that its sensor sees of a job's nodes, other jobs there included; with rapl no GPUs"
        )
    if left_out:
        notes.append("left out: " + ", ".join(f"{count} x {why}" for why, count in left_out.items()))
    if carbon is None:
        notes.append("no grams: name a source of intensity with --zone or --carbon")
    elif total.carbon_covered_j < total.energy_j:
        share = total.carbon_covered_j / total.energy_j if total.energy_j else 0.0
        notes.append(f"grams cover {share:.1%} of the joules: the intensity of the rest is unknown")
    return tuple(notes)


def _row(use: PastUse) -> dict[str, Any]:
    return {
        **asdict(use),
        "carbon_g": use.carbon_g if use.carbon_covered_j > 0 else None,
        "quality": str(use.quality),
    }


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The flags of a simulation of past jobs under another scheduler.

    Attributes:
        policy: The other scheduler.
        gpus: GPUs of the cluster; the most held at once when None.
        samples: Number of random samples of the values that the log does not record.
        node_gpus: GPUs of a node, on which jobs are placed; None to only count GPUs, two per node.
        folder: State folder of a scheduler with the measurements of agents; None for none.
        nodes: Groups of nodes as ``TYPE:NODESxGPUS,...`` (``a100:2x8,v100:4x4``), in place of ``gpus`` and
            ``node_gpus``; None where all nodes are alike.
        meters: The agents' folder, with the effects of power limits on jobs; None for none.
        keep_gpus: Whether jobs keep their number of GPUs, as live jobs do whose owners give no range.
    """

    policy: str
    gpus: int | None = None
    samples: int = 10
    node_gpus: int | None = None
    folder: Path | None = None
    nodes: str | None = None
    meters: Path | None = None
    keep_gpus: bool = False


@dataclass(frozen=True, slots=True)
class SiteSavings:
    """Simulated savings, with the known facts about the site's own machines.

    Attributes:
        savings: Simulated savings.
        power: Jobs whose power was measured, learned and assumed.
        node_gpus: GPUs of a node, where all nodes are alike.
        groups: Groups of nodes with a GPU type each; none where all nodes are alike.
        speed: Jobs whose speed was measured, learned and assumed.
        moved: Number of jobs that may run on another GPU type than they did.
        limits: Jobs whose response to power limits was measured and assumed.
    """

    savings: Savings
    power: KnownPower
    node_gpus: int
    groups: tuple[NodeGroup, ...] = ()
    speed: KnownSpeed | None = None
    moved: int = 0
    limits: SiteLimits | None = None


def simulated_savings(report: PastReport, wanted: WhatIf) -> SiteSavings:
    """Simulate the report's jobs under another scheduler, on nodes of the site's size at its jobs' power.

    Raises:
        ConfigError: No such scheduler, no source of intensity is named, or the folder has no scheduler's state.
        DataError: No job held a GPU, a job held more than there are, the jobs are of several clusters, or the
            intensity has gaps.
    """
    if report.intensity is None:
        raise ConfigError("grams need an intensity", pointer="--what-if", hint="name a source with --zone or --carbon")
    scheme(wanted.policy)
    gpus = wanted.gpus
    held = held_gpus(report.jobs)
    if len(clusters := sorted({job.cluster for job in held.jobs})) > 1:
        raise DataError(f"holds jobs of {len(clusters)} clusters: {', '.join(clusters)}; one is simulated at a time",
                        hint=f"print those of one: sacct -M {clusters[-1]} ...")  # fmt: skip
    at_once = most_at_once(held.start_s, held.elapsed_s, held.gpus)
    if gpus is not None and gpus < int(held.gpus.max()):
        raise DataError(f"a job held {int(held.gpus.max())} GPUs", hint=f"--gpus {at_once} or more")
    carbon = Intensity(hourly_from(report.intensity, held.first_s))
    power, speed = known_power(held.jobs, wanted.folder), known_speed(held.jobs, wanted.folder)
    limits = known_limits(held.jobs, wanted.meters)
    machines = _machines(wanted, held.jobs, power, speed)
    if limits.measured:
        machines = replace(machines, limits=limits.responses, limits_of=limits.response_of)
    saved = savings(
        held.submit_s, held.elapsed_s, held.gpus, carbon, wanted.policy, at_once if gpus is None else gpus,
        wanted.samples, machines,
    )  # fmt: skip
    moved = sum(map(speed.movable, held.jobs)) if machines.type_speed is not None else 0
    return SiteSavings(saved, power, machines.node.gpus, machines.groups, speed, moved, limits)


def _machines(wanted: WhatIf, jobs: Sequence[PastJob], power: KnownPower, speed: KnownSpeed) -> SiteMachines:
    """The nodes that the flags name, with the known power and speed of the jobs."""
    groups = () if wanted.nodes is None else _groups(wanted)
    machines = SiteMachines(
        node_of(wanted.node_gpus or 2),
        power.job_w if power.assumed < len(jobs) else None,
        wanted.node_gpus is not None or bool(groups),
        groups,
        _reach(jobs, groups, speed) if groups else None,
        tuple({gpus: known.ratio for gpus, known in profile.items()} for profile in speed.profiles),
        speed.profile if speed.profiles else None,
        keeps_gpus=wanted.keep_gpus,
    )
    if not groups or not any(map(speed.movable, jobs)):
        return machines
    typed = (
        replace(group, speed_ratio=speed.speed_of(group.type), limit_w=RTX3090_W * speed.watts_of(group.type))
        for group in groups
    )
    type_speed, type_watts = speed.of(jobs)
    return replace(machines, groups=tuple(typed), type_speed=type_speed, type_watts=type_watts)


_GROUP = re.compile(r"([\w.-]+):(\d{1,6})x(\d{1,4})")


def _groups(wanted: WhatIf) -> tuple[NodeGroup, ...]:
    """Parse the groups of nodes of the flag."""
    if wanted.gpus is not None or wanted.node_gpus is not None:
        raise ConfigError("--nodes states the number of GPUs", pointer="--nodes",
                          hint="leave out --gpus and --node-gpus")  # fmt: skip
    groups = []
    for part in (wanted.nodes or "").split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None or not int(match[2]) or not int(match[3]):
            raise ConfigError("is not a group of nodes", pointer="--nodes", got=part,
                              expected="TYPE:NODESxGPUS, such as a100:2x8,v100:4x4")  # fmt: skip
        groups.append(NodeGroup(match[1], int(match[2]), node_of(int(match[3]))))
    return tuple(groups)


def _reach(jobs: Sequence[PastJob], groups: Sequence[NodeGroup], speed: KnownSpeed) -> IntArray:
    """Bit mask of the groups that each job may run on: those of its GPU type; all where the log names no type.

    A job whose owner named no type may run on every type whose speed is known, too.
    """
    known = {kind: groups_of(groups, kind, "") for kind in {job.gpu_type for job in jobs}}
    any_type = sum(1 << at for at, group in enumerate(groups) if group.type in speed.types)
    for job in jobs:
        if not known[job.gpu_type]:
            types = ", ".join(sorted({group.type for group in groups}))
            raise DataError(f"job {job.id} ran on GPUs of type {job.gpu_type}, --nodes names {types}")
    bits = [known[job.gpu_type] | (any_type if speed.movable(job) else 0) for job in jobs]
    return np.array(bits, np.int64)
