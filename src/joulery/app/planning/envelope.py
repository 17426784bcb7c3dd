"""Joint plans of a site over ranges of price and load: made within a limit of CPU time, and looked up from a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.app.planning.envelope_files import read_envelope
from joulery.app.planning.joint import joint_request
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.optimum import PlanCertificate
from joulery.domain.gpu.plan_envelope import Envelope, PriceAxis, Regret
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.frontier import LOADS, EnvelopeEffort, make_envelope, planned_again
from joulery.policies.placement.joint.planner import quality_of_fleet
from joulery.policies.placement.joint.problem import JointRequest, JointService

LIMIT_S = 600.0
"""Default limit of the CPU time of an envelope, seconds."""
SURE_RATIO = 0.005
"""Largest known excess of a look-up over the best plan; above it, a new plan is made."""
_METHOD = "looked up in an envelope"


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """Result of a look-up.

    Attributes:
        plan: The plan at the requested load.
        name: Name of the plan in the envelope.
        load, price: The requested load and price.
        regret: Bounds on the plan's excess cost over the best possible plan.
        saved_ratio: Saving of a new plan for this load and price, relative to the cost of the kept plan; None where no
            new plan was made.
    """

    plan: ProvisionPlan
    name: str
    load: float
    price: float
    regret: Regret
    saved_ratio: float | None = None


def site_envelope(
    site: Site,
    g_per_kwh: float | None = None,
    loads: tuple[float, float] = LOADS,
    limit_s: float = LIMIT_S,
    effort: EnvelopeEffort | None = None,
    cpu_s: Callable[[], float] = time.process_time,
    progress: Callable[[int, float], None] = lambda loads, error_ratio: None,
) -> Envelope:
    """Make the envelope of a site.

    Args:
        site: The site.
        g_per_kwh: Carbon intensity; the site's when None. If neither is given, energy is priced instead of carbon.
        loads: The lowest and the highest load, as ratios of the services' rates.
        limit_s: CPU time after which no further load is planned for.
        effort: Effort of the search.
        cpu_s: Returns the CPU time of this process.
        progress: Called with the number of loads planned for, and the largest remaining error ratio.

    Raises:
        ConfigError: The site lacks a setting that the plan needs.
        InfeasibleError: Not even the lowest load can be served.
    """
    request, axis = _asked(site, g_per_kwh)
    begin = cpu_s()
    made = make_envelope(request, axis, loads, effort, lambda: cpu_s() - begin < limit_s, progress)
    return replace(made, site=_words(request), quality=quality_of_fleet(request.fleet))


def look_up(site: Site, file: Path, load: float, price: float, *, as_kept: bool = False) -> FoundPlan:
    """Look up the plan of an envelope file for a load and a price.

    If the kept plan may cost over 0.5 % more than the best, a new plan is made for this load and price, starting from
    those kept for neighbouring loads, and the better of the two is returned.

    Args:
        site: The site.
        file: The envelope.
        load, price: The load and the price to look up.
        as_kept: Whether to return the kept plan, however far it may be from the best.

    Raises:
        DataError: The file is not an envelope, or was made for another site.
        ConfigError: The load or the price is not a number of 0 or more.
        InfeasibleError: The load is above the highest load of the envelope.
    """
    envelope = read_envelope(file)
    request, _ = _asked(site, envelope.axis.g_per_kwh)
    _check_site(file, envelope.site, _words(request))
    kept = _kept(request, envelope, load, price)
    if as_kept or kept.regret.known_ratio <= SURE_RATIO:
        return kept
    again = planned_again(request, envelope, price, load)
    value, cost = _certificate(again).value, _certificate(kept.plan).value
    bound = max(_certificate(again).bound, _certificate(kept.plan).bound)
    if value >= cost:
        again = replace(kept.plan, certificate=replace(_certificate(kept.plan), bound=min(bound, cost)))
    saved_ratio = max(0.0, 1 - value / cost)
    best = min(value, cost)
    return replace(kept, plan=again, regret=Regret(0.0, _above(best, bound)), saved_ratio=saved_ratio)


def _above(cost: float, bound: float) -> float:
    return max(0.0, cost / bound - 1) if bound > 0 else math.inf


def _certificate(plan: ProvisionPlan) -> PlanCertificate:
    assert plan.certificate is not None  # joint plans have one
    return plan.certificate


def _kept(request: JointRequest, envelope: Envelope, load: float, price: float) -> FoundPlan:
    """The best plan of an envelope for a load and a price."""
    found, cost = envelope.lookup(price, load)
    regret = envelope.regret(price, load)
    certificate = PlanCertificate(
        objective=envelope.axis.objective(price),
        value=cost,
        bound=cost / (1 + regret.proven_ratio),
        method=f"{_METHOD}: {found.name}, for loads up to {found.load:.4g}; the bound is that of plans for loads and "
        "prices beside it",
        optimal=False,
        power_w=found.power_at_w(load),
        rates_rps={each.workload.id: load * each.workload.rate_rps for each in request.services},
        floors_ratio={each.workload.id: each.floor_ratio for each in request.services},
        available={each.gpu_type.name: each.gpu_type.available for each in request.fleet},
        power_cap_w=request.power_cap_w,
    )
    plan = ProvisionPlan("joint", found.at(load), quality=envelope.quality, certificate=certificate)
    return FoundPlan(plan, found.name, load, price, regret)


def point_of(text: str) -> tuple[float, float]:
    """Parse the load and the price of a flag: ``0.8`` or ``0.8,0.1``.

    Raises:
        ConfigError: They are not valid numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        load, price = float(parts[0]), float(parts[1]) if len(parts) > 1 else 0.0
    except ValueError:
        load = price = math.nan
    if len(parts) > 2 or not (0 < load < math.inf and 0 <= price < math.inf):
        raise ConfigError(
            "a look-up needs a load, and a price if there is one",
            pointer="--at",
            got=text,
            expected="LOAD or LOAD,PRICE, such as 0.8,0.1",
        )
    return load, price


def _asked(site: Site, g_per_kwh: float | None) -> tuple[JointRequest, PriceAxis]:
    """The request at load 1, and the price axis.

    Raises:
        ConfigError: Carbon has a weight and no intensity, or the site lacks a setting that the plan needs.
    """
    plan = site.plan
    intensity = plan.g_per_kwh if g_per_kwh is None else g_per_kwh
    weights = plan.weights
    what = "energy" if intensity is None else "carbon"
    if what == "energy" and weights is not None and weights.carbon > 0:
        raise ConfigError(
            "an envelope over the price of carbon needs a carbon intensity; none is assumed",
            pointer="plan.weights.carbon",
            expected="such as plan.intensity: 300 g/kWh",
            hint="add it to the site, give --intensity '300 g/kWh', or leave the weight out for prices of energy",
        )
    rent, energy = (1.0, 0.0) if weights is None else (weights.cost, weights.energy)
    axis = PriceAxis(what, rent, energy if what == "carbon" else 0.0, intensity, plan.pue)
    axis.objective(1.0)  # an intensity that cannot be meant is refused before any plan is made
    return joint_request(site, "energy", intensity), axis


def _words(request: JointRequest) -> str:
    """Identity of a site's envelope as text: services, types, rules."""
    services = {
        each.workload.id: [
            [[variant.model, None if math.isnan(variant.accuracy_ratio) else variant.accuracy_ratio]]
            for variant in each.variants
        ]
        + [each.workload.rate_rps, each.workload.slo.latency_s, each.workload.slo.quantile]
        + [each.workload.arrivals.scv, each.floor_ratio]
        + _limits(each)
        for each in request.services
    }
    limited = any(_limits(each) for each in request.services)
    types = {
        each.gpu_type.name: [each.gpu_type.usd_per_hour, each.gpu_type.available, each.host_w, list(each.clocks_mhz)]
        + ([each.gpu_type.memory_bytes] if limited else [])
        for each in request.fleet
    }
    known = request.rules
    rules: list[object] = [known.margin_ratio, known.max_batch, known.max_replicas, request.power_cap_w]
    # Rules that stand at their defaults are left out, as in files of versions that did not plan by them.
    rules += [
        f"{name} {value}"
        for name, value in (("domain", known.domain), ("balancer", known.balancer))
        if value not in ("none", "turns")
    ]
    return json.dumps({"services": services, "types": types, "rules": rules}, sort_keys=True)


def _limits(service: JointService) -> list[object]:
    """Memory, replicas and market of a service; empty where all are at their defaults."""
    workload = service.workload
    memory = [service.answered_by(at).memory_bytes for at in range(len(service.variants))]
    if workload.replicas_min == 1 and not workload.spot and all(each is None for each in memory):
        return []
    return [memory, workload.replicas_min, workload.spot]


def _check_site(file: Path, was: str, now: str) -> None:
    """Raise if the envelope was made for another site.

    Raises:
        DataError: The site has changed.
    """
    if was == now:
        return
    try:
        old, new = json.loads(was), json.loads(now)
        differing = [
            name
            for part in ("services", "types")
            for name in sorted(set(old[part]) | set(new[part]))
            if old[part].get(name) != new[part].get(name)
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        differing = []
    what = ", ".join(differing[:4]) or "the rules of the plan"
    raise DataError(
        f"the envelope was made for another site: {what} changed",
        file=str(file),
        hint="make it again: joulery plan SITE --preset joint --envelope --out FILE",
    )
