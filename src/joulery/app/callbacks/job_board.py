"""What all nodes of one training job drew: each node leaves its sums in the job's own key-value store (PyTorch's).

The store is the one at ``MASTER_ADDR:MASTER_PORT`` by which the processes of the job find each other. Leaving and
looking wait for no other node: a node that is late, or is gone, delays no other.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from joulery.runtime.measuring.measure import MeasureWarning

CONNECT_S = 5.0
LAST_WAIT_S = 5.0
"""How long the first node waits at the end for the last sums of the others."""
_POLL_S = 0.1


class KeyValueStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> Any:
        """Set a key."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        ...


@dataclass(frozen=True, slots=True)
class MultiNodeEnergy:
    """What a job drew on all its nodes.

    Attributes:
        energy_j: Joules of the nodes that reported.
        carbon_g: Their grams; None where those of a node are not known.
        nodes: Nodes of the job.
        reported: Nodes that reported; the joules are the whole job's where it equals ``nodes``.
        final: Whether all of them reported after their last step.
    """

    energy_j: float
    carbon_g: float | None
    nodes: int
    reported: int
    final: bool


class JobBoard:
    """Sums of the nodes of one job.

    Args:
        store: The store of the job.
        node, nodes: This node's number, and how many there are.
        now_s: A monotonic clock.
        sleep: Waits.
    """

    def __init__(
        self,
        store: KeyValueStore,
        node: int,
        nodes: int,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.node, self.nodes = node, nodes
        self._store, self._now_s, self._sleep = store, now_s, sleep
        self._lost = False

    def put(self, energy_j: float, carbon_g: float | None, *, final: bool = False) -> None:
        """Leave the sums of this node.

        Args:
            energy_j: Joules of the run so far.
            carbon_g: Grams; None where they are not known.
            final: Whether the run has ended.
        """
        text = json.dumps({"energy_j": energy_j, "carbon_g": carbon_g, "final": final})
        self._guarded(lambda: self._store.set(_key(self.node), text))

    def job(self) -> MultiNodeEnergy | None:
        """What the nodes have reported; None where none has, or the store is lost."""
        found = self._guarded(lambda: [each for node in range(self.nodes) if (each := self._of(node)) is not None])
        if not found:
            return None
        carbon_g = [each["carbon_g"] for each in found]
        return MultiNodeEnergy(
            math.fsum(each["energy_j"] for each in found),
            None if None in carbon_g else math.fsum(carbon_g),
            self.nodes,
            len(found),
            len(found) == self.nodes and all(each["final"] for each in found),
        )

    def last(self, wait_s: float = LAST_WAIT_S) -> MultiNodeEnergy | None:
        """What the nodes have reported once all have ended, or after ``wait_s``."""
        end_s = self._now_s() + wait_s
        job = self.job()
        while job is not None and not job.final and self._now_s() < end_s:
            self._sleep(_POLL_S)
            job = self.job()
        return job

    def _of(self, node: int) -> Mapping[str, Any] | None:
        key = _key(node)
        if not self._store.check([key]):
            return None
        found: Mapping[str, Any] = json.loads(self._store.get(key))
        return found

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Do it; None, and a warning the first time, where the store is gone."""
        if self._lost:
            return None
        try:
            return act()
        except (RuntimeError, OSError, ValueError) as error:
            self._lost = True
            warnings.warn(f"figures are of this node alone: {error}", MeasureWarning, stacklevel=4)
            return None


def nodes_of_job(environment: Mapping[str, str]) -> tuple[int, int]:
    """(This node's number, nodes) of a job started by torchrun or srun; (0, 1) of any other."""
    for size, rank in (("GROUP_WORLD_SIZE", "GROUP_RANK"), ("SLURM_STEP_NUM_NODES", "SLURM_NODEID")):
        nodes, node = environment.get(size, ""), environment.get(rank, "")
        if nodes.isdigit() and node.isdigit() and int(node) < int(nodes):
            return int(node), int(nodes)
    return 0, 1


def open_board(environment: Mapping[str, str]) -> JobBoard | None:
    """The board of a job on several nodes; None for a job on one, and with a warning where there is no store."""
    node, nodes = nodes_of_job(environment)
    if nodes < 2:
        return None
    try:
        from torch.distributed import PrefixStore, TCPStore

        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False)
        return JobBoard(PrefixStore("joulery", store), node, nodes)
    except (ImportError, KeyError, ValueError, RuntimeError, OSError) as error:
        warnings.warn(
            f"figures are of node {node} of {nodes} alone: the job's store does not answer ({error})",
            MeasureWarning,
            stacklevel=3,
        )
        return None


def _key(node: int) -> str:
    return f"node/{node}"
