"""Power over time, and below it the modules that ran: one row of spans for each level of modules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from joulery.accounting.operations.align import canonical
from joulery.accounting.operations.session import is_accelerator
from joulery.accounting.steps import NS_PER_S, PowerSteps, energy_by_bin, power_steps
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.power import PowerTrace
from joulery.domain.format import duration, si
from joulery.domain.trace.events import EventTrace
from joulery.ui.kit.charts import box, fitted
from joulery.ui.kit.html import Html, tag

LEVELS = 3
_HEIGHT, _ROW, _LEFT = 160, 20, 56
_POINTS = 1200


def spans_svg(trace: EventTrace, power: Sequence[PowerTrace], window_ns: tuple[int, int], *, width: int = 1080) -> Html:
    """Power of the traced device over a window, and the spans of its modules.

    Args:
        trace: The events.
        power: The readings; those of the accelerator that ran most, else of the host.
        window_ns: The window to draw, nanoseconds.
        width: Of the picture, pixels.
    """
    device = _busiest(trace)
    meters = [one for one in power if canonical(one.channel.device) == canonical(device)] or list(power[:1])
    scale = (width - _LEFT) / max(1, window_ns[1] - window_ns[0])
    rows = [_level(trace, device, window_ns, level, scale) for level in range(1, LEVELS + 1)]
    height = _HEIGHT + _ROW * (LEVELS + 1)
    watts, line = _line([power_steps(one) for one in meters], window_ns, scale)
    label = f"Power of {device} over {duration((window_ns[1] - window_ns[0]) / 1e9)}, modules below"
    return tag(
        "svg",
        tag("rect", x=_LEFT, y=6, width=width - _LEFT, height=_HEIGHT - 16, class_="frame"),
        tag("text", si(watts, "W"), x=0, y=18, class_="label"),
        tag("text", "0 W", x=0, y=_HEIGHT - 10, class_="label"),
        line,
        (_row(spans, level, scale, window_ns[0]) for level, spans in enumerate(rows)),
        tag("text", duration((window_ns[1] - window_ns[0]) / 1e9), x=width - 70, y=height - 4, class_="label"),
        viewBox=f"0 0 {width} {height}",
        class_="spans",
        role="img",
        aria_label=label,
    )


def _busiest(trace: EventTrace) -> str:
    """The accelerator that ran longest; the host where there is none."""
    total = np.bincount(trace.device, trace.dur_ns, len(trace.devices)) if len(trace) else np.zeros(len(trace.devices))
    accelerators = [(total[i], name) for i, name in enumerate(trace.devices) if is_accelerator(name)]
    return max(accelerators)[1] if accelerators else trace.devices[int(np.argmax(total))] if len(total) else "CPU"


def _line(meters: list[PowerSteps], window_ns: tuple[int, int], scale: float) -> tuple[float, Html | None]:
    """Highest mean power of a bin, and the line of the mean power of equally long bins: it leaves no burst out."""
    count = min(_POINTS, window_ns[1] - window_ns[0])
    if not meters or count < 1:
        return 0.0, None
    bins = np.linspace(window_ns[0], window_ns[1], count + 1).astype(np.int64)
    energy_j: FloatArray = np.sum([energy_by_bin(steps, bins)[0] for steps in meters], axis=0)
    values = energy_j / (np.diff(bins) / NS_PER_S)
    most = float(values.max(initial=0.0))
    if not most > 0:
        return 0.0, None
    x = _LEFT + (bins[:-1] - window_ns[0]) * scale
    y = _HEIGHT - 10 - values / most * (_HEIGHT - 22)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    return most, tag("polyline", points=points, class_="power-line")


def _level(
    trace: EventTrace, device: str, window_ns: tuple[int, int], level: int, scale: float
) -> list[tuple[str, str, int, int]]:
    """(path, phase, start, end) of stretches in which one module of a level ran, wide enough to be seen."""
    if not len(trace):
        return []
    rows = np.flatnonzero(
        (trace.device == trace.devices.index(device))
        & (trace.start_ns < window_ns[1])
        & (trace.end_ns > window_ns[0])
        & (trace.dur_ns > 0)
    )
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    prefixes = ["/".join(op.split("/")[:-1][:level]) if op.count("/") >= level else "" for op in trace.ops]
    table = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
    code = np.array([table[prefix] for prefix in prefixes], np.int64)[trace.op[rows]]
    key: IntArray = code * len(trace.phases) + trace.phase[rows]
    named = list(table)
    kept = np.array([bool(name) for name in named], np.bool_)[code] if len(code) else np.zeros(0, np.bool_)
    rows, key, code = rows[kept], key[kept], code[kept]
    if not len(rows):
        return []
    fresh = np.flatnonzero(np.diff(key, prepend=-1) != 0)
    ends = np.maximum.reduceat(trace.end_ns[rows], fresh)
    found = []
    for begin, end in zip(fresh.tolist(), ends.tolist(), strict=True):
        start = max(int(trace.start_ns[rows[begin]]), window_ns[0])
        stop = min(end, window_ns[1])
        if (stop - start) * scale >= 0.6:
            found.append((named[int(code[begin])], trace.phases[int(trace.phase[rows[begin]])], start, stop))
    return found


def _row(spans: list[tuple[str, str, int, int]], level: int, scale: float, begin_ns: int) -> list[Html]:
    bars = []
    for path, phase, start, end in spans:
        x, length = _LEFT + (start - begin_ns) * scale, (end - start) * scale
        y = _HEIGHT + level * _ROW
        text = fitted(path.rpartition("/")[2], length - 6)
        tip = f"{path} {phase}: {duration((end - start) / 1e9)}"
        name = tag("text", text, x=round(x + 3, 1), y=y + 12) if text else None
        shade = f"phase-{phase or 'other'}"
        bars.append(box(x, y, length, _ROW - 3, tip, name, class_=shade, fill_opacity=0.45))
    return bars
