"""Facts that ``joulery up`` found before it serves, as names and texts: machine, services, profiles, plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from joulery.app.doctor import Check, Status
from joulery.app.profiling.service_profile import Obtained, age_text, busy_cores
from joulery.app.serving.view import APPLIED, PlanInForce, ServiceSetup, ServingSession
from joulery.domain.format import duration, percent, si
from joulery.domain.gpu.provisioning import PlannedInstance
from joulery.domain.quality import Quality

Fact = tuple[str, str]
_MARKS = {Status.OK: "✓", Status.PARTLY: "~", Status.DENIED: "!", Status.ABSENT: "–"}


def machine_facts(machine: Mapping[str, str], checks: Sequence[Check]) -> Iterator[Fact]:
    """This machine and its meters, as ``joulery doctor`` found them."""
    virtual = " (virtual)" if machine["virtual"] == "yes" else ""
    yield "machine", f"{machine['cpus']} CPUs, {machine['processor']}{virtual}; {machine['system']}"
    for check in checks:
        grant = f"; to grant it: {check.grant}" if check.grant else ""
        yield "", f"{_MARKS[check.status]} {check.name}: {check.detail}{grant}"


def service_facts(setup: ServiceSetup) -> Iterator[Fact]:
    """A service: its variants, its cores or GPUs, its SLO."""
    family = setup.family
    variants = ", ".join(f"{v.name} {percent(v.accuracy_ratio)}" for v in family.variants)
    yield "service", f"{setup.name}: {variants} ({family.accuracy_metric}, {family.variants[0].accuracy_source})"
    partitions = " or ".join("+".join(str(piece.cores or piece) for piece in one) for one in setup.partitions)
    where = ", ".join(setup.gpus) or (f"{len(setup.cores)} CPU cores" if setup.cores else "its upstreams")
    if setup.replica_cores:
        where = f"its upstreams and {len(setup.cores)} CPU cores here"
    slo = f"SLO p{100 * setup.slo.quantile:g} within {duration(setup.slo.latency_s)}"
    yield "slices", f"{where} partitioned as {partitions}: {len(setup.candidates)} layouts; {slo}"


def profile_facts(obtained: Obtained, setup: ServiceSetup) -> Iterator[Fact]:
    """The source of a profile and its figures on the smallest slice."""
    profile = obtained.profile
    smallest = min(entry.slice for entry in profile.entries)
    times = ", ".join(
        f"{entry.variant} {si(entry.alone.quantile_s(0.5), 's')}, {si(entry.energy_j, 'J')}"
        for entry in profile.entries
        if entry.slice == smallest
    )
    band = f" ± {percent(profile.band_ratio, 0)}" if profile.band_ratio else ""
    age = "" if obtained.source.startswith("measured now") else f" ({age_text(profile)})"
    yield "profile", f"{obtained.source}{age}; a request on {smallest}: {times}"
    unit = "GPU" if setup.gpus else "core"
    # The watts of an upstream are those of its slot.
    here = next(
        (entry for entry in profile.entries if entry.quality not in (None, Quality.ASSUMED)), profile.entries[0]
    )
    watts = f"{si(here.active_w, 'W')} a busy {unit} above {si(profile.idle_w, 'W')} idle"
    yield "power", f"{watts}, {here.quality or profile.quality} by {profile.meter}{band}"


def profile_warning(obtained: Obtained) -> str:
    """A warning about a profile that was taken on a busy machine; empty for none."""
    others = busy_cores(obtained.profile)
    if not others:
        return ""
    return f"other processes kept {others:.1f} cores busy while this was profiled: --reprofile on a quiet machine"


def plan_facts(plan: PlanInForce) -> Iterator[Fact]:
    """Each GPU of a plan with what it runs on, and the standbys."""
    for gpu, cores in zip(plan.gpus, plan.cores, strict=True):
        instances = ", ".join(_instance(each) for each in gpu.instances)
        where = f"on {plan.shared[cores[0]]}" if plan.shared else f"on CPU core {', '.join(map(str, cores))}"
        yield "plan", f"{gpu.type} {where}: {instances}"
    standbys = [one.watched for one in plan.replicas if one.standby is not None]
    text = ", ".join(f"{one.key} {one.standby_percent:g} %" for one in standbys)
    yield "standbys", text or "none: the plan leaves no room for them"
    for name, shares in plan.variant_shares.items():
        if len(shares) > 1:
            yield "requests", f"of {name}: " + ", ".join(f"{one} {100 * part:.3g} %" for one, part in shares.items())


def _instance(each: PlannedInstance) -> str:
    """An instance of a plan: its share of a GPU, or its slice and processes."""
    if not each.slice:
        return f"{each.workload} {100 * each.share_ratio:g} % batch {each.batch}"
    several = f" in each of {each.processes} processes" if each.processes > 1 else ""
    return f"{each.slice} {each.workload} {each.model} batch {each.batch}{several}"


def serving_facts(session: ServingSession, url: str, grpc: str = "") -> Iterator[Fact]:
    """The grid, the demand and the first plan of each service, and the dashboard."""
    label, feed = session.site_label.carbon, session.grid.feed(session.started_s)
    if label is None and session.grid.source is not None:
        yield "carbon", f"unknown, so joules alone until the source answers; {feed.trouble or 'no answer yet'}"
    elif label is None:
        yield "carbon", "no source of carbon intensity in the site file: joules alone, no grams"
    else:
        held = f"; the newest value ended {duration(feed.age_s)} ago and is held" if feed.age_s > 0 else ""
        yield "carbon", f"{label.zone}, {label.source}: {label.signal}, {label.scope}, {label.basis}{held}"
    services, decisions = session.services.values(), session.history.decisions
    if all(one.chosen for one in services):
        for one, first in zip(services, decisions, strict=False):
            owner = f"{one.name}: " if len(services) > 1 else ""
            yield "demand", f"{owner}{one.rate_rps:.0f} requests a second to plan for"
            reason = first.decision.reason
            yield "plan", f"{owner}{reason}" + ("" if first.outcome == APPLIED else f"; {first.detail}")
    else:
        for one in services:
            yield "demand", f"{one.name}: {one.rate_rps:.0f} requests a second planned for"
        yield "running", decisions[-1].detail
    if session.models is not None:
        yield "serving", f"at {url}/v1"
    if grpc:
        yield "grpc", f"at {grpc}"
    yield "dashboard", f"{url}/dashboard"
