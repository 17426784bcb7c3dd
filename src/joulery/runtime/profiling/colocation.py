"""Measure models on CPU slices of this machine: how long each takes alone, and next to a neighbour.

A group of CPU cores is measured as if it were one GPU. An instance has a share of it: a quota of the cores' time or
(``apart``) whole cores of its own. Its neighbour slows it through the resources that they still share: the caches, the
memory bus and, under quotas, the cores' time. The results are the measurements that
:func:`joulery.perf.interference.calibration.calibrate` fits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import InferRequest, ModelRef, ReplicaSpec, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import Tensor, TensorSpec
from joulery.perf.interference.calibration import PairLatency, SoloLatency
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile

_WARM = 2
"""Batches at the start that do not count."""
_WHOLE_PERCENT = 100.0
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ColocatedInstance:
    """One instance of a measurement."""

    model: str
    batch: int
    share_percent: float


@dataclass(frozen=True, slots=True)
class Design:
    """Design of a co-location measurement.

    Attributes:
        batches: Batch sizes.
        shares: Shares of an instance alone, percent; from the smallest that a plan may assign.
        pair_shares: Shares of two neighbours, percent; together 100 at most.
        runs: Batches timed of each instance.
        apart: Whether neighbours have whole cores of their own instead of quotas of the same cores.
    """

    batches: tuple[int, ...] = (1, 4, 8)
    shares: tuple[float, ...] = (10.0, 40.0, 100.0)
    pair_shares: tuple[tuple[float, float], ...] = ((50.0, 50.0), (30.0, 70.0), (70.0, 30.0))
    runs: int = 12
    apart: bool = False

    def __post_init__(self) -> None:
        shares = [*self.shares, *(share for pair in self.pair_shares for share in pair)]
        if not self.batches or min(self.batches) < 1 or self.runs < 1:
            raise ConfigError("batches and runs are 1 or more", got=f"{self.batches}, {self.runs}")
        if not all(0 < share <= _WHOLE_PERCENT for share in shares) or any(
            sum(pair) > _WHOLE_PERCENT for pair in self.pair_shares
        ):
            raise ConfigError("shares lie above 0, those of a pair come to 100 % at most", got=str(shares))

    @classmethod
    def on_cores(cls, cores: int, *, runs: int = 12) -> Design:
        """A design in which neighbours run on cores of their own: shares are whole cores.

        Raises:
            ConfigError: There are fewer than two cores.
        """
        if cores < 2:
            raise ConfigError("neighbours on cores of their own need two cores", got=str(cores))
        shares = tuple(sorted({_WHOLE_PERCENT / cores, _WHOLE_PERCENT * (cores // 2) / cores, _WHOLE_PERCENT}))
        half = _WHOLE_PERCENT * (cores // 2) / cores
        return cls(batches=(1, 2, 4, 8), shares=shares, pair_shares=((half, half),), runs=runs, apart=True)

    def alone(self, models: Sequence[str]) -> list[ColocatedInstance]:
        """All solo runs to measure."""
        return [
            ColocatedInstance(model, batch, share)
            for model in models
            for share in self.shares
            for batch in self.batches
        ]

    def pairs(self, models: Sequence[str]) -> list[tuple[ColocatedInstance, ColocatedInstance]]:
        """All co-locations to measure: each two models, copies of one included, with unlike and with equal batches."""
        found: dict[frozenset[tuple[ColocatedInstance, int]], tuple[ColocatedInstance, ColocatedInstance]] = {}
        for one, other in combinations_with_replacement(models, 2):
            for first, second in self.pair_shares:
                for a, b in self._batch_pairs(len(models)):
                    pair = ColocatedInstance(one, a, first), ColocatedInstance(other, b, second)
                    found.setdefault(frozenset(Counter(pair).items()), pair)  # the same two the other way round
        return list(found.values())

    def _batch_pairs(self, models: int) -> list[tuple[int, int]]:
        """Batches of two neighbours: a few pairs where both shares and models vary, else all pairs.

        The middle sizes can be left out of the fit and predicted, because they lie between the others.
        """
        ordered = sorted(set(self.batches))
        if models == 1 or len(self.pair_shares) == 1:
            return [(one, other) for one in ordered for other in ordered]
        middle = ordered[len(ordered) // 2]
        return list(dict.fromkeys(((ordered[0], ordered[-1]), (ordered[-1], ordered[0]), (middle, middle))))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measured median latencies of a batch."""

    solo: tuple[SoloLatency, ...]
    pairs: tuple[PairLatency, ...]


def cpu_as_gpu(cores: int, unit_percent: float = 10.0) -> InterferenceProfile:
    """A group of CPU cores as a GPU type without measurements: no transfers, no power cap, no models.

    The clock is nominal (1000): the measured times contain the effect of the cores' real clock.
    """
    coefficients = GpuCoefficients(f"cpu-{cores}", 1e6, 1000.0, 0.0, 1e12, -1e-3, 0.0, 0.0, unit_percent)
    notes = (f"{cores} CPU cores as one device; power, clock and transfers are not modelled",)
    return InterferenceProfile(coefficients, {}, source="CPU slices of this machine", notes=notes)


async def measure_together(
    engine: Engine,
    models: Mapping[str, ModelRef],
    cores: Sequence[int],
    make_inputs: Callable[[Sequence[TensorSpec]], dict[str, Tensor]],
    design: Design = Design(),
    *,
    progress: Progress = lambda done, of, what: None,
) -> Measurements:
    """Time every model alone and beside the others. The engine runs nothing else meanwhile.

    Args:
        engine: The embedded engine, on these cores.
        models: What each model loads, by name.
        cores: The cores that are one device.
        make_inputs: Generates one request that fits a model's declared inputs.
        design: What to measure.
        progress: Called with the runs done, the runs in all and the next one.

    Raises:
        JouleryError: A replica cannot be created, or a model does not answer its generated inputs.
    """
    alone, pairs = design.alone(list(models)), design.pairs(list(models))
    total = len(alone) + len(pairs)
    inputs: dict[str, dict[str, Tensor]] = {}
    solo: list[SoloLatency] = []
    for done, one in enumerate(alone):
        progress(done, total, f"{one.model} x{one.batch} on {one.share_percent:g} %")
        (latency_ms,) = await _timed(engine, [one], models, cores, design, inputs, make_inputs)
        solo.append(SoloLatency(one.model, one.batch, one.share_percent, latency_ms))
    found: list[PairLatency] = []
    for done, (one, other) in enumerate(pairs, len(alone)):
        progress(done, total, f"{one.model} x{one.batch} beside {other.model} x{other.batch}")
        first_ms, second_ms = await _timed(engine, [one, other], models, cores, design, inputs, make_inputs)
        found.append(
            PairLatency(
                *(one.model, one.batch, one.share_percent, first_ms),
                *(other.model, other.batch, other.share_percent, second_ms),
            )
        )
    progress(total, total, "")
    await engine.apply([])
    return Measurements(tuple(solo), tuple(found))


async def _timed(
    engine: Engine,
    instances: Sequence[ColocatedInstance],
    models: Mapping[str, ModelRef],
    cores: Sequence[int],
    design: Design,
    inputs: dict[str, dict[str, Tensor]],
    make_inputs: Callable[[Sequence[TensorSpec]], dict[str, Tensor]],
) -> list[float]:
    """Median latency of each instance's batches while all of them run, ms."""
    taken = 0
    specs = []
    for number, one in enumerate(instances):
        spec = _spec(f"n{number}", one, models[one.model], cores, design, taken)
        taken += len(spec.cores) if design.apart else 0
        specs.append(spec)
    await engine.apply(specs)
    for number, one in enumerate(instances):
        if one.model not in inputs:
            view = next(view for view in engine.replicas() if view.spec.service == f"n{number}")
            inputs[one.model] = make_inputs(view.inputs)
    left = dict.fromkeys(range(len(instances)), design.runs + _WARM)
    samples = await asyncio.gather(
        *(_keep_busy(engine, number, _rows(inputs[one.model], one.batch), left) for number, one in enumerate(instances))
    )
    return [1e3 * float(np.median(latency_s[_WARM : design.runs + _WARM])) for latency_s in samples]


def _spec(
    service: str, one: ColocatedInstance, model: ModelRef, cores: Sequence[int], design: Design, taken: int
) -> ReplicaSpec:
    """The replica of an instance: with a quota of all cores, or with whole ones."""
    if design.apart:
        mine = tuple(cores[taken : taken + max(1, round(len(cores) * one.share_percent / _WHOLE_PERCENT))])
        return ReplicaSpec(service, one.model, Slice(SliceKind.CPU, cores=len(mine)), model, cores=mine)
    share = min(1.0, one.share_percent / _WHOLE_PERCENT)
    piece = Slice(SliceKind.CPU, cores=len(cores), share_ratio=share)
    return ReplicaSpec(service, one.model, piece, model, cores=tuple(cores))


async def _keep_busy(engine: Engine, number: int, inputs: Mapping[str, Tensor], left: dict[int, int]) -> list[float]:
    """Latencies of batches sent one after the other until every instance has enough, so that neighbours stay busy."""
    latencies: list[float] = []
    while any(count > 0 for count in left.values()):
        try:
            answer = await engine.infer(f"n{number}", InferRequest(inputs))
        except RequestError as error:
            raise DataError(f"{error.variant} does not answer a batch generated for it: {error}") from error
        latencies.append(answer.end_s - answer.start_s)
        left[number] -= 1
    return latencies


def _rows(inputs: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
    """Repeat one request's inputs to fill a batch."""
    return {name: np.concatenate([array] * batch) for name, array in inputs.items()}
