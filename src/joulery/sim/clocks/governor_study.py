"""Clock governors side by side on emulated V100s (μ-Serve, ATC'24, section 4.2): power against SLO attainment.

Fifteen models on a few devices, each model on one, first come first served. Generative requests take
``0.3 + 0.7 · length / mean length`` passes; a governor that looks ahead gets an upper quantile of the length of the
predicted class, not the length. Every scheme of a seed faces the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.ports import Policy
from joulery.perf.catalog.muserve_models import CLOCKS_MHZ, MODELS
from joulery.perf.lengths.classes import fit_classes
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.clock_scaling import above_idle_ratio, slowdown_ratio
from joulery.policies.clocks.governor import (
    BusyIdleClocks,
    DeviceView,
    FixedClock,
    GovernorState,
    MiadGovernor,
    PredictiveGovernor,
)
from joulery.policies.clocks.lowest_clock import ClockRange
from joulery.sim.clocks.devices import (
    ClockedPlant,
    ClockedRun,
    ModelRequests,
    balanced_devices,
    best_static_clocks,
    run_clocked_devices,
)
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.streams import Streams
from joulery.sim.queues.ordering_study import Lengths, synthetic_lengths

_UPPER_QUANTILE = 0.9
SCHEMES: Mapping[str, str] = {
    "fixed": "every device at its highest clock",
    "static-1000": "every device at 1000 MHz, the voltage knee",
    "best-static": "each device at the best clock that keeps 99 %, found in hindsight",
    "race-to-idle": "the highest clock while busy, 200 MHz while idle",
    "power-cap": "a power cap at the voltage knee: 1000 MHz while busy, the highest clock while idle",
    "busy-idle": "1000 MHz while busy, 200 MHz while idle",
    "miad": "μ-Serve's MIAD, once a second, corrected",
    "miad-literal": "μ-Serve's MIAD as printed",
    "predictive": "least energy within the SLO, predicted from each model's measured curves",
    "predictive-assumed": "the same governor with assumed curves, as a live device without a profile has them",
}
"""Schemes by name."""
_BUSY_IDLE_MHZ: Mapping[str, tuple[float, float]] = {
    "race-to-idle": (math.inf, 200.0),
    "power-cap": (1000.0, math.inf),
    "busy-idle": (1000.0, 200.0),
}
"""Clock while busy and while idle, MHz; the highest where infinite."""


@dataclass(frozen=True, slots=True)
class ClockCase:
    """One load.

    Attributes:
        rate_rps: Requests a second, all models together.
        slo_scale: SLO of each model over its latency at the highest clock.
        duration_s: Length of the workload.
        devices: Emulated V100s.
        hosts: Device of each model by name; balanced by latency when empty.
    """

    rate_rps: float
    slo_scale: float
    duration_s: float = 1800.0
    devices: int = 8
    hosts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ClockOutcome:
    """Result of a scheme.

    Attributes:
        power_w: Mean board power of a device.
        attainment_ratio: Share of requests within their SLO.
        p99_normalised: 99th percentile of latency over SLO.
        changes: Clock changes in all.
    """

    power_w: float
    attainment_ratio: float
    p99_normalised: float
    changes: int


def plant(case: ClockCase) -> ClockedPlant:
    """The devices of a case.

    Raises:
        DataError: A model has no host, or a host is not one of the devices.
    """
    clocks = np.array(CLOCKS_MHZ, np.float64)
    latency_s = np.array([model.latency_s for model in MODELS])
    return ClockedPlant(
        clocks_mhz=clocks,
        busy_w=V100.busy_power_w(clocks),
        idle_w=V100.idle_power_w(clocks),
        latency_s=latency_s,
        slo_s=case.slo_scale * latency_s[:, -1],
        elasticity=np.array([model.sensitivity / 2 for model in MODELS]),
        device_of=_device_of(case) if case.hosts else balanced_devices(latency_s[:, -1], case.devices),
        least_devices=case.devices,
    )


def _device_of(case: ClockCase) -> IntArray:
    hosts = dict(case.hosts)
    missing = [model.name for model in MODELS if model.name not in hosts]
    if missing or max(hosts.values()) >= case.devices:
        raise DataError(
            f"the placement hosts {len(hosts)} models on {max(hosts.values()) + 1} devices, expected all "
            f"{len(MODELS)} on {case.devices}",
            hint=f"plan for all of {', '.join(model.name for model in MODELS)}",
        )
    return np.array([hosts[model.name] for model in MODELS])


def workload(case: ClockCase, streams: Streams, arrivals_s: FloatArray | None = None) -> ModelRequests:
    """Requests of a case: Poisson, or a log's arrivals scaled to the case's rate.

    Args:
        case: The load.
        streams: Random streams of the seed.
        arrivals_s: Recorded arrival times, s; their pattern is kept, their rate is scaled.

    Raises:
        DataError: The log has fewer than two arrivals or is not in order of time.
    """
    if arrivals_s is None:
        times_s = poisson(case.rate_rps).times_s(case.duration_s, streams("arrivals"))
    else:
        times_s = _scaled(arrivals_s, case)
    model = streams("models").integers(0, len(MODELS), len(times_s))
    lengths = synthetic_lengths(streams)
    chosen = streams("lengths of requests").integers(len(lengths.tokens) // 2, len(lengths.tokens), len(times_s))
    generative = np.array([one.autoregressive for one in MODELS])[model]
    mean = float(lengths.tokens.mean())
    work = np.where(generative, 0.3 + 0.7 * lengths.tokens[chosen] / mean, 1.0)
    upper = _upper(lengths)[chosen]
    return ModelRequests(times_s, model, work, np.where(generative, 0.3 + 0.7 * upper / mean, 1.0))


def _upper(lengths: Lengths) -> FloatArray:
    """An upper quantile of the length of each request's predicted class, from the first half of the log."""
    half = len(lengths.tokens) // 2
    fit = fit_classes(lengths.predicted[:half], lengths.tokens[:half], upper_quantile=_UPPER_QUANTILE)
    return fit.upper(lengths.predicted)


def _scaled(arrivals_s: FloatArray, case: ClockCase) -> FloatArray:
    times = np.asarray(arrivals_s, np.float64)
    if len(times) < 2 or bool(np.any(np.diff(times) < 0)) or not times[-1] > times[0]:
        raise DataError("recorded arrivals must be at least two, in order of time", hint="sort the log by t_s")
    rate_rps = (len(times) - 1) / (times[-1] - times[0])
    scaled = (times - times[0]) * rate_rps / case.rate_rps
    return np.asarray(scaled[scaled < case.duration_s], np.float64)


def run_schemes(
    names: Sequence[str], case: ClockCase, requests: ModelRequests, progress: Callable[[], None] = lambda: None
) -> dict[str, ClockOutcome]:
    """Serve the same requests under each scheme.

    Raises:
        ConfigError: No such scheme.
    """
    made = plant(case)
    found: dict[str, ClockOutcome] = {}
    for name in names:
        if name not in SCHEMES:
            raise ConfigError("no such clock scheme", got=name, expected=", ".join(SCHEMES))
        found[name] = _outcome(_run(name, made, case, requests), made, requests)
        progress()
    return found


def _run(name: str, made: ClockedPlant, case: ClockCase, requests: ModelRequests) -> ClockedRun:
    top = float(made.clocks_mhz[-1])
    if name == "best-static":
        static = {k: _fixed(made, case, requests, [float(c)] * made.devices) for k, c in enumerate(made.clocks_mhz)}
        best = best_static_clocks(made, static, requests, 0.99)
        return _fixed(made, case, requests, [float(made.clocks_mhz[k]) for k in best])
    if name in {"fixed", "static-1000"}:
        return _fixed(made, case, requests, [top if name == "fixed" else 1000.0] * made.devices)
    if name in _BUSY_IDLE_MHZ:
        busy_mhz, idle_mhz = (min(clock, top) for clock in _BUSY_IDLE_MHZ[name])
        return _governed(made, case, requests, BusyIdleClocks(busy_mhz, idle_mhz))
    if name in {"predictive", "predictive-assumed"}:
        believed = made if name == "predictive" else _with_assumed_curves(made)
        governor = PredictiveGovernor(made.clocks_mhz, knee_mhz=V100.knee_mhz, assumed=name == "predictive-assumed")
        return _governed(believed, case, requests, governor)
    limits = ClockRange(min_mhz=float(made.clocks_mhz[0]), max_mhz=top)
    miad = MiadGovernor(limits, tuple(made.clocks_mhz.tolist()), literal=name == "miad-literal")
    return run_clocked_devices(made, requests, lambda _: miad, duration_s=case.duration_s, period_s=1.0)


def _governed(
    made: ClockedPlant, case: ClockCase, requests: ModelRequests, governor: Policy[GovernorState, DeviceView]
) -> ClockedRun:
    """A run with a governor that every arrival and completion steps."""
    return run_clocked_devices(made, requests, lambda _: governor, duration_s=case.duration_s)


def _with_assumed_curves(made: ClockedPlant) -> ClockedPlant:
    """The plant as a governor without profiles sees it: work slows down with the clock, energy as on a known chip."""
    slowdown, above_idle = slowdown_ratio(made.clocks_mhz), above_idle_ratio(made.clocks_mhz)
    latency_s = made.latency_s[:, -1:] * slowdown
    return replace(made, believed_latency_s=latency_s, believed_energy_j=latency_s * above_idle)


def _fixed(made: ClockedPlant, case: ClockCase, requests: ModelRequests, clocks_mhz: Sequence[float]) -> ClockedRun:
    return run_clocked_devices(
        made, requests, lambda device: FixedClock(clocks_mhz[device]), duration_s=case.duration_s
    )


def _outcome(run: ClockedRun, made: ClockedPlant, requests: ModelRequests) -> ClockOutcome:
    slo_s = made.slo_s[requests.model]
    return ClockOutcome(
        power_w=run.power_w,
        attainment_ratio=run.attainment_ratio(slo_s),
        p99_normalised=float(np.quantile(run.latency_s / slo_s, 0.99)) if len(slo_s) else 0.0,
        changes=sum(decision.kind == "set_clock" for _, decision in run.decisions),
    )
