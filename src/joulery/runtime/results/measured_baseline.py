"""Measure the baseline: the cost of requests and of the machine in the periods in which it served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from joulery.accounting.charge import IdleRule, charge
from joulery.accounting.steps import NS_PER_S
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.energy.power import BusyTimes
from joulery.perf.counterfactual import Counterfactual
from joulery.perf.switchback import MIN_PERIODS, SampledCost, TotalEstimate, estimate_total, sums_by_period
from joulery.policies.serving.switchback import AuditTally, Switchback
from joulery.runtime.measuring.account import Basis
from joulery.runtime.session.requests import OK, RequestColumns

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredBaseline:
    """Measured cost of a service's baseline in the periods in which it served.

    Attributes:
        grams: CPU seconds times intensity of all answered requests under the baseline, s g/kWh.
        cpu: CPU seconds of all answered requests under the baseline, s.
        requests: Answered requests that arrived in each period, float64[periods].
        weight: Intensities at their answers, summed, g/kWh, float64[periods].
        grams_size, cpu_size: Sizes that the totals are proportional to, over all answered requests: the intensities at
            their answers, summed (g/kWh), and their number.
        latency_s: Latencies of the requests in the periods, float64[n].
        within: Share of them within the SLO; NaN for none.
    """

    grams: TotalEstimate
    cpu: TotalEstimate
    grams_size: float
    cpu_size: float
    requests: FloatArray
    weight: FloatArray
    latency_s: FloatArray
    within: float


@dataclass(frozen=True, slots=True, eq=False)
class PeriodEnergy:
    """Metered energy of each period, float64[periods].

    Attributes:
        busy_j: Joules charged to the run's processes.
        still_j: Idle joules, and those without an owner.
        seconds: Length.
        g_per_kwh: Intensity; NaN where unknown.
        run_s: The whole run, seconds.
        run_g: Intensity integrated over it, s g/kWh; NaN where unknown.
    """

    busy_j: FloatArray
    still_j: FloatArray
    seconds: FloatArray
    g_per_kwh: FloatArray
    run_s: float
    run_g: float

    @property
    def knows_intensity(self) -> bool:
        """Whether the intensity is known in all periods and over the run."""
        return self.run_g > 0 and bool(np.all(self.g_per_kwh >= 0))


def measured_baseline(
    requests: RequestColumns, service: str, spans: Spans, carbon: CarbonSeries | None, limit_s: float
) -> MeasuredBaseline | None:
    """Cost of a service's requests in the periods of its baseline; None with too few periods.

    Args:
        requests: The requests of the run.
        service: The service.
        spans: ``(from_s, until_s)``, the measured parts of the periods.
        carbon: The intensity; None where it is not known.
        limit_s: Latency of the SLO.
    """
    if len(spans) < MIN_PERIODS:
        return None
    cpu, grams, count, weight = (np.zeros(len(spans)) for _ in range(4))
    answered, weights = 0, 0.0
    latencies: list[FloatArray] = []
    for block in requests.blocks(service):
        rows = block[block["outcome"] == OK]
        g_per_kwh = np.zeros(len(rows)) if carbon is None else np.nan_to_num(carbon.at(rows["end_s"]))
        at_s = rows["arrival_s"]
        cpu += sums_by_period(at_s, rows["cpu_s"], spans)
        grams += sums_by_period(at_s, rows["cpu_s"] * g_per_kwh, spans)
        count += sums_by_period(at_s, np.ones(len(rows)), spans)
        weight += sums_by_period(at_s, g_per_kwh, spans)
        answered, weights = answered + len(rows), weights + float(g_per_kwh.sum())
        latencies += [(rows["end_s"] - at_s)[(at_s >= from_s) & (at_s < until_s)] for from_s, until_s in spans]
    if not np.count_nonzero(count) >= MIN_PERIODS:
        return None
    by_requests = SampledCost(cpu, count, answered)
    by_grams = SampledCost(grams, weight, weights) if weight.sum() > 0 else by_requests
    latency_s = np.concatenate(latencies)
    within = float(np.mean(latency_s <= limit_s)) if len(latency_s) else math.nan
    return MeasuredBaseline(
        grams=estimate_total([by_grams]),
        cpu=estimate_total([by_requests]),
        grams_size=by_grams.total_size,
        cpu_size=answered,
        requests=count,
        weight=weight,
        latency_s=latency_s,
        within=within,
    )


def observed(
    modelled: Counterfactual, found: MeasuredBaseline, spent: tuple[float, float], quantile: float
) -> Counterfactual:
    """Replace the baseline of a comparison by the measured one; the figures on the model's own errors stay.

    Args:
        modelled: The comparison by replay.
        found: The baseline as measured.
        spent: Actual cost of the answered requests: CPU seconds times intensity (s g/kWh), and CPU seconds.
        quantile: Of the latencies to compare.
    """
    spent_g, spent_s = spent
    grams = found.weight.sum() > 0
    saving, low, high = (found.grams if grams else found.cpu).saving(spent_g if grams else spent_s)
    each_s = found.grams.total / found.grams_size if grams else found.cpu.total / found.cpu_size
    return replace(
        modelled,
        base_cpu_s=np.full(len(modelled.base_cpu_s), each_s),
        saving_ratio=saving,
        low_ratio=low,
        high_ratio=high,
        energy_saving_ratio=found.cpu.saving(spent_s)[0],
        base_latency_s=float(np.quantile(found.latency_s, quantile)),
        seen_live=True,
    )


def audit_figures(
    audit: Switchback | None, tally: AuditTally | None, periods: int, found: MeasuredBaseline | None
) -> dict[str, Any] | None:
    """Figures of a baseline's measurement and of its failures, JSON-ready but for NaN; None without an audit."""
    if audit is None or tally is None:
        return None
    latency_s = np.empty(0) if found is None else found.latency_s
    return {
        "budget_ratio": audit.share_ratio,
        "share_ratio": tally.share_ratio,
        "blocks": tally.blocks,
        "periods": periods,
        "requests": len(latency_s),
        "cut": tally.cut,
        "withheld": dict(tally.withheld),
        "p95_s": float(np.quantile(latency_s, 0.95)) if len(latency_s) else math.nan,
        "attainment_ratio": math.nan if found is None else found.within,
    }


def machine_baseline(energy: PeriodEnergy, found: MeasuredBaseline, pue: float, *, in_grams: bool) -> TotalEstimate:
    """Cost of the whole machine under the baseline for the whole run, grams or joules.

    Joules of the run's processes are in proportion to requests, idle joules to time. Both are measured in the periods,
    so a policy that lets GPUs sleep is compared with a baseline that does not.

    Args:
        energy: Metered energy in the periods.
        found: The requests in the periods.
        pue: Facility energy per IT energy.
        in_grams: Whether to return grams; the intensity must be known.
    """
    if not in_grams:
        busy = SampledCost(energy.busy_j, found.requests, found.cpu_size)
        return estimate_total([busy, SampledCost(energy.still_j, energy.seconds, energy.run_s)])
    g_per_kwh = energy.g_per_kwh
    busy = SampledCost(energy.busy_j * g_per_kwh, found.weight, found.grams_size)
    still = SampledCost(energy.still_j * g_per_kwh, energy.seconds * g_per_kwh, energy.run_g)
    total, per_g = estimate_total([busy, still]), pue / JOULES_PER_KWH
    return replace(total, total=total.total * per_g, low=total.low * per_g, high=total.high * per_g)


def period_energy(basis: Basis, busy: Mapping[str, BusyTimes], spans: Spans) -> PeriodEnergy:
    """The metered energy of each period.

    Args:
        basis: What the run is charged from.
        busy: Busy times as they were read: those of ``basis`` are in intervals of a second, which a period would
            divide.
        spans: The periods.
    """
    carbon = basis.carbon
    rows = []
    for from_s, until_s in spans:
        within = {device: _within(times, from_s, until_s) for device, times in busy.items()}
        charged = charge(
            basis.power,
            {device: times for device, times in within.items() if times is not None},
            from_s,
            until_s,
            idle=IdleRule(basis.terms.idle),
            exclusive=basis.exclusive,
        ).run
        g_per_kwh = math.nan if carbon is None else carbon.mean(from_s, until_s)
        rows.append((charged.attributed_j, charged.idle_j + charged.unattributed_j, until_s - from_s, g_per_kwh))
    busy_j, still_j, seconds, intensities = np.array(rows, np.float64).reshape(-1, 4).T
    run_g = math.nan if carbon is None else carbon.integral(basis.t0_s, basis.t1_s)
    return PeriodEnergy(busy_j, still_j, seconds, intensities, run_s=basis.t1_s - basis.t0_s, run_g=run_g)


def _within(times: BusyTimes, from_s: float, until_s: float) -> BusyTimes | None:
    """Busy times of a period as one interval; a reading across its edge counts in part; None where nothing was read."""
    edges_ns = np.array([from_s, until_s]) * NS_PER_S
    known = times.edges_ns.astype(np.float64)
    if edges_ns[0] < known[0] or edges_ns[1] > known[-1]:
        return None

    def between(values: FloatArray) -> FloatArray:
        so_far = np.concatenate(([0.0], np.cumsum(np.nan_to_num(values))))
        return np.diff(np.interp(edges_ns, known, so_far))

    return BusyTimes(edges_ns.astype(np.int64), between(times.app_s), between(times.all_s), times.cpus)
