"""Channels of a meter, and the meters to open.

The module imports nothing heavy, because the sampler process loads it. Its classes are named tuples, because
``dataclasses`` would be a fifth of the sampler's imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from joulery.domain.quality import Quality

HOST = "host"
"""Component of the device ``machine`` that contains everything of a node: processors, GPUs, fans."""


class ReadingKind(StrEnum):
    """Meaning of one reading of a channel (specs: right-continuous, piecewise-constant power)."""

    COUNTER = "counter"
    """Cumulative joules; the difference belongs to the interval that ended at the later reading."""
    POWER = "power"
    """Instantaneous watts; held until the next reading."""
    AVERAGE = "average"
    """Watts averaged over the ``averaging_s`` before the reading."""


class Channel(NamedTuple):
    """One stream of readings of one meter.

    Attributes:
        device: ``cpu:0`` (socket), ``gpu:0`` (board), ``machine``.
        component: ``package``, ``dram``, ``board`` ...; components of one device never overlap.
        kind: What a reading means.
        meter: Name of the meter (``rapl``, ``nvml``, ``amd``, ``ipmi``, ``cpu-model`` ...).
        quality: Measured, modelled or assumed.
        averaging_s: Window of an ``AVERAGE`` reading; 0 otherwise.
        wrap_j: Value at which a counter starts again from 0; 0 when it does not.
        idle_w: Power the model or the user gives for the idle device; NaN when unknown.
        band_ratio: Half-width of the uncertainty of a modelled channel, as a ratio of the reading; 0 when not stated.
        max_w: Power the device cannot exceed, to distinguish a counter's wrap from a reset; NaN when unknown.
        update_s: How often the device renews its reading; 0 when it always does. Nothing shorter is resolved.
    """

    device: str
    component: str
    kind: ReadingKind
    meter: str
    quality: Quality
    averaging_s: float = 0.0
    wrap_j: float = 0.0
    idle_w: float = float("nan")
    band_ratio: float = 0.0
    max_w: float = float("nan")
    update_s: float = 0.0


class MeterSpec(NamedTuple):
    """A meter to open.

    Attributes:
        kind: ``rapl``, ``nvml``, ``amd``, ``ipmi``, ``cpu-model``, ``replay``, ``fake`` ... or a plug-in.
        options: Arguments of its opener, JSON-ready.
    """

    kind: str
    options: Mapping[str, Any] = {}  # never changed; a read-only view could not be pickled

    def as_dict(self) -> dict[str, Any]:
        """The meter's kind and options as a JSON object."""
        return {"kind": self.kind, "options": dict(self.options)}
