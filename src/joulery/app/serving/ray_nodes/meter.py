"""The meters of one node of a Ray cluster; an actor on each node runs :class:`NodeMeter`."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

from joulery.app.wiring.meters import open_meters
from joulery.app.wiring.share import open_busy, open_tree
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.meters import MetersConfig
from joulery.domain.energy.workload import NodeWorkload, WorkloadUse
from joulery.domain.errors import CapabilityError, JouleryError
from joulery.domain.quality import weakest
from joulery.runtime.exporting.channels import NodeChannels
from joulery.runtime.exporting.node import NodeExporter, NodeReaders

OWN = NodeWorkload("ray", "node")
"""The node's own processes: those of its raylet."""
_READ_EVERY_S = 0.2
"""Seconds between two readings of meters that report power instead of energy."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NodeMeter:
    """Counts the joules of a machine, and of the processes below its raylet, from its creation on.

    Args:
        meters: The ``meters`` section of the site file.
    """

    def __init__(self, meters: MetersConfig) -> None:
        self._refusal, self._exporter, self._from_s = "", None, time.monotonic()
        try:
            opened = open_meters(meter_specs(meters))
            if not opened.meters:
                raise CapabilityError("no meter answers there", hint="joulery doctor on that node names the reason")
        except JouleryError as error:
            self._refusal = str(error)
            return
        self._channels = NodeChannels(opened.meters)
        readers = NodeReaders(self._channels, open_busy(), RayletProcesses(os.getppid()))
        self._exporter = NodeExporter(readers, (), time.monotonic, time.time, lambda _: None)
        self._from_s = self._exporter.sampled_at_s
        if self._channels.between_samples:
            threading.Thread(target=self._keep_reading, name="node meter", daemon=True).start()

    def read(self) -> dict[str, Any]:
        """Read the counts so far: the fields of :class:`NodeReading`, or ``refusal`` where nothing can be metered."""
        if self._exporter is None:
            return {"refusal": self._refusal}
        self._exporter.sample(ask=False)
        book = self._exporter.book
        own = [total.energy_j for (workload, _, _), total in book.workloads.items() if workload == OWN]
        channels = [one.channel for one in self._channels.channels]
        return {
            "machine": machine(),
            "energy_j": sum(total.energy_j for total in book.devices.values()),
            "own_j": sum(own),
            "covered_s": self._exporter.sampled_at_s - self._from_s,
            "quality": weakest(channel.quality for channel in channels).value,
            "meters": sorted({channel.meter for channel in channels}),
            "opened": f"{os.getpid()} {self._from_s}",
        }

    def _keep_reading(self) -> None:
        while True:
            time.sleep(_READ_EVERY_S)
            assert self._exporter is not None
            self._exporter.advance()


class RayletProcesses:
    """Reads the CPU time of a raylet and its descendants, as the only workload of a :class:`NodeExporter`.

    Args:
        raylet: Process id of the raylet.
    """

    hidden = False

    def __init__(self, raylet: int) -> None:
        self._tree = open_tree(raylet, include_root=True, exclude=frozenset(), sockets=open_busy().sockets, group=None)
        self._seen_s = 0.0

    def read(self) -> WorkloadUse:
        """CPU seconds since the last reading."""
        self._tree.discover()
        now_s = sum(self._tree.read())
        grown_s, self._seen_s = max(0.0, now_s - self._seen_s), now_s
        return WorkloadUse({OWN: grown_s}, dict.fromkeys(self._tree.pids(), OWN), {})

    def family(self, pid: int) -> frozenset[int]:
        """Process ids of the raylet and its descendants."""
        return self._tree.pids()


def machine() -> str:
    """Identity of this machine, the same in all of its containers: the kernel's boot id, else its name."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()
