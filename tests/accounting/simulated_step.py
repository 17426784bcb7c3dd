"""A training step of 28 operations with known powers, and the counter that watched it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.accounting.steps import PowerSteps, power_steps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace

OPS = 28
DEVICE = "GPU:0"


@dataclass(frozen=True)
class Simulated:
    trace: EventTrace
    meter: PowerSteps
    power: PowerTrace
    window_ns: tuple[int, int]
    truth_j: dict[str, float]
    instant: PowerSteps
    mean: PowerSteps


def simulate(
    seed: int, update_s: float, seconds: float = 14.0, noise: float = 0.01, kernels_w: Sequence[float] = ()
) -> Simulated:
    """Operations of 0.2 to 2.5 ms at 80 to 130 W, 40 W between steps, a counter renewed every ``update_s``.

    With ``kernels_w`` each operation has the power of one of these kernels, drawn without replacement.
    """
    rng = np.random.default_rng(seed)
    mean_s = np.clip(rng.lognormal(np.log(1.0e-3), 0.6, OPS), 0.2e-3, 2.5e-3)
    watts, idle_w = rng.uniform(80, 130, OPS), 40.0
    if len(kernels_w):
        watts = rng.choice(np.array(kernels_w), OPS, replace=False)
    steps = int(seconds / (mean_s.sum() + 1.25e-3)) + 1
    length = np.maximum(mean_s * rng.normal(1, 0.05, (steps, OPS)), 1e-5)
    gap = rng.uniform(0.5e-3, 2e-3, (steps, 1))
    length_ns = np.rint(np.concatenate([length, gap], axis=1) * 1e9).astype(np.int64)
    start_ns = (np.cumsum(length_ns) - length_ns.ravel()).reshape(length_ns.shape)
    end = int(start_ns[-1, -1])
    trace = EventTrace(
        [f"net/op{i:02d}" for i in range(OPS)],
        [DEVICE],
        ["forward"],
        op=np.tile(np.arange(OPS), steps),
        start_ns=start_ns[:, :-1].ravel(),
        dur_ns=length_ns[:, :-1].ravel(),
        device=np.zeros(steps * OPS),
        lane=np.zeros(steps * OPS),
        phase=np.zeros(steps * OPS),
    )
    drawn_w = np.tile(np.append(watts, idle_w), steps)
    spent_j = np.concatenate([[0.0], np.cumsum(drawn_w * length_ns.ravel() / 1e9)])
    stamps = np.arange(0, end, round(update_s * 1e9))
    true_j = np.diff(np.interp(stamps, np.append(start_ns.ravel(), end + length_ns[-1, -1]), spent_j))
    counter = np.concatenate([[0.0], np.cumsum(true_j * rng.normal(1, noise, len(true_j)))])
    channel = Channel(DEVICE, "board", ReadingKind.COUNTER, "fake", Quality.MEASURED)
    power = PowerTrace(channel, stamps, counter, update_s)
    at = np.searchsorted(np.cumsum(length_ns.ravel()), stamps, "right")
    instant_w = drawn_w[np.minimum(at, len(drawn_w) - 1)] * rng.normal(1, noise, len(stamps))
    instants = Channel(DEVICE, "board", ReadingKind.POWER, "fake", Quality.MEASURED)
    averages = Channel(DEVICE, "board", ReadingKind.AVERAGE, "fake", Quality.MEASURED, averaging_s=update_s)
    mean_w = true_j / update_s * rng.normal(1, noise, len(true_j))
    seen = trace.dur_ns / 1e9 * watts[trace.op]
    truth = np.bincount(trace.op, seen, OPS)
    return Simulated(
        trace,
        power_steps(power),
        power,
        (int(stamps[0]), int(stamps[-1])),
        {f"net/op{i:02d}": float(truth[i]) for i in range(OPS)},
        power_steps(PowerTrace(instants, stamps, instant_w, update_s)),
        power_steps(PowerTrace(averages, stamps[1:], mean_w, update_s)),
    )
