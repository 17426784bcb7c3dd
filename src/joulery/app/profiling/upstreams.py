"""Profiles of models on other servers: measured response times, and the watts of a request, metered or stated."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from joulery.accounting.load_line import cpu_channels, gpu_points, work_by_bin
from joulery.accounting.steps import power_steps
from joulery.domain.energy.channel import Channel
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import InferResponse, ModelKind, ModelRef
from joulery.domain.serving.profile import Profile, SliceProfile
from joulery.perf.power.power_line import fit_power_line
from joulery.runtime.profiling.slice_timings import MeasuredSlice, digest, machine
from joulery.store.run.readings import RunReadings

_BIN_S = 0.25
_STATED = "stated in the site file"


def upstream_profile(
    models: Mapping[str, ModelRef],
    measured: Sequence[MeasuredSlice],
    readings: RunReadings,
    warmup: int,
    answers: Sequence[InferResponse],
) -> Profile:
    """Make a profile of upstreams. A request is charged by the seconds for which it occupied a slot of its service.

    Args:
        models: Model of each variant, with its stated watts.
        measured: Times by variant.
        readings: Readings of this machine's meters during the measurement.
        warmup: Number of warm-up requests.
        answers: Every answer.

    Raises:
        DataError: No watts are stated, and no meter measures the servers.
    """
    stated = {name: power_w for name, model in models.items() if (power_w := stated_w(model)) is not None}
    if stated:
        watts, quality, meter, band_ratio = stated, Quality.ASSUMED, _STATED, 0.0
        idle_w = math.nan
    else:
        channels = seen_by(trace.channel for trace in readings.traces)
        idle_w, watts = metered_w(readings, channels, answers, list(models))
        quality = weakest(channel.quality for channel in channels)
        meter = "+".join(sorted({channel.meter for channel in channels}))
        band_ratio = max(channel.band_ratio for channel in channels)
    return Profile(
        machine(),
        tuple(
            SliceProfile(one.variant, one.slice, one.alone, one.loaded, watts[one.variant], one.startup_s)
            for one in measured
        ),
        idle_w,
        quality,
        meter,
        band_ratio,
        created_s=time.time(),
        warmup=warmup,
        models={name: digest(model) for name, model in models.items()},
    )


def mixed_profile(local: Profile, models: Mapping[str, ModelRef]) -> Profile:
    """Make the profile of a service with some variants on other servers, from one with the watts of a busy core.

    A model of this machine is charged its CPU seconds at the metered watts of a busy core; an upstream is charged the
    seconds of its slot at the stated watts.

    Args:
        local: The profile with the watts of a busy core for all.
        models: Each variant's model; upstreams state their watts.

    Raises:
        DataError: An upstream states no watts.
    """
    entries = []
    for entry in local.entries:
        model = models[entry.variant]
        if model.kind is not ModelKind.REMOTE:
            entries.append(replace(entry, quality=local.quality))
            continue
        power_w = stated_w(model)
        if power_w is None:
            raise DataError(
                f"the meters of this machine cannot tell the joules of {entry.variant}, which is on another server",
                hint="state what a request draws there: model: {kind: open_inference, url: ..., power: 60 W}",
            )
        entries.append(replace(entry, active_w=power_w, quality=Quality.ASSUMED))
    quality, meter = weakest((local.quality, Quality.ASSUMED)), f"{local.meter} here; of upstreams assumed, {_STATED}"
    return replace(local, entries=tuple(entries), quality=quality, meter=meter)


def stated_w(model: ModelRef) -> float | None:
    """Watts above idle of a model while it answers one request, as the site file states them; None if not stated."""
    found: float | None = json.loads(model.options or "{}").get("power_w")
    return found


def seen_by(channels: Iterable[Channel]) -> tuple[Channel, ...]:
    """The channels that measure the servers: this machine's CPUs and GPUs.

    Raises:
        DataError: There is no such channel.
    """
    every = tuple(channels)
    found = (*cpu_channels(every), *(channel for channel in every if channel.device.startswith("gpu:")))
    if not found:
        raise DataError(
            "no meter sees the servers, so no request can be charged for them",
            hint="state what a request draws there: model: {kind: open_inference, url: ..., power: 60 W}",
        )
    return found


def metered_w(
    readings: RunReadings, channels: Sequence[Channel], answers: Sequence[InferResponse], variants: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """Measure idle power, and for each variant the power of one busy slot above it, watts.

    Args:
        readings: Power over the time of the measurement.
        channels: The channels that measure the servers.
        answers: Every answer, with its times.
        variants: Names of the variants.

    Raises:
        DataError: The power does not rise while a variant answers, so its server is on another machine.
    """
    traces = [trace for trace in readings.traces if trace.channel in channels]
    start_ns = max(int(trace.t_ns[0]) for trace in traces)
    end_ns = min(int(trace.t_ns[-1]) for trace in traces)
    bins_ns = np.arange(start_ns, end_ns, round(_BIN_S * 1e9))
    steps = [power_steps(trace) for trace in traces]
    idle_w, watts = math.nan, {}
    for variant in variants:
        mine = _work([one for one in answers if one.variant == variant])
        busy, power_w = gpu_points(steps, mine, bins_ns)
        alone = work_by_bin(_work([one for one in answers if one.variant != variant]), bins_ns) == 0.0
        try:
            line = fit_power_line(busy[alone], power_w[alone])
        except DataError as error:
            raise DataError(
                f"the meters of this machine do not see the server of {variant} work: {error.message}",
                hint="state what a request draws there: model: {kind: open_inference, url: ..., power: 60 W}",
            ) from error
        idle_w, watts[variant] = line.idle_w, line.active_w
    return idle_w, watts


def _work(answers: Sequence[InferResponse]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Start, end and busy seconds of each answer, float64[n, 3]."""
    return np.array([(one.start_s, one.start_s + one.cpu_s, one.cpu_s) for one in answers]).reshape(-1, 3)
