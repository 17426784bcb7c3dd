"""What a served run came to: the figures of ``joulery up``, from its records, its readings and the counterfactual."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from joulery.accounting.charge import Charged
from joulery.domain.arrays import FloatArray
from joulery.domain.carbon import CarbonSeries
from joulery.domain.engine import Outcome, RequestRecord
from joulery.domain.layout import Layout
from joulery.domain.profile import SliceProfile
from joulery.domain.serving import ModelFamily, Slo
from joulery.domain.timeline import Tick
from joulery.perf.counterfactual import Answered, Counterfactual, compare
from joulery.perf.layouts import Predictor
from joulery.policies.objective import JOULES_PER_KWH
from joulery.policies.variants import short

SCHEMA = "joulery.up/1"


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What a run was made of.

    Attributes:
        records: The requests that ended within it.
        layouts: ``(from_s, layout)``: what served, from when.
        family: The variants.
        slo: What was promised.
        predictor: Knows the profile.
        base: The layout to compare with.
        cpu_s: CPU seconds of joulery's own processes within it, requests included.
        load_cpu_s: CPU seconds of the load generator, a part of them; NaN when not known.
        carbon: The intensity; None where it is not known.
        pue: Facility energy per IT energy.
        seed: Of the counterfactual's draws.
    """

    records: Sequence[RequestRecord]
    layouts: Sequence[tuple[float, Layout]]
    family: ModelFamily
    slo: Slo
    predictor: Predictor
    base: Layout
    cpu_s: float
    load_cpu_s: float
    carbon: CarbonSeries | None
    pue: float = 1.0
    seed: int = 0

    @property
    def answered(self) -> list[RequestRecord]:
        """The requests that were answered, in order of arrival."""
        return sorted(
            (record for record in self.records if record.outcome is Outcome.OK), key=lambda record: record.arrival_s
        )


@dataclass(frozen=True, slots=True)
class Shares:
    """How the joules charged to the run divide. Together they are what the footprint's parts are.

    Attributes:
        requests_j: In the replicas, while they answered.
        load_j: The load generator.
        serving_j: Gateway, controller, and replicas between requests and while they started.
        joules_per_cpu_s: What one CPU second was charged.
    """

    requests_j: float
    load_j: float
    serving_j: float
    joules_per_cpu_s: float


def divide(attributed_j: float, requests_cpu_s: float, load_cpu_s: float, cpu_s: float) -> Shares:
    """The run's joules in proportion to CPU seconds.

    Args:
        attributed_j: Joules charged to the run's processes.
        requests_cpu_s, load_cpu_s: CPU seconds of the requests and of the load generator (NaN: not known, in serving).
        cpu_s: CPU seconds of all the run's processes. The kernel counts ticks of 10 ms; where that is less than the
            parts, the parts are all there is.
    """
    load_cpu_s = 0.0 if math.isnan(load_cpu_s) else load_cpu_s
    whole_s = max(cpu_s, requests_cpu_s + load_cpu_s)
    if not whole_s > 0:
        return Shares(0.0, 0.0, attributed_j, 0.0)
    rate = attributed_j / whole_s
    requests_j, load_j = requests_cpu_s * rate, load_cpu_s * rate
    return Shares(requests_j, load_j, attributed_j - requests_j - load_j, rate)


def compared(served: Served) -> Counterfactual | None:
    """The answered requests beside the baseline; None where none was answered."""
    answered = served.answered
    if not answered:
        return None
    instances = {layout: served.predictor.instances(layout) for _, layout in served.layouts}
    ran: list[tuple[float, Sequence[SliceProfile]]] = [(at_s, instances[layout]) for at_s, layout in served.layouts]
    return compare(
        Answered(
            np.array([record.arrival_s for record in answered]),
            [record.variant for record in answered],
            np.array([record.cpu_s for record in answered]),
            np.array([record.latency_s for record in answered]),
            _intensities(served, answered),
        ),
        ran,
        served.predictor.instances(served.base),
        quantile=served.slo.quantile,
        overhead_s=served.predictor.overhead_s,
        seed=served.seed,
    )


def _intensities(served: Served, answered: Sequence[RequestRecord]) -> FloatArray:
    if served.carbon is None:
        return np.full(len(answered), np.nan)
    return served.carbon.at([record.end_s for record in answered])


def summarise_run(served: Served, charged: Charged, found: Counterfactual | None) -> dict[str, Any]:
    """The figures, JSON-ready but for NaN.

    Conservation: ``requests_j + serving_j + load_generator_j + idle_j + unattributed_j == energy_j``.
    """
    run, answered = charged.run, served.answered
    requests_cpu_s = math.fsum(record.cpu_s for record in served.records)
    shares = divide(run.attributed_j, requests_cpu_s, served.load_cpu_s, served.cpu_s)
    latency_s = np.array([record.latency_s for record in answered])
    counts = Counter(record.variant for record in answered)
    variants = {variant.name: counts[variant.name] / len(answered) for variant in served.family.variants if answered}
    sources = dict.fromkeys(variant.accuracy_source for variant in served.family.variants)
    figures: dict[str, Any] = {
        "requests": len(served.records),
        "failed": len(served.records) - len(answered),
        "p95_s": _quantile(latency_s, 0.95),
        "p50_s": _quantile(latency_s, 0.5),
        "slo_s": served.slo.latency_s,
        "slo_quantile": served.slo.quantile,
        "slo_met": bool(len(answered)) and _quantile(latency_s, served.slo.quantile) <= served.slo.latency_s,
        "attainment_ratio": float(np.mean(latency_s <= served.slo.latency_s)) if answered else math.nan,
        "accuracy_ratio": _accuracy(served, variants),
        "accuracy_source": f"{served.family.accuracy_metric}, {'; '.join(sources)}, weighted by requests",
        "requests_j": shares.requests_j,
        "serving_j": shares.serving_j,
        "load_generator_j": shares.load_j,
        "requests_cpu_s": requests_cpu_s,
        "joules_per_cpu_s": shares.joules_per_cpu_s,
        "other_j": charged.other_j,
        "variants": variants,
        "layout_changes": max(0, len(served.layouts) - 1),
    }
    if found is not None:
        figures |= _saving(served, found, shares, answered, carbon_g=run.carbon_g)
    return figures


def _saving(
    served: Served, found: Counterfactual, shares: Shares, answered: Sequence[RequestRecord], *, carbon_g: float
) -> dict[str, Any]:
    per_g = served.pue * shares.joules_per_cpu_s / JOULES_PER_KWH
    g_per_kwh = np.nan_to_num(_intensities(served, answered))
    requests_g = float(np.array([record.cpu_s for record in answered]) @ g_per_kwh) * per_g
    baseline_g = float(found.base_cpu_s @ g_per_kwh) * per_g
    saved_g = baseline_g - requests_g
    whole_g = carbon_g + saved_g
    base = f"the same requests on {short(served.base)}, idle power left out"
    return {
        "requests_g": requests_g if served.carbon is not None else math.nan,
        "baseline_requests_g": baseline_g if served.carbon is not None else math.nan,
        "baseline_requests_j": float(found.base_cpu_s.sum()) * shares.joules_per_cpu_s,
        "saving_ratio": found.saving_ratio,
        "saving_low_ratio": found.low_ratio,
        "saving_high_ratio": found.high_ratio,
        "saving_of": "grams" if served.carbon is not None else "joules",
        "saving_energy_ratio": found.energy_saving_ratio,
        "saving_with_idle_ratio": saved_g / whole_g if served.carbon is not None and whole_g > 0 else math.nan,
        "baseline": base,
        "baseline_p95_s": found.base_latency_s,
        "baseline_keeps_slo": found.base_latency_s <= served.slo.latency_s,
        "baseline_seen_live": found.seen_live,
        "calibration": {
            "cpu_error_ratio": found.cpu_error_ratio,
            "latency_error_ratio": found.latency_error_ratio,
            "correction_ratio": dict(found.correction_ratio),
        },
    }


def with_baseline(ticks: Sequence[Tick], served: Served, found: Counterfactual, charged: Charged) -> tuple[Tick, ...]:
    """The ticks with the grams of the baseline: what was emitted, plus what the requests so far would have added."""
    answered = served.answered
    if served.carbon is None or not answered:
        return tuple(ticks)
    requests_cpu_s = math.fsum(record.cpu_s for record in served.records)
    shares = divide(charged.run.attributed_j, requests_cpu_s, served.load_cpu_s, served.cpu_s)
    per_g = served.pue * shares.joules_per_cpu_s / JOULES_PER_KWH
    end_s = np.array([record.end_s for record in answered])
    order = np.argsort(end_s, kind="stable")
    g_per_kwh = np.nan_to_num(_intensities(served, answered))[order]
    actual_g = np.concatenate(([0.0], np.cumsum(np.array([r.cpu_s for r in answered])[order] * g_per_kwh))) * per_g
    base_g = np.concatenate(([0.0], np.cumsum(found.base_cpu_s[order] * g_per_kwh))) * per_g
    until = np.searchsorted(end_s[order], [tick.t_s for tick in ticks], "right")
    return tuple(
        replace(
            tick,
            baseline_g=tick.carbon_g - actual_g[k] + base_g[k],
            baseline_low_g=tick.carbon_g - actual_g[k] + base_g[k] * found.low_factor,
            baseline_high_g=tick.carbon_g - actual_g[k] + base_g[k] * found.high_factor,
        )
        for tick, k in zip(ticks, until.tolist(), strict=True)
    )


def _accuracy(served: Served, variants: Mapping[str, float]) -> float:
    if not variants:
        return math.nan
    return math.fsum(share * served.family[name].accuracy_ratio for name, share in variants.items())


def _quantile(values: FloatArray, quantile: float) -> float:
    return float(np.quantile(values, quantile)) if len(values) else math.nan
