"""A recorded site that looks like a real one: a day of the British grid in ninety seconds, three image classifiers."""

import math
from dataclasses import replace
from pathlib import Path

from joulery.domain.decisions import Decision
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import (
    CarbonBasis,
    CarbonLabel,
    Charge,
    DecisionRecord,
    MeterNow,
    NowSnapshot,
    ServiceLabel,
    ServiceTick,
    SiteLabel,
    Tick,
)
from joulery.store.run.directory import create_run
from joulery.store.run.footprints import footprint_to_dict
from joulery.store.run.timeline import log_decision, log_tick, write_site, write_ticks

START_S = 1_790_000_000.0
VARIANTS = (("lite0", 0.751), ("lite1", 0.768), ("lite2", 0.776))
SITE = SiteLabel(
    name="quickstart",
    mode="act",
    carbon=CarbonLabel("GB", "half-hourly history of 14 March 2023", CarbonBasis.REPLAYED, speed=960.0),
    services=(ServiceLabel("photos", 0.08, 0.95, VARIANTS, 0.75),),
)


def _tick(i: int, n: int) -> Tick:
    phase = 2 * math.pi * (i / n)
    g_per_kwh = 190 - 95 * math.cos(phase) + 25 * math.sin(5 * phase)
    green = max(0.0, min(1.0, (240 - g_per_kwh) / 130))
    small, large = 0.75 * (1 - green), 0.8 * green
    mix = (("lite0", small), ("lite1", 1 - small - large), ("lite2", large))
    power_w = 46 + 22 * green + 1.5 * math.sin(i * 1.7)
    latency_s = 0.026 + 0.02 * green + 0.004 * math.sin(i * 2.3)
    if i in {int(n * 0.40), int(n * 0.41)}:
        latency_s = 0.094
    accuracy = sum(share * ratio for (_, share), (_, ratio) in zip(mix, VARIANTS, strict=True))
    service = ServiceTick("photos", 40, 0, latency_s, 1.0 if latency_s < 0.08 else 0.93, accuracy, mix)
    return Tick(
        START_S + i + 1,
        1.0,
        power_w=power_w,
        power_band_w=0.3 * power_w,
        quality=Quality.MODELLED,
        g_per_kwh=g_per_kwh,
        grid_s=START_S - 1e8 + 960 * i,
        services=(service,),
    )


def ticks(n: int = 90) -> tuple[Tick, ...]:
    """``n`` seconds of the demo; cumulative values and a baseline with its interval included."""
    done, energy_j, carbon_g, baseline_g = [], 0.0, 0.0, 0.0
    for i in range(n):
        tick = _tick(i, n)
        energy_j += tick.power_w
        carbon_g += tick.power_w * tick.g_per_kwh / 3.6e6
        baseline_g += 69.0 * tick.g_per_kwh / 3.6e6
        done.append(
            replace(
                tick,
                energy_j=energy_j,
                carbon_g=carbon_g,
                baseline_g=baseline_g,
                baseline_low_g=0.94 * baseline_g,
                baseline_high_g=1.06 * baseline_g,
            )
        )
    return tuple(done)


def decisions(n: int = 90) -> tuple[DecisionRecord, ...]:
    """Every seventh second a new mix."""
    records = []
    for i in range(3, n, 7):
        tick = _tick(i, n)
        mix = {name: round(share, 2) for name, share in tick.services[0].mix}
        reason = f"the intensity moved to {tick.g_per_kwh:.0f} g/kWh, more than 5 % of 250 g/kWh from the last plan"
        decision = Decision("set_mix", "photos", mix, "clover", reason, f"tick-{i}")
        records.append(DecisionRecord(tick.t_s, decision, "applied", "took 0.41 s, no request waited"))
    return tuple(records)


def footprint(n: int = 90) -> Footprint:
    """What the demo cost."""
    last = ticks(n)[-1]
    charged_j, idle_j, rest_j = 0.52 * last.energy_j, 0.44 * last.energy_j, 0.04 * last.energy_j
    charged_g, idle_g, rest_g = 0.5 * last.carbon_g, 0.45 * last.carbon_g, 0.05 * last.carbon_g
    return Footprint(
        parts=(
            Part("cpu:0", "package", 0.9 * charged_j, Quality.MODELLED, "cpu-model", 0.27 * charged_j, 0.9 * charged_g),
            Part("machine", "dram", 0.1 * charged_j, Quality.ASSUMED, "table", 0.0, 0.1 * charged_g),
        ),
        idle_j=idle_j,
        unattributed_j=rest_j,
        idle_g=idle_g,
        unattributed_g=rest_g,
        carbon_g=last.carbon_g,
        carbon_covered_j=last.energy_j,
        facility_j=last.energy_j,
        start_s=START_S,
        end_s=START_S + n,
        duration_s=float(n),
        covered_s=n - 0.2,
        idle_quality=Quality.MODELLED,
        signal=Signal.AVERAGE,
        scope=Scope.LIFECYCLE,
    )


def report(n: int = 90) -> dict:
    """``report.json`` of the demo."""
    half = replace(footprint(n), carbon_g=footprint(n).carbon_g)
    return {
        **footprint_to_dict(half),
        "requests": 40 * n,
        "failed": 0,
        "p95_s": 0.0451,
        "slo_s": 0.08,
        "accuracy_ratio": 0.7654,
        "accuracy_source": "published ImageNet top-1, weighted by answers",
        "saving_ratio": 0.213,
        "saving_low_ratio": 0.163,
        "saving_high_ratio": 0.258,
        "baseline": "the same requests on lite2",
        "variants": {"lite0": 0.31, "lite1": 0.33, "lite2": 0.36},
    }


def demo_run(folder: Path, *, state: str = "closed", n: int = 90, owner: str = "vision") -> Path:
    """The demo as a run directory: ``closed``, or ``killed`` half-way."""
    run = create_run(folder, kind="up", argv=["joulery", "up"], zone="GB", owner=owner)
    write_site(run, SITE)
    course = ticks(n)[: n // 2 if state == "killed" else n]
    for tick in course:
        log_tick(run, replace(tick, baseline_g=math.nan, baseline_low_g=math.nan, baseline_high_g=math.nan))
    for record in decisions(n):
        if record.t_s <= course[-1].t_s:
            log_decision(run, record)
    if state == "closed":
        write_ticks(run, course)
        run.write_report(report(n))
        run.close()
    return folder


def snapshot(n: int = 60, **changes) -> NowSnapshot:
    """The demo as the dashboard sees it after ``n`` of its 90 seconds."""
    course = tuple(
        replace(tick, baseline_g=math.nan, baseline_low_g=math.nan, baseline_high_g=math.nan) for tick in ticks(90)[:n]
    )
    now_s = course[-1].t_s if course else START_S
    seen = tuple(record for record in decisions(90) if record.t_s <= now_s)
    fields = {
        "ticks": course,
        "decisions": seen,
        "meters": (MeterNow("cpu:0", "package", "cpu-model", Quality.MODELLED, 50.0, 0.1),),
        "charges": (Charge("photos", "vision", footprint(max(n, 1))),),
        **changes,
    }
    return replace(NowSnapshot(SITE, START_S, now_s), **fields)
