"""What a served run came to: the figures of ``joulery up``, from its records, its readings and the counterfactuals.

Of one service they are what the run came to; of several there is an entry a service and their total.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from joulery.accounting.charge import Charged
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.energy.footprint import Footprint
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.profile import SliceProfile
from joulery.domain.serving.service import ModelFamily, Slo
from joulery.domain.serving.timeline import Tick
from joulery.perf.counterfactual import Answered, Counterfactual, compare
from joulery.perf.layouts import Predictor
from joulery.policies.serving.variant_policy import short

SCHEMA = "joulery.up/1"


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What one service of a run was made of.

    Attributes:
        records: Its requests that ended within the run.
        layouts: ``(from_s, layout)``: what served, from when.
        family: The variants.
        slo: What was promised.
        predictor: Knows the profile; None where no profile is known.
        base: The layout to compare with; None where nothing is compared.
        carbon: The intensity; None where it is not known.
        pue: Facility energy per IT energy.
        seed: Of the counterfactual's draws.
        name: The service.
        owner: Whom it is charged to.
    """

    records: Sequence[RequestRecord]
    layouts: Sequence[tuple[float, Layout]]
    family: ModelFamily
    slo: Slo
    predictor: Predictor | None
    base: Layout | None
    carbon: CarbonSeries | None
    pue: float = 1.0
    seed: int = 0
    name: str = ""
    owner: str = "default"

    @property
    def answered(self) -> list[RequestRecord]:
        """The requests that were answered, in order of arrival."""
        return sorted(
            (record for record in self.records if record.outcome is Outcome.OK), key=lambda record: record.arrival_s
        )

    @property
    def requests_cpu_s(self) -> float:
        """CPU seconds of its requests, in the replicas."""
        return math.fsum(record.cpu_s for record in self.records)


@dataclass(frozen=True, slots=True)
class Shares:
    """How the joules charged to the run divide. Together they are what the footprint's parts are.

    Attributes:
        requests_j: In the replicas, while they answered.
        load_j: The load generator.
        serving_j: Gateway, controller, and replicas between requests and while they started.
        joules_per_cpu_s: What one CPU second of a request was charged; one second of a whole GPU where services run
            on GPUs.
    """

    requests_j: float
    load_j: float
    serving_j: float
    joules_per_cpu_s: float


@dataclass(frozen=True, slots=True, eq=False)
class RunCost:
    """What a run of one or several services was charged.

    Attributes:
        charged: Joules and grams.
        cpu_s: CPU seconds of joulery's own processes within it, requests included.
        load_cpu_s: CPU seconds of the load generators, a part of them; NaN when not known.
        boards: GPUs that the services run on (``gpu:0``); none where they run on the CPU.
    """

    charged: Charged
    cpu_s: float
    load_cpu_s: float
    boards: frozenset[str] = frozenset()

    def shares(self, served: Sequence[Served]) -> Shares:
        """How its joules divide, these services' requests taken together.

        Requests on GPUs are what those are for: their joules above idle are the requests'. Gateway and load generator
        use the CPU, and divide what was charged for it.
        """
        requests_cpu_s = math.fsum(one.requests_cpu_s for one in served)
        if not self.boards:
            return divide(self.charged.run.attributed_j, requests_cpu_s, self.load_cpu_s, self.cpu_s)
        parts = self.charged.run.parts
        boards_j = math.fsum(part.energy_j for part in parts if part.device in self.boards)
        rest = divide(
            math.fsum(part.energy_j for part in parts if part.device not in self.boards),
            0.0,
            self.load_cpu_s,
            self.cpu_s,
        )
        if not requests_cpu_s > 0:
            return Shares(0.0, rest.load_j, rest.serving_j + boards_j, 0.0)
        return Shares(boards_j, rest.load_j, rest.serving_j, boards_j / requests_cpu_s)

    def portions(self, served: Sequence[Served]) -> list[Footprint]:
        """What each service is charged of everything, idle and overhead included: a portion by CPU seconds."""
        return [self.charged.run.portion(ratio) for ratio in cpu_shares([one.requests_cpu_s for one in served])]


def cpu_shares(cpu_s: Sequence[float]) -> list[float]:
    """CPU seconds as shares of their sum; equal ones where nobody used any. They add up to 1."""
    total_s = math.fsum(cpu_s)
    return [one / total_s for one in cpu_s] if total_s > 0 else [1 / len(cpu_s)] * len(cpu_s)


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
    if whole_s < 1e-9:
        return Shares(0.0, 0.0, attributed_j, 0.0)
    rate = attributed_j / whole_s
    requests_j, load_j = requests_cpu_s * rate, load_cpu_s * rate
    return Shares(requests_j, load_j, attributed_j - requests_j - load_j, rate)


def compared(served: Served) -> Counterfactual | None:
    """The answered requests beside the baseline; None where none was answered, or there is no baseline."""
    answered, predictor = served.answered, served.predictor
    if not answered or predictor is None or served.base is None:
        return None
    instances = {layout: predictor.instances(layout) for _, layout in served.layouts}
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
        predictor.instances(served.base),
        quantile=served.slo.quantile,
        overhead_s=predictor.overhead_s,
        seed=served.seed,
    )


def _intensities(served: Served, answered: Sequence[RequestRecord]) -> FloatArray:
    if served.carbon is None:
        return np.full(len(answered), np.nan)
    return served.carbon.at([record.end_s for record in answered])


def summarise_run(served: Sequence[Served], cost: RunCost, found: Sequence[Counterfactual | None]) -> dict[str, Any]:
    """The figures, JSON-ready but for NaN; ``services`` has those of each service.

    Conservation: ``requests_j + serving_j + load_generator_j + idle_j + unattributed_j == energy_j``; ``requests_j`` of
    the services add up to that of the run, their ``charged_j`` to its ``energy_j``.
    """
    shares = cost.shares(served)
    each = [_service(one, shares, other) for one, other in zip(served, found, strict=True)]
    figures = dict(each[0]) if len(each) == 1 else _together(served, each)
    figures |= {
        "serving_j": shares.serving_j,
        "load_generator_j": shares.load_j,
        "joules_per_cpu_s": shares.joules_per_cpu_s,
        "other_j": cost.charged.other_j,
    }
    if "saving_ratio" in figures:
        figures["saving_with_idle_ratio"] = _with_idle(figures, cost.charged.run.carbon_g)
    portions = cost.portions(served)
    figures["services"] = [
        {"service": one.name, "owner": one.owner, **entry, "charged_j": part.energy_j, "charged_g": _grams(part)}
        for one, entry, part in zip(served, each, portions, strict=True)
    ]
    return figures


def _service(served: Served, shares: Shares, found: Counterfactual | None) -> dict[str, Any]:
    """The figures of one service."""
    answered = served.answered
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
        "requests_j": served.requests_cpu_s * shares.joules_per_cpu_s,
        "requests_cpu_s": served.requests_cpu_s,
        "variants": variants,
        "layout_changes": max(0, len(served.layouts) - 1),
    }
    if found is not None:
        figures |= _saving(served, found, shares, answered)
    return figures


_OF_ONE = ("p95_s", "p50_s", "slo_s", "slo_quantile", "accuracy_ratio")
"""What only a service by itself has: NaN in the total, never an average of unlike things."""


def _together(served: Sequence[Served], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The total of several services."""
    counts = [entry["requests"] - entry["failed"] for entry in each]
    kept = math.fsum(entry["attainment_ratio"] * n for entry, n in zip(each, counts, strict=True) if n)
    figures: dict[str, Any] = {
        **{name: sum(entry[name] for entry in each) for name in ("requests", "failed", "layout_changes")},
        **dict.fromkeys(_OF_ONE, math.nan),
        "slo_met": all(entry["slo_met"] for entry in each),
        "attainment_ratio": kept / sum(counts) if sum(counts) else math.nan,
        "variants": {},
        **{name: math.fsum(entry[name] for entry in each) for name in ("requests_j", "requests_cpu_s")},
    }
    compared_too = [entry for entry in each if "saving_ratio" in entry]
    return figures | _saved_together(served, compared_too) if compared_too else figures


def _saved_together(served: Sequence[Served], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Savings of several services: of all their grams (joules where none are known), the bounds taken together."""
    grams = served[0].carbon is not None
    unit = "g" if grams else "j"
    bases = [entry[f"baseline_requests_{unit}"] for entry in each]
    spent = [base * (1 - entry["saving_ratio"]) for entry, base in zip(each, bases, strict=True)]

    def against(baselines: Sequence[float]) -> float:
        return 1 - math.fsum(spent) / math.fsum(baselines) if math.fsum(baselines) > 0 else math.nan

    def bound(name: str) -> float:
        return against([own / (1 - entry[name]) for entry, own in zip(each, spent, strict=True)])

    return {
        **{name: math.fsum(entry[name] for entry in each) for name in ("requests_g", "baseline_requests_g")},
        "baseline_requests_j": math.fsum(entry["baseline_requests_j"] for entry in each),
        "saving_ratio": against(bases),
        "saving_low_ratio": bound("saving_low_ratio"),
        "saving_high_ratio": bound("saving_high_ratio"),
        "saving_of": "grams" if grams else "joules",
        "baseline": "the same requests on each service's largest variant, idle power left out",
        "baseline_keeps_slo": all(entry["baseline_keeps_slo"] for entry in each),
    }


def _saving(served: Served, found: Counterfactual, shares: Shares, answered: Sequence[RequestRecord]) -> dict[str, Any]:
    per_g = served.pue * shares.joules_per_cpu_s / JOULES_PER_KWH
    g_per_kwh = np.nan_to_num(_intensities(served, answered))
    requests_g = float(np.array([record.cpu_s for record in answered]) @ g_per_kwh) * per_g
    baseline_g = float(found.base_cpu_s @ g_per_kwh) * per_g
    assert served.base is not None  # what is compared has something to be compared with
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


def _with_idle(figures: Mapping[str, Any], carbon_g: float) -> float:
    """The grams saved, relative to all that the run was charged."""
    saved_g = float(figures["baseline_requests_g"] - figures["requests_g"])
    return saved_g / (carbon_g + saved_g) if carbon_g + saved_g > 0 else math.nan


def _grams(part: Footprint) -> float:
    return part.carbon_g if part.signal is not None else math.nan


def with_baseline(
    ticks: Sequence[Tick], served: Sequence[Served], found: Sequence[Counterfactual | None], cost: RunCost
) -> tuple[Tick, ...]:
    """The ticks with the grams of the baseline: what was emitted, plus what the requests so far would have added."""
    pairs = [(one, other) for one, other in zip(served, found, strict=True) if other is not None]
    if not pairs or pairs[0][0].carbon is None:
        return tuple(ticks)
    per_g = pairs[0][0].pue * cost.shares(served).joules_per_cpu_s / JOULES_PER_KWH
    extra_g = per_g * np.sum([_extra(ticks, one, other) for one, other in pairs], axis=0)
    return tuple(
        replace(
            tick,
            baseline_g=tick.carbon_g + more,
            baseline_low_g=tick.carbon_g + least,
            baseline_high_g=tick.carbon_g + most,
        )
        for tick, (more, least, most) in zip(ticks, extra_g.tolist(), strict=True)
    )


def _extra(ticks: Sequence[Tick], served: Served, found: Counterfactual) -> FloatArray:
    """What the baseline of one service would have cost more by each tick, CPU s x g/kWh, float64[ticks, 3]: the
    estimate, its lower and its upper bound."""
    answered = served.answered
    end_s = np.array([record.end_s for record in answered])
    order = np.argsort(end_s, kind="stable")
    g_per_kwh = np.nan_to_num(_intensities(served, answered))[order]
    until = np.searchsorted(end_s[order], [tick.t_s for tick in ticks], "right")

    def so_far(cpu_s: FloatArray) -> FloatArray:
        return np.concatenate(([0.0], np.cumsum(cpu_s[order] * g_per_kwh)))[until]

    actual, base = so_far(np.array([record.cpu_s for record in answered])), so_far(found.base_cpu_s)
    factors = np.array([1.0, found.low_factor, found.high_factor])
    return np.asarray(base[:, None] * factors - actual[:, None])


def _accuracy(served: Served, variants: Mapping[str, float]) -> float:
    if not variants:
        return math.nan
    return math.fsum(share * served.family[name].accuracy_ratio for name, share in variants.items())


def _quantile(values: FloatArray, quantile: float) -> float:
    return float(np.quantile(values, quantile)) if len(values) else math.nan
