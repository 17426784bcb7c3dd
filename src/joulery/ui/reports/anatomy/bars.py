"""The operations that used most as horizontal bars, coloured by phase."""

from __future__ import annotations

import numpy as np

from joulery.accounting.edd import powers_w
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.format import percent, si
from joulery.ui.kit.html import Html, tag

PHASES = ("forward", "backward", "recompute", "optimizer", "data", "other")
_ROW, _LABEL = 24, 12


def bars_svg(footprint: TensorFootprint, *, top: int = 10, width: int = 1080) -> Html:
    """The ``top`` rows by energy: joules as bars, both powers as words."""
    energy = np.nan_to_num(footprint.energy_j)
    order = np.argsort(-energy, kind="stable")[:top].tolist()
    most = float(energy[order[0]]) if order else 0.0
    attributed = footprint.attributed_j
    shared_w, device_w = powers_w(footprint)
    room = width * 0.42
    parts: list[Html] = []
    for place, at in enumerate(order):
        y = place * 2 * _ROW
        phase = footprint.phase[at] if footprint.phase[at] in PHASES else "other"
        length = room * float(energy[at]) / most if most > 0 else 0.0
        share = percent(float(energy[at]) / attributed) if attributed > 0 else ""
        watts = f"{si(shared_w[at], 'W')} shared, {si(device_w[at], 'W')} of the device"
        words = f"{si(float(energy[at]), 'J')}  {share}  ·  {watts}  ·  {footprint.phase[at] or 'other'}"
        parts.append(
            tag(
                "g",
                tag("text", footprint.op[at], x=0, y=y + _LABEL + 2),
                tag(
                    "rect",
                    x=0,
                    y=y + _LABEL + 7,
                    width=round(max(length, 1), 1),
                    height=_ROW - 10,
                    rx=2,
                    class_=f"phase-{phase}",
                ),
                tag("text", words, x=round(max(length, 1) + 8, 1), y=y + _LABEL + 18, class_="label"),
            )
        )
    return tag(
        "svg",
        parts,
        viewBox=f"0 0 {width} {max(1, len(order)) * 2 * _ROW}",
        class_="bars",
        role="img",
        aria_label=f"The {len(order)} operations that used most energy",
    )
