"""What ``joulery up`` says before it serves: the machine, the services, their profiles, the plan."""

from __future__ import annotations

import asyncio
from itertools import islice

from joulery.app.doctor import Status, energy, machine_in_words
from joulery.app.serving.service import ServiceSetup
from joulery.app.wiring.governed_clocks import clock_fact
from joulery.config.site import Mode
from joulery.domain.format import duration, percent, si
from joulery.gateway.server import GatewayServer
from joulery.runtime.profiling.obtain import Obtained, age_words
from joulery.runtime.serving.driver import APPLIED
from joulery.runtime.serving.governing import GovernedClock
from joulery.runtime.serving.session import Session
from joulery.ui.reports.up_screen import Screen


async def tell_machine(screen: Screen) -> None:
    """What ``joulery doctor`` found of this machine and its meters."""
    machine = machine_in_words()
    virtual = " (virtual)" if machine["virtual"] == "yes" else ""
    screen.fact("machine", f"{machine['cpus']} CPUs, {machine['processor']}{virtual}; {machine['system']}")
    # The meters alone: that the sampler runs is about to be seen.
    for check in await asyncio.to_thread(lambda: list(islice(energy(), 3))):
        mark = {Status.OK: "✓", Status.PARTLY: "~", Status.DENIED: "!", Status.ABSENT: "–"}[check.status]
        grant = f"; to have it: {check.grant}" if check.grant else ""
        screen.fact("", f"{mark} {check.name}: {check.detail}{grant}")


def tell_service(screen: Screen, setup: ServiceSetup) -> None:
    """A service: its variants, its cores, its promise."""
    family = setup.family
    variants = ", ".join(f"{v.name} {percent(v.accuracy_ratio)}" for v in family.variants)
    screen.fact("service", f"{setup.name}: {variants} ({family.accuracy_metric}, {family.variants[0].accuracy_source})")
    cuts = " or ".join("+".join(str(piece.cores or piece) for piece in partition) for partition in setup.partitions)
    where = ", ".join(setup.gpus) or f"{len(setup.cores)} CPU cores"
    promised = f"p{100 * setup.slo.quantile:g} within {duration(setup.slo.latency_s)}"
    screen.fact("slices", f"{where} cut as {cuts}: {len(setup.candidates)} layouts; {promised}")


def tell_profile(screen: Screen, obtained: Obtained, setup: ServiceSetup) -> None:
    """Where a profile comes from and what it says of the smallest slice."""
    profile = obtained.profile
    smallest = min(entry.slice for entry in profile.entries)
    times = ", ".join(
        f"{entry.variant} {si(entry.alone.quantile_s(0.5), 's')}, {si(entry.energy_j, 'J')}"
        for entry in profile.entries
        if entry.slice == smallest
    )
    band = f" ± {percent(profile.band_ratio, 0)}" if profile.band_ratio else ""
    age = "" if obtained.source == "measured now" else f" ({age_words(profile)})"
    screen.fact("profile", f"{obtained.source}{age}; a request on {smallest}: {times}")
    unit = "GPU" if setup.gpus else "core"
    watts = f"{si(profile.entries[0].active_w, 'W')} a busy {unit} above {si(profile.idle_w, 'W')} idle"
    screen.fact("power", f"{watts}, {profile.quality} by {profile.meter}{band}")
    others = profile.machine.get("others_busy_cores")
    if isinstance(others, float) and others > 0.25:
        screen.warn(
            f"other processes kept {others:.1f} cores busy while this was profiled: --reprofile on a quiet machine"
        )


def tell_clock(screen: Screen, clock: GovernedClock, mode: Mode) -> None:
    """Whose clock is governed, by which rule, and what is only assumed."""
    screen.fact("clock", clock_fact(clock, mode))


def tell_serving(screen: Screen, session: Session, server: GatewayServer) -> None:
    """The grid, and of each service the demand and the first plan; where to look."""
    label = session.site_label.carbon
    if label is None:
        screen.fact("carbon", "no source of carbon intensity in the site file: joules alone, no grams")
    else:
        screen.fact("carbon", f"{label.zone}, {label.source}: {label.signal}, {label.scope}, {label.basis}")
    several = len(session.hosted) > 1
    if not all(one.chosen for one in session.hosted):
        for one in session.hosted:
            screen.fact("demand", f"{one.name}: {one.rate_rps:.0f} requests a second planned for")
        screen.fact("running", session.ran.decisions[-1].detail)
        screen.fact("dashboard", f"{server.url}/dashboard")
        return
    for one, first in zip(session.hosted, session.ran.decisions, strict=False):
        who = f"{one.name}: " if several else ""
        screen.fact("demand", f"{who}{one.rate_rps:.0f} requests a second to plan for")
        said = first.decision.reason if first.outcome == APPLIED else f"{first.decision.reason}; {first.detail}"
        screen.fact("plan", f"{who}{said}")
        if one.chosen is not None and one.chosen.remark:
            screen.warn(one.chosen.remark)
    screen.fact("dashboard", f"{server.url}/dashboard")
