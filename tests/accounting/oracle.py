"""What integration means, once more: slowly, in rational numbers, one reading at a time."""

import itertools
from fractions import Fraction

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.energy.power import PowerTrace

Step = tuple[Fraction, Fraction, Fraction]
"""Start and end in Unix seconds, watts."""

NS = Fraction(1, 1_000_000_000)


def exact(value: float) -> Fraction:
    return Fraction(value)


def nearest_ns(t_s: float) -> Fraction:
    return round(exact(t_s) / NS) * NS


def steps(trace: PowerTrace) -> list[Step]:
    readings = [(int(t) * NS, float(v)) for t, v in zip(trace.t_ns, trace.values, strict=True)]
    if trace.channel.kind is ReadingKind.COUNTER:
        return _counter(readings, trace)
    shift = exact(trace.channel.averaging_s) / 2 if trace.channel.kind is ReadingKind.AVERAGE else Fraction(0)
    period = exact(trace.period_s)
    found = []
    for number, (t, value) in enumerate(readings):
        if value != value:
            continue
        following = readings[number + 1][0] if number + 1 < len(readings) else None
        end = t + 2 * period if following is None or following - t > 10 * period else following
        found.append((t - shift, end - shift, exact(value)))
    return found


def _counter(readings: list[tuple[Fraction, float]], trace: PowerTrace) -> list[Step]:
    fresh: list[tuple[Fraction, Fraction]] = []
    for t, value in readings:
        if value == value and (not fresh or exact(value) != fresh[-1][1]):
            fresh.append((t, exact(value)))
    pairs = list(itertools.pairwise(fresh))
    wrap = exact(trace.channel.wrap_j)
    seen = max(((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[1] > a[1]), default=Fraction(0))
    found = []
    for (t0, e0), (t1, e1) in pairs:
        joules = e1 - e0 if e1 > e0 else e1 - e0 + wrap
        if e1 < e0 and (wrap == 0 or joules < 0 or (seen > 0 and joules / (t1 - t0) > 10 * seen)):
            continue
        if wrap > 0 and seen * (t1 - t0) >= wrap:
            continue
        found.append((t0, t1, joules / (t1 - t0)))
    return found


def integral(
    traces: list[PowerTrace], t0_s: float, t1_s: float, carbon: CarbonSeries | None
) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Joules, covered seconds (mean over traces), grams and joules with a known intensity."""
    t0, t1 = nearest_ns(t0_s), nearest_ns(t1_s)
    joules = covered = grams = weighed = Fraction(0)
    for trace in traces:
        for a, b, watts in steps(trace):
            a, b = max(a, t0), min(b, t1)
            if a >= b:
                continue
            joules += watts * (b - a)
            covered += (b - a) / len(traces)
            if carbon is None:
                continue
            for c0, c1, g in zip(carbon.edges_s, carbon.edges_s[1:], carbon.g_per_kwh, strict=False):
                length = min(b, nearest_ns(float(c1))) - max(a, nearest_ns(float(c0)))
                if length > 0 and g == g:
                    weighed += watts * length
                    grams += watts * length * exact(float(g)) / 3_600_000
    return joules, covered, grams, weighed
