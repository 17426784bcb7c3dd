"""A serving process on a hardware slice, from a table of measured batches: its time, its capacity, its power.

A slice shares neither SMs nor cache with its neighbours, so only the clock of the board couples them. The table
contains the time of a batch on a slice, with one or more processes of one model there (MPS). Between measured batches
the time is the mean of two linear estimates: the chord, and the extension of the neighbouring segments. The launch of
kernels bounds small batches from below, kernels bound large ones, so the true time lies between the two.

Kernels take the same time for a request in any batch: that of the largest, by a fit of all batches. Small batches also
wait for the launch of kernels, which does not depend on the clock::

    time at φ = max(measured, requests · kernel seconds / φ)

Power is *assumed*, because no table of slices contains it: a slice whose kernels execute all the time draws its compute
slices' share of the power above idle of the wholly busy board, following the clock as in
:mod:`joulery.perf.power.clock_curves`; apart from that a slice draws nothing. So a request costs the same joules in any
batch, which is too low for small ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.mig import MigMenu, MigProfile
from joulery.domain.serving.service import Slo
from joulery.perf.power.clock_curves import V100, ClockModel
from joulery.perf.queues.batch_queue import late_ratio

_LADDER, _LIKELY, _FINE = (0.3, 0.45, 0.65, 0.8, 0.9, 0.96, 0.985), 0.9, 0.008
"""Loads between which a capacity is searched, the start of the search, and its resolution, as ratios of the rate of
full batches. Below the lowest load the batch is too large for the SLO."""
IMPLAUSIBLE_RATIO = 0.8
"""A largest batch is named if it took less than this ratio of the line through the two before it. In ParvaGPU's table
of an A100 the line is 3.5 % off (robust standard deviation); nine of 265 are at 0.54 to 0.78 and none up to 0.86."""
_LINE_BATCHES = 4
"""Least number of batches of a curve for that check: the first ones are bound by launches."""
_BUNDLES = 12
"""Number of bundles by which a capacity search counts larger batches: faster, and up to 1 % on the safe side."""


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """Measured times of one model's batches on one kind of slice.

    Attributes:
        processes: Number of processes of the model that share the slice.
        batches: Measured batch sizes, increasing.
        times_s: Seconds of a batch of each size, while all processes execute one.

    Raises:
        DataError: No batches, a size twice, or a time that is not a number above 0.
    """

    processes: int
    batches: tuple[int, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.batches or len(self.batches) != len(self.times_s):
            raise DataError("measured batches need a time each, and there must be one at least")
        if any(a >= b for a, b in zip(self.batches, self.batches[1:], strict=False)) or self.batches[0] < 1:
            raise DataError("measured batches are whole numbers from 1, each once", hint=f"got {self.batches}")
        if not all(0 < each < math.inf for each in self.times_s):
            raise DataError("the time of a batch is a number of seconds above 0")

    def time_s(self, batch: float) -> float:
        """Seconds of a batch at full clock: measured, or predicted between and beyond the measurements."""
        known, times = self.batches, self.times_s
        at = bisect_left(known, batch)
        if at < len(known) and known[at] == batch:
            return times[at]
        if at == 0:
            return min(times[0], max(self._line(0, batch), times[0] * batch / known[0]))
        before = self._line(at - 2, batch) if at >= 2 else times[0]
        if at == len(known):
            return max(before, times[-1]) if at >= 2 else times[-1] * batch / known[-1]
        chord = self._line(at - 1, batch)
        after = self._line(at, batch) if at + 1 < len(known) else times[0]
        return (chord + min(chord, max(before, after, min(times[0], chord)))) / 2

    @property
    def kernel_s(self) -> float:
        """Seconds of the slice's kernels for one request at full clock: those of the largest batch, by a fit of all.

        With single measurements, a planner that minimises joules would pick the luckiest one. In ParvaGPU's table the
        time a request of a left-out batch is 1.5 % off the fit of the others, and 2.9 % off the largest one.
        """
        return _fitted(self).times_s[-1] / self.batches[-1] / self.processes

    def implausible(self) -> tuple[int, ...]:
        """The last batches, largest first, that took less than ``IMPLAUSIBLE_RATIO`` of the line through those before.

        Once kernels bound a batch, its time grows with it. A planner searches for the fastest choice, so it picks a
        measurement that is too good; the plan uses it as measured, and names it.
        """
        found: list[int] = []
        curve = self
        while len(curve.batches) >= _LINE_BATCHES:
            if curve.times_s[-1] >= IMPLAUSIBLE_RATIO * curve._line(-3, curve.batches[-1]):
                break
            found.append(curve.batches[-1])
            curve = curve.without(curve.batches[-1])
        return tuple(found)

    def without(self, batch: int) -> BatchCurve:
        """The same curve without one measured batch, so that the rest can predict that batch."""
        kept = [(b, t) for b, t in zip(self.batches, self.times_s, strict=True) if b != batch]
        return BatchCurve(self.processes, tuple(b for b, _ in kept), tuple(t for _, t in kept))

    def fitted(self) -> BatchCurve:
        """Fit the times by ``max(launch, fixed + item · batch)``, three numbers, by least squares.

        The fitted curve is close to the measured one, and not the same.
        """
        if len(self.batches) < 3:
            return self
        best: tuple[float, tuple[float, ...]] | None = None
        for launched in range(len(self.batches) - 1):
            times = self._three_numbers(launched)
            error = math.fsum((a / b - 1) ** 2 for a, b in zip(times, self.times_s, strict=True))
            if best is None or error < best[0]:
                best = error, times
        assert best is not None
        return BatchCurve(self.processes, self.batches, best[1])

    def _three_numbers(self, launched: int) -> tuple[float, ...]:
        """Times of that form, if launches limit the first ``launched`` batches."""
        launch_s = math.fsum(self.times_s[:launched]) / launched if launched else 0.0
        some = list(zip(self.batches, self.times_s, strict=True))[launched:]
        # Least squares of relative errors: both columns and the right-hand side are divided by the measured time.
        aa = math.fsum(1 / t**2 for _, t in some)
        ab = math.fsum(b / t**2 for b, t in some)
        bb = math.fsum(b * b / t**2 for b, t in some)
        a, b = math.fsum(1 / t for _, t in some), math.fsum(n / t for n, t in some)
        det = aa * bb - ab * ab
        fixed_s = (a * bb - b * ab) / det if det > 0 else 0.0
        if fixed_s <= 0:
            fixed_s, item_s = 0.0, b / bb
        else:
            item_s = (b * aa - a * ab) / det
        return tuple(max(launch_s, fixed_s + item_s * n, 1e-9) for n in self.batches)

    def _line(self, first: int, batch: float) -> float:
        """The line through two neighbouring measurements, at a batch."""
        if first + 1 >= len(self.batches):
            return self.times_s[first]
        (x, y), (s, t) = self.batches[first:][:2], self.times_s[first:][:2]
        return s + (t - s) * (batch - x) / (y - x)


@lru_cache(maxsize=4096)
def _fitted(curve: BatchCurve) -> BatchCurve:
    """The fit of a curve; cached, because every batch needs it."""
    return curve.fitted()


@dataclass(frozen=True, slots=True)
class SliceTable:
    """Measurements of models on the slices of a GPU type.

    Attributes:
        source: Origin of the table, as text.
        curves: By model and size of the slice (``3g``): a curve for each number of processes.
    """

    source: str
    curves: Mapping[tuple[str, str], tuple[BatchCurve, ...]]

    @property
    def implausible(self) -> tuple[str, ...]:
        """Measured batches that are implausibly fast (:meth:`BatchCurve.implausible`), as text."""
        return tuple(
            f"{model} on {size}{f', {curve.processes} processes' if curve.processes > 1 else ''}, batch {batch}"
            for (model, size), some in sorted(self.curves.items())
            for curve in some
            for batch in curve.implausible()
        )

    @property
    def models(self) -> tuple[str, ...]:
        """The models that were measured."""
        return tuple(sorted({model for model, _ in self.curves}))

    def of(self, model: str, size: str) -> tuple[BatchCurve, ...]:
        """The curves of a model on a size of slice; none where it was not measured there."""
        return self.curves.get((model, size), ())


@dataclass(frozen=True, slots=True)
class SlicedGpu:
    """A GPU type whose slices were measured.

    Attributes:
        table: Measured batches at full clock.
        menu: MIG profiles and partitions of the type.
        idle_w: Power of the idle board at full clock, as stated.
        busy_w: Power of the board while kernels execute on all of it at full clock, as stated.
        curve: Model whose voltage and idle power are stretched over the type's clocks.

    Raises:
        ConfigError: Busy power is not finite and above idle power, or idle power is below 0.
    """

    table: SliceTable
    menu: MigMenu
    idle_w: float
    busy_w: float
    curve: ClockModel = V100

    def __post_init__(self) -> None:
        if not 0 <= self.idle_w < self.busy_w < math.inf:
            raise ConfigError(
                f"a {self.menu.gpu} draws more when busy than idle, and neither is below 0",
                got=f"idle {self.idle_w:g} W, busy {self.busy_w:g} W",
                expected="such as idle: 60 W and busy: 400 W",
            )

    def slice_w(self, profile: MigProfile, speed: float) -> float:
        """Power that a slice adds while its kernels execute all the time, at a ratio of the highest clock, W."""
        dynamic = 1.0 if speed >= 1 else float(self.curve.dynamic_ratio(speed * self.curve.max_mhz)[0])
        return (self.busy_w - self.idle_w) * dynamic * profile.compute_slices / self.menu.compute_slices


class SliceProcess(NamedTuple):
    """Processes of one model on one slice at a clock.

    Attributes:
        curve: The measured batches.
        batch: Largest batch.
        speed: The clock, as a ratio of the highest.
    """

    curve: BatchCurve
    batch: int
    speed: float = 1.0

    def time_s(self, batch: float) -> float:
        """Seconds of a batch at this clock."""
        measured_s = self.curve.time_s(batch)
        return max(measured_s, min(measured_s, batch * self.curve.processes * self.curve.kernel_s) / self.speed)

    @property
    def kernel_s(self) -> float:
        """Seconds of the slice's kernels for one request at this clock."""
        return self.curve.kernel_s / self.speed

    @property
    def full_rps(self) -> float:
        """Requests a second of full batches, all processes together."""
        return self.curve.processes * self.batch / self.time_s(self.batch)

    def capacity_rps(self, slo: Slo, scv: float, margin_ratio: float = 0.0) -> float:
        """The highest rate of requests at which the SLO's quantile of them is in time.

        Each process gets its own share of the requests, in turn, and takes all that wait when it is free.

        Args:
            slo: The latency and its quantile.
            scv: Squared coefficient of variation of the gaps between requests of one process.
            margin_ratio: Ratio by which batches are assumed to take longer than predicted.

        Returns:
            Requests a second of all processes; 0 where it is below a third of the rate of full batches.
        """
        return _capacity_rps(self, slo, scv, margin_ratio)


@lru_cache(maxsize=8192)
def _capacity_rps(process: SliceProcess, slo: Slo, scv: float, margin_ratio: float) -> float:
    """Rate that a process sustains; cached, because compared plans need the same rates again."""
    longer = 1.0 + margin_ratio
    bundles = min(process.batch, _BUNDLES)
    a_bundle = process.batch / bundles
    times = [longer * process.time_s(a_bundle * n) for n in range(1, bundles + 1)]
    if not times[0] <= slo.latency_s:
        return 0.0
    full = bundles / times[-1]
    if scv <= 0:  # evenly spaced: a request waits for the batch in service, then for its own
        return process.curve.processes * a_bundle * full if 2 * times[-1] <= slo.latency_s else 0.0
    scv /= a_bundle
    late = 1.0 - slo.quantile

    def kept(part: float) -> bool:
        return late_ratio(part * full, scv, times, slo.latency_s) <= late

    low, high = _bracket(kept)
    while low > 0 and high - low > _FINE:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low * full * a_bundle * process.curve.processes


def _bracket(kept: Callable[[float], bool]) -> tuple[float, float]:
    """Two neighbouring rungs of the ladder of loads, the lower of which is kept; (0, 0) where none is."""
    first = _LADDER.index(_LIKELY)
    step = 1 if kept(_LIKELY) else -1
    for at in range(first + step, len(_LADDER) if step > 0 else -1, step):
        if kept(_LADDER[at]) != (step > 0):
            return (_LADDER[at - 1], _LADDER[at]) if step > 0 else (_LADDER[at], _LADDER[at + 1])
    return (_LADDER[-1], 1.0) if step > 0 else (0.0, 0.0)


def largest_batch(curve: BatchCurve, speed: float, slo: Slo, margin_ratio: float, most: int) -> int:
    """The largest batch whose queue is likely to stay within an SLO; 0 where not even single requests do.

    A request waits for the batch in service and then for its own, and batches vary the less the larger they are.
    """
    tried = [n for n in _sizes(curve.batches[-1]) if n <= min(most, curve.batches[-1])]
    found = 0
    for batch in tried:
        one = SliceProcess(curve, batch, speed)
        if one.time_s(batch) * (1 + margin_ratio) * (1.75 + 1 / math.sqrt(batch)) <= slo.latency_s:
            found = batch
    return found or int(SliceProcess(curve, 1, speed).time_s(1) * (1 + margin_ratio) <= slo.latency_s)


def _sizes(most: int) -> Sequence[int]:
    """Batches worth trying: 1, 2, 3, 4, 6, 8, 12 ..."""
    found, size = [1], 2
    while size <= most:
        found += [size, size * 3 // 2] if size > 1 else [size]
        size *= 2
    return [each for each in sorted(set(found)) if each <= most]
