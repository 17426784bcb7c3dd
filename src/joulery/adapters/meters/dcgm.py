"""Meter of NVIDIA's DCGM exporter, for GPUs whose driver is not accessible here, such as those of a Kubernetes node.

The meter reads ``DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION`` (millijoules since the driver was loaded) and, for boards
without it, ``DCGM_FI_DEV_POWER_USAGE`` (watts). The lines of MIG instances repeat the whole board: the first counts.
The exporter renews its values every 30 s by default (``--collect-interval``), so shorter times are not resolved. It
does not report the processes that use a board.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from urllib.parse import SplitResult

from joulery.adapters.engines.counters.exposition import samples
from joulery.adapters.engines.counters.scrape import metrics_address, scrape
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import CapabilityError, DataError, JouleryError
from joulery.domain.quality import Quality

_ENERGY, _POWER = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_POWER_USAGE"
_UPDATE_S = 30.0
_MJ_PER_J = 1e3


class DcgmMeter:
    """Meter with one channel for each board, read from one page of the DCGM exporter.

    Args:
        fetch: Returns the page.
        channels: One channel for each board.
        boards: UUID of each board, by device.
    """

    def __init__(self, fetch: Callable[[], str], channels: tuple[Channel, ...], boards: dict[str, str]) -> None:
        self._fetch = fetch
        self._channels = channels
        self._boards = boards
        self._notes: list[str] = []
        self._failure = ""
        self._open = True

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel for each board."""
        return self._channels

    @property
    def uuids(self) -> dict[str, str]:
        """Device name by UUID."""
        return {uuid: device for device, uuid in self._boards.items() if uuid}

    def read(self) -> tuple[float, ...]:
        """Joules or watts, by the kind of each channel; NaN for a board that is not on the page."""
        if not self._open:
            return (math.nan,) * len(self._channels)
        try:
            energy_j, power_w, _ = _boards(self._fetch())
        except JouleryError as error:
            if not self._failure:
                self._notes.append(f"the DCGM exporter cannot be read: {error}")
            self._failure = str(error)
            return (math.nan,) * len(self._channels)
        if self._failure:
            self._failure = ""
            self._notes.append("the DCGM exporter answers again")
        return tuple(
            (energy_j if channel.kind is ReadingKind.COUNTER else power_w).get(channel.device, math.nan)
            for channel in self._channels
        )

    def notes(self) -> tuple[str, ...]:
        """New notes that the exporter stopped answering or answers again."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Stop reading the exporter. Safe to call twice."""
        self._open = False


def open_dcgm(address: str, fetch: Callable[[SplitResult], str] = scrape) -> DcgmMeter:
    """Open a meter of the boards of a DCGM exporter.

    Args:
        address: Its metrics page, ``http://localhost:9400/metrics``.
        fetch: Returns the text of a page.

    Raises:
        ConfigError: The address is invalid.
        CapabilityError: No DCGM exporter answers there, or no GPU is on the page.
    """
    page = metrics_address(address, "--meter")
    try:
        energy_j, power_w, uuids = _boards(fetch(page))
    except DataError as error:
        raise CapabilityError(f"{page.geturl()} is not a DCGM exporter: {error}", resource=address) from error
    if not energy_j and not power_w:
        raise CapabilityError(
            f"{page.geturl()} shows no energy and no power of a GPU",
            resource=address,
            hint=f"its list of counters must contain {_ENERGY} or {_POWER}",
        )
    devices = sorted({*energy_j, *power_w}, key=lambda device: int(device.partition(":")[2]))
    channels = tuple(
        Channel(
            device,
            "board",
            ReadingKind.COUNTER if device in energy_j else ReadingKind.POWER,
            "dcgm",
            Quality.MEASURED,
            update_s=_UPDATE_S,
        )
        for device in devices
    )
    return DcgmMeter(lambda: fetch(page), channels, uuids)


def _boards(page: str) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Joules, watts and UUID by device."""
    energy_j: dict[str, float] = {}
    power_w: dict[str, float] = {}
    uuids: dict[str, str] = {}
    for sample in samples(page, (_ENERGY, _POWER)):
        gpu = sample.labels.get("gpu", "")
        if not gpu.isdigit() or not math.isfinite(sample.value) or sample.value < 0:
            continue
        device = f"gpu:{gpu}"
        uuids.setdefault(device, sample.labels.get("UUID", ""))
        if sample.name == _ENERGY:
            energy_j.setdefault(device, sample.value / _MJ_PER_J)
        else:
            power_w.setdefault(device, sample.value)
    return energy_j, power_w, uuids
