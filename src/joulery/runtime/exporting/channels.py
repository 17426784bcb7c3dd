"""Sum the joules of each channel between two samples, from readings that may be more frequent than samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from joulery.accounting.node_energy import counter_delta
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.ports import Meter


@dataclass(slots=True)
class ChannelNow:
    """Current state of one channel.

    Attributes:
        channel: The channel.
        total_j: Joules since the first reading.
        power_w: Power over the latest interval between two renewals; NaN before there is one.
        read_at_s: When it last gave a reading; minus infinity for never.
        faults: Times that its counter was reset or cannot be trusted.
    """

    channel: Channel
    total_j: float = 0.0
    power_w: float = math.nan
    read_at_s: float = -math.inf
    faults: int = 0
    _last: float = math.nan
    _renewed_at_s: float = -math.inf
    _since_renewal_j: float = 0.0
    _peak_w: float = 0.0
    _sample_j: float = 0.0
    _lost: bool = False

    def advance(self, value: float, now_s: float) -> str:
        """Add one reading; return a sentence where the counter cannot be trusted, else an empty text."""
        if math.isnan(value):
            # A counter makes up for it with its next reading; what a power reading missed is lost.
            self._lost |= self.channel.kind is not ReadingKind.COUNTER and self.read_at_s > -math.inf
            self.power_w = math.nan
            self._last = self._last if self.channel.kind is ReadingKind.COUNTER else math.nan
            return ""
        elapsed_s, self.read_at_s = now_s - self.read_at_s, now_s
        before, self._last = self._last, value
        if math.isnan(before) or not 0 < elapsed_s < math.inf:
            self._renewed_at_s = now_s
            return ""
        energy_j = counter_delta(self.channel, before, value, elapsed_s, self._peak_w)
        if math.isnan(energy_j) or energy_j < 0:
            self.faults += 1
            self._lost, self.power_w = True, math.nan
            self._renewed_at_s, self._since_renewal_j = now_s, 0.0
            name = f"{self.channel.device} {self.channel.component}"
            return f"{name}: the counter of {self.channel.meter} was reset; the joules of that interval are left out"
        self.total_j += energy_j
        self._sample_j += energy_j
        self._since_renewal_j += energy_j
        self._set_power(energy_j, now_s)
        return ""

    def take(self) -> tuple[float, bool]:
        """Joules since the last call, and whether none of them was lost."""
        energy_j, lost = self._sample_j, self._lost
        self._sample_j, self._lost = 0.0, False
        return energy_j, not lost

    def _set_power(self, energy_j: float, now_s: float) -> None:
        """Set the power since the device renewed its value; a counter does not change between renewals."""
        waited_s = now_s - self._renewed_at_s
        if self.channel.kind is ReadingKind.COUNTER and energy_j == 0 and waited_s <= 2 * self.channel.update_s:
            return
        self.power_w = self._since_renewal_j / waited_s
        self._peak_w = max(self._peak_w, self.power_w)
        self._renewed_at_s, self._since_renewal_j = now_s, 0.0


class NodeChannels:
    """The channels of all meters of a node."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self.meters = tuple(meters)
        self.channels = tuple(ChannelNow(channel) for meter in self.meters for channel in meter.channels)

    @property
    def between_samples(self) -> bool:
        """Whether a channel reports power, which must be read more often than samples are taken."""
        return any(one.channel.kind is not ReadingKind.COUNTER for one in self.channels)

    def advance(self, now_s: float) -> list[str]:
        """Read all meters; return notes for readers of the figures."""
        notes: list[str] = []
        channels = iter(self.channels)
        for meter in self.meters:
            notes += [text for value in meter.read() if (text := next(channels).advance(value, now_s))]
            notes += meter.notes()
        return notes


class IdleBoards:
    """The power of each GPU when nothing computes on it: the lowest mean of an interval without any work."""

    def __init__(self) -> None:
        self.power_w: dict[str, float] = {}

    def learn(self, device: str, energy_j: float, elapsed_s: float) -> None:
        """Add an idle interval of a GPU.

        Args:
            device: The GPU.
            energy_j: Energy that it used, J.
            elapsed_s: Length of the interval.
        """
        if elapsed_s > 0 and energy_j > 0:
            self.power_w[device] = min(self.power_w.get(device, math.inf), energy_j / elapsed_s)
