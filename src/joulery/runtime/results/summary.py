"""The figures of a served run, from its requests, its meter readings and the counterfactuals.

A run of one service contains its figures; a run of several contains an entry for each service and their total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from joulery.accounting.charge import Charged, EnergyShares, cpu_shares, divide
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.energy.footprint import Footprint
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.profile import SliceProfile
from joulery.domain.serving.service import ModelFamily, Slo
from joulery.domain.serving.timeline import Tick
from joulery.perf.counterfactual import STEERED_RATIO, Counterfactual, CounterfactualAnswers, compare
from joulery.perf.layouts import Predictor
from joulery.policies.serving.messages import short
from joulery.policies.serving.switchback import AuditTally, Switchback
from joulery.runtime.results.accuracy import accuracy_figures
from joulery.runtime.results.measured_baseline import (
    MeasuredBaseline,
    PeriodEnergy,
    audit_figures,
    machine_baseline,
    measured_baseline,
    observed,
)
from joulery.runtime.results.pricing import NOTHING, Prices, seconds_here
from joulery.runtime.results.totals import Totals, intensities, totals_of
from joulery.runtime.session.requests import OK, ROW, RequestColumns, Rows

MODELLED, MEASURED = "modelled", "measured"
"""Basis of the baseline: replayed from profiles, or observed in periods of its own."""
MOST_COMPARED = 2_000_000
"""Most answered requests of a service to replay under the baseline; of more, evenly spaced stretches are replayed."""
_STRETCH = 1000
"""Consecutive requests of one stretch."""


@dataclass(frozen=True, eq=False)
class ServedService:
    """One service of a run.

    Attributes:
        requests: The requests of the run that ended within it, of every service.
        layouts: ``(from_s, layout)``: which layout served from when.
        family: The variants.
        slo: Its latency SLO.
        predictor: Predicts from the profile; None where no profile is known.
        base: The baseline layout; None where nothing is compared.
        carbon: The intensity; None where it is not known.
        pue: Facility energy per IT energy.
        seed: Seed of the counterfactual's samples.
        name: The service.
        owner: Owner that it is charged to.
        periods: ``(from_s, until_s)``: when the baseline served and was measured.
        audit: Settings of the baseline's measurement; None where it was not measured.
        tally: Outcome of its periods; None where it was not audited.
        shadow: Live over modelled cost of each shadow replay, by variant.
        labels: Of each variant, how many labelled answers were right, and how many were labelled.
        floor_ratio: The accuracy that its answers were to keep in the mean; 0 for none.
        prices: Watts by variant, where some of its models are on other servers: ``requests`` and ``predictor`` have
            joules for CPU seconds then.
    """

    requests: RequestColumns
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
    periods: Sequence[tuple[float, float]] = ()
    audit: Switchback | None = None
    tally: AuditTally | None = None
    shadow: Mapping[str, FloatArray] = field(default_factory=dict)
    labels: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    floor_ratio: float = 0.0
    prices: Prices = NOTHING

    @cached_property
    def measured(self) -> MeasuredBaseline | None:
        """Its baseline as measured; None where it was not, or in too few periods."""
        return measured_baseline(self.requests, self.name, self.periods, self.carbon, self.slo.latency_s)

    @cached_property
    def totals(self) -> Totals:
        """Counts and sums over all of its requests."""
        return totals_of(self.requests, self.name, self.carbon)

    @cached_property
    def answered(self) -> Rows:
        """Its answered requests in order of arrival; of more than :data:`MOST_COMPARED`, evenly spaced stretches."""
        every = max(1, math.ceil(self.totals.answered / MOST_COMPARED))
        found, seen = [], 0
        for block in self.requests.blocks(self.name):
            fine = block[block["outcome"] == OK]
            keep = (np.arange(seen, seen + len(fine)) // _STRETCH) % every == 0
            found.append(fine if every == 1 else fine[keep])
            seen += len(fine)
        rows = np.concatenate(found) if found else np.empty(0, ROW)
        return rows[np.argsort(rows["arrival_s"], kind="stable")]

    @property
    def compared_share(self) -> float:
        """Share of its answered requests that are in :attr:`answered`."""
        return len(self.answered) / self.totals.answered if self.totals.answered else 1.0

    @property
    def requests_cpu_s(self) -> float:
        """CPU seconds of its requests, in the replicas of this machine."""
        return seconds_here(self.totals.spent_s, self.prices) if self.prices else self.totals.cpu_s

    @property
    def upstream_j(self) -> float:
        """Joules of its requests on other servers, which this machine's meters do not charge to the run."""
        return math.fsum(self.totals.spent_s.get(name, 0.0) for name in self.prices.upstreams)

    @property
    def upstream_g(self) -> float:
        """Grams of those joules; NaN where no intensity is known."""
        if self.carbon is None:
            return math.nan
        weighted = math.fsum(self.totals.spent_g.get(name, 0.0) for name in self.prices.upstreams)
        return weighted * self.pue / JOULES_PER_KWH

    def rate(self, shares: EnergyShares) -> float:
        """Joules of a second of its requests, as the comparison with the baseline counts them."""
        return 1.0 if self.prices else shares.joules_per_cpu_s


@dataclass(frozen=True, slots=True, eq=False)
class RunCost:
    """The charge of a run of one or several services.

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

    def shares(self, served: Sequence[ServedService]) -> EnergyShares:
        """Division of its joules, these services' requests taken together.

        Joules above idle of the GPUs are the requests'. Gateway and load generator use the CPU, and divide its
        charge.
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
            return EnergyShares(0.0, rest.load_j, rest.serving_j + boards_j, 0.0)
        return EnergyShares(boards_j, rest.load_j, rest.serving_j, boards_j / requests_cpu_s)

    def portions(self, served: Sequence[ServedService]) -> list[Footprint]:
        """The charge of each service, idle and overhead included: a portion by CPU seconds."""
        seconds = [one.requests_cpu_s for one in served]
        weights = seconds if any(seconds) else [one.totals.cpu_s for one in served]
        return [self.charged.run.portion(ratio) for ratio in cpu_shares(weights)]


def compared(served: ServedService) -> Counterfactual | None:
    """Compare the answered requests with the baseline; None where none was answered, or there is no baseline.

    The baseline is the measured one where it served in enough periods, else the modelled one.
    """
    answered, predictor = served.answered, served.predictor
    if not len(answered) or predictor is None or served.base is None:
        return None
    instances = {layout: predictor.instances(layout) for _, layout in served.layouts}
    ran: list[tuple[float, Sequence[SliceProfile]]] = [(at_s, instances[layout]) for at_s, layout in served.layouts]
    modelled = compare(
        CounterfactualAnswers(
            answered["arrival_s"],
            [served.requests.variants[code] for code in answered["variant"].tolist()],
            answered["cpu_s"],
            answered["end_s"] - answered["arrival_s"],
            intensities(served.carbon, answered),
        ),
        ran,
        predictor.instances(served.base),
        quantile=served.slo.quantile,
        overhead_s=predictor.overhead_s,
        seed=served.seed,
        shadow=served.shadow,
        batch_delay_s=predictor.batch_delay_s,
    )
    if served.measured is None:
        return modelled
    spent = (served.totals.answered_cpu_g, served.totals.answered_cpu_s)
    return observed(modelled, served.measured, spent, served.slo.quantile)


def summarise_run(
    served: Sequence[ServedService],
    cost: RunCost,
    found: Sequence[Counterfactual | None],
    energy: PeriodEnergy | None = None,
) -> dict[str, Any]:
    """The figures, JSON-ready but for NaN; ``services`` has those of each service.

    Conservation: ``requests_j + serving_j + load_generator_j + idle_j + unattributed_j == energy_j``; ``requests_j`` of
    the services add up to that of the run, their ``charged_j`` to its ``energy_j``.

    Args:
        served: The services.
        cost: The charge of the run.
        found: The comparison of each service with its baseline.
        energy: The meters in the periods of a single service's baseline; None where those were not measured.
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
        figures |= _machine_saving(figures, served, cost.charged.run, energy)
    portions = cost.portions(served)
    figures["services"] = [
        {"service": one.name, "owner": one.owner, **entry, "charged_j": part.energy_j, "charged_g": _grams(part)}
        for one, entry, part in zip(served, each, portions, strict=True)
    ]
    return figures


def _service(served: ServedService, shares: EnergyShares, found: Counterfactual | None) -> dict[str, Any]:
    """The figures of one service."""
    totals = served.totals
    latency_s, answered = totals.latency_s, totals.answered
    variants = {
        variant.name: totals.variants.get(variant.name, 0) / answered for variant in served.family.variants if answered
    }
    figures: dict[str, Any] = {
        "requests": totals.requests,
        "answered": answered,
        "failed": totals.requests - answered - totals.abandoned,
        "refused": totals.refused,
        "abandoned": totals.abandoned,
        "late": int(np.count_nonzero(latency_s > served.slo.latency_s)),
        "p95_s": _quantile(latency_s, 0.95),
        "p50_s": _quantile(latency_s, 0.5),
        "slo_s": served.slo.latency_s,
        "slo_quantile": served.slo.quantile,
        "slo_met": bool(answered) and _quantile(latency_s, served.slo.quantile) <= served.slo.latency_s,
        "attainment_ratio": float(np.mean(latency_s <= served.slo.latency_s)) if answered else math.nan,
        **accuracy_figures(served.family, served.labels, variants, served.floor_ratio),
        "requests_j": served.requests_cpu_s * shares.joules_per_cpu_s,
        "requests_cpu_s": served.requests_cpu_s,
        **_upstream_figures(served),
        "variants": variants,
        "layout_changes": max(0, len(served.layouts) - 1),
    }
    if found is not None:
        figures |= _saving(served, found, shares)
    return figures


def _upstream_figures(served: ServedService) -> dict[str, Any]:
    """Joules and grams of models on other servers, with their quality; nothing where all run on this machine."""
    if not served.prices:
        return {}
    quality = served.prices.quality.value
    return {"upstream_j": served.upstream_j, "upstream_g": served.upstream_g, "upstream_quality": quality}


COUNTS = ("requests", "answered", "failed", "refused", "abandoned", "late")
"""Requests that ended are answered, failed or abandoned by their client; ``refused`` are of the failed, ``late`` of the
answered."""
_OF_ONE = ("p95_s", "p50_s", "slo_s", "slo_quantile", "accuracy_ratio")
"""Figures of one service by itself: NaN in the total, never an average of unlike things."""


def _together(served: Sequence[ServedService], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The total of several services."""
    counts = [entry["answered"] for entry in each]
    kept = math.fsum(entry["attainment_ratio"] * n for entry, n in zip(each, counts, strict=True) if n)
    figures: dict[str, Any] = {
        **{name: sum(entry[name] for entry in each) for name in (*COUNTS, "layout_changes")},
        **dict.fromkeys(_OF_ONE, math.nan),
        "slo_met": all(entry["slo_met"] for entry in each),
        "attainment_ratio": kept / sum(counts) if sum(counts) else math.nan,
        "variants": {},
        **{name: math.fsum(entry[name] for entry in each) for name in ("requests_j", "requests_cpu_s")},
    }
    compared_too = [entry for entry in each if "saving_ratio" in entry]
    return figures | _saved_together(served, compared_too) if compared_too else figures


def _saved_together(served: Sequence[ServedService], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Savings of several services: of all their grams (joules where none are known), the bounds taken together."""
    grams = any(entry["saving_of"] == "grams" for entry in each)
    unit = "g" if grams else "j"
    bases = [entry[f"baseline_requests_{unit}"] for entry in each]
    spent = [base * (1 - entry["saving_ratio"]) for entry, base in zip(each, bases, strict=True)]

    def against(baselines: Sequence[float]) -> float:
        return 1 - math.fsum(spent) / math.fsum(baselines) if math.fsum(baselines) > 0 else math.nan

    def bound(name: str) -> float:
        return against([own / (1 - entry[name]) for entry, own in zip(each, spent, strict=True)])

    estimate = against(bases)  # the bounds contain it, also after rounding
    return {
        **{name: math.fsum(entry[name] for entry in each) for name in ("requests_g", "baseline_requests_g")},
        "baseline_requests_j": math.fsum(entry["baseline_requests_j"] for entry in each),
        "saving_ratio": estimate,
        "saving_low_ratio": min(bound("saving_low_ratio"), estimate),
        "saving_high_ratio": max(bound("saving_high_ratio"), estimate),
        "saving_of": "grams" if grams else "joules",
        "baseline": "the same requests on each service's largest variant",
        "baseline_keeps_slo": all(entry["baseline_keeps_slo"] for entry in each),
        "baseline_basis": MEASURED if all(entry["baseline_basis"] == MEASURED for entry in each) else MODELLED,
    }


def _saving(served: ServedService, found: Counterfactual, shares: EnergyShares) -> dict[str, Any]:
    rate = served.rate(shares)
    per_g = served.pue * rate / JOULES_PER_KWH
    g_per_kwh = np.nan_to_num(intensities(served.carbon, served.answered))
    requests_g = served.totals.answered_cpu_g * per_g
    baseline_g = float(found.base_cpu_s @ g_per_kwh) * per_g / served.compared_share
    assert served.base is not None  # a comparison has a baseline
    base = f"the same requests on {short(served.base)}"
    return {
        "requests_g": requests_g if served.carbon is not None else math.nan,
        "baseline_requests_g": baseline_g if served.carbon is not None else math.nan,
        "baseline_requests_j": float(found.base_cpu_s.sum()) * rate / served.compared_share,
        "saving_ratio": found.saving_ratio,
        "saving_low_ratio": found.low_ratio,
        "saving_high_ratio": found.high_ratio,
        "saving_of": "grams" if served.carbon is not None and requests_g > 0 else "joules",  # of no grams no share
        "saving_energy_ratio": found.energy_saving_ratio,
        "baseline": base,
        "baseline_p95_s": found.base_latency_s,
        "baseline_keeps_slo": found.base_latency_s <= served.slo.latency_s,
        "baseline_seen_live": found.seen_live,
        "baseline_shadow_replays": found.shadowed,
        "baseline_basis": MODELLED if served.measured is None else MEASURED,
        "audit": audit_figures(served.audit, served.tally, len(served.periods), served.measured),
        "calibration": _calibration(found),
    }


def _calibration(found: Counterfactual) -> dict[str, Any]:
    """Error of the replay of the layouts; NaN where requests were steered among variants, which it does not model."""
    judged = found.steered_ratio <= STEERED_RATIO
    return {
        "cpu_error_ratio": found.cpu_error_ratio if judged else math.nan,
        "latency_error_ratio": found.latency_error_ratio if judged else math.nan,
        "correction_ratio": dict(found.correction_ratio),
        "steered_ratio": found.steered_ratio,
    }


def _machine_saving(
    figures: Mapping[str, Any], served: Sequence[ServedService], run: Footprint, energy: PeriodEnergy | None
) -> dict[str, Any]:
    """The saving of the whole machine, idle power included, of its grams or joules.

    With a measured baseline and one service it is measured as well. Else the additional joules above idle of the
    baseline are added to the charge: gateway and idle power count as equal in both.
    """
    in_grams = figures["saving_of"] == "grams"
    spent = run.counted_g if in_grams else run.energy_j
    spent += math.fsum(one.upstream_g if in_grams else one.upstream_j for one in served if one.prices)
    measured = served[0].measured if len(served) == 1 and not served[0].prices else None
    if energy is not None and measured is not None and energy.knows_intensity >= in_grams:
        saving = machine_baseline(energy, measured, served[0].pue, in_grams=in_grams).saving(spent)
    else:
        base = figures["baseline_requests_g" if in_grams else "baseline_requests_j"]
        own = base * (1 - figures["saving_ratio"])  # what failed requests cost is in neither

        def with_idle(name: str) -> float:
            more = own / (1 - figures[name]) - own
            return more / (spent + more) if spent + more > 0 else math.nan

        saving = (with_idle("saving_ratio"), with_idle("saving_low_ratio"), with_idle("saving_high_ratio"))
    return {
        "saving_machine_ratio": saving[0],
        "saving_machine_low_ratio": saving[1],
        "saving_machine_high_ratio": saving[2],
        "saving_with_idle_ratio": saving[0],
    }


def _grams(part: Footprint) -> float:
    return part.counted_g if part.signal is not None else math.nan


def with_baseline(
    ticks: Sequence[Tick], served: Sequence[ServedService], found: Sequence[Counterfactual | None], cost: RunCost
) -> tuple[Tick, ...]:
    """The ticks with the grams of the baseline: emitted grams, plus what it adds for the requests so far."""
    pairs = [(one, other) for one, other in zip(served, found, strict=True) if other is not None]
    if not pairs or pairs[0][0].carbon is None:
        return tuple(ticks)
    shares, per_g = cost.shares(served), pairs[0][0].pue / JOULES_PER_KWH
    extra_g = per_g * np.sum([one.rate(shares) * _extra(ticks, one, other) for one, other in pairs], axis=0)
    return tuple(
        replace(
            tick,
            baseline_g=tick.carbon_g + more,
            baseline_low_g=tick.carbon_g + least,
            baseline_high_g=tick.carbon_g + most,
        )
        for tick, (more, least, most) in zip(ticks, extra_g.tolist(), strict=True)
    )


def _extra(ticks: Sequence[Tick], served: ServedService, found: Counterfactual) -> FloatArray:
    """Excess of the baseline of one service over the service by each tick, CPU s x g/kWh, float64[ticks, 3].

    The columns are the estimate, its lower and its upper bound.
    """
    answered = served.answered
    order = np.argsort(answered["end_s"], kind="stable")
    g_per_kwh = np.nan_to_num(intensities(served.carbon, answered))[order] / served.compared_share
    until = np.searchsorted(answered["end_s"][order], [tick.t_s for tick in ticks], "right")

    def so_far(cpu_s: FloatArray) -> FloatArray:
        return np.concatenate(([0.0], np.cumsum(cpu_s[order] * g_per_kwh)))[until]

    actual, base = so_far(answered["cpu_s"]), so_far(found.base_cpu_s)
    factors = np.array([1.0, found.low_factor, found.high_factor])
    return np.asarray(base[:, None] * factors - actual[:, None])


def _quantile(values: FloatArray, quantile: float) -> float:
    return float(np.quantile(values, quantile)) if len(values) else math.nan
