"""Energy of a training job on several nodes: each node writes its totals to the job's key-value store (PyTorch's).

It is the store at ``MASTER_ADDR:MASTER_PORT`` by which the processes of the job find each other. Writing and reading
do not wait for other nodes, so a node that is late or has failed does not delay the others.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from joulery.domain.format import grams, si
from joulery.runtime.measuring.job_place import job_place
from joulery.runtime.measuring.terms import MeasureWarning

CONNECT_S = 5.0
LAST_WAIT_S = 5.0
"""Seconds that the first node waits at the end for the final totals of the others."""
_POLL_S = 0.1
_RAY = ("NODE_RANK", "RANK", "WORLD_SIZE")


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
    """Energy and carbon of a training job on all its nodes.

    Attributes:
        energy_j: Joules of the nodes that reported.
        carbon_g: Grams of these nodes; None where those of one of them are not known.
        nodes: Number of nodes of the job.
        reported: Number of nodes that reported; if it equals ``nodes``, ``energy_j`` covers the whole job.
        final: Whether all nodes of the job reported after their last step.
    """

    energy_j: float
    carbon_g: float | None
    nodes: int
    reported: int
    final: bool

    def __str__(self) -> str:
        parts = [f"{si(self.energy_j, 'J')} on {self.reported} of {self.nodes} nodes"]
        if self.carbon_g is not None:
            parts.append(f"{grams(self.carbon_g)} CO2e")
        return ", ".join(parts if self.final else [*parts, "not all nodes have ended"])

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dictionary."""
        return asdict(self)


class JobBoard:
    """Energy totals that the nodes of one training job share through its key-value store.

    Args:
        store: The store of the job.
        node, nodes: This node's number, and the number of nodes; 0 where the launcher does not set it (Ray Train): then
            every process of the job joins, and the number is known once all have.
        now_s: A monotonic clock.
        sleep: Waits for a number of seconds.
        ranks: Number of processes of a job whose launcher does not set the number of nodes.
    """

    def __init__(
        self,
        store: KeyValueStore,
        node: int,
        nodes: int,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        ranks: int = 0,
    ) -> None:
        self.node, self.nodes = node, nodes
        self._store, self._now_s, self._sleep = store, now_s, sleep
        self._lost = False
        self._ranks = ranks
        self._members: dict[int, Mapping[str, int]] = {}

    def join(self, rank: int, pid: int) -> None:
        """Register the node on which a process of the job runs.

        Args:
            rank: Rank of the process in the job.
            pid: Its process id on that node.
        """
        text = json.dumps({"node": self.node, "pid": pid})
        self._guarded(lambda: self._store.set(f"rank/{rank}", text))

    def pids(self) -> frozenset[int]:
        """Process ids of the job's processes on this node that have joined."""
        self._read_joined()
        return frozenset(one["pid"] for one in self._members.values() if one["node"] == self.node)

    def _read_joined(self) -> None:
        """Read the processes that have joined; set the number of nodes once all have."""
        for rank in range(self._ranks):
            if rank not in self._members and (member := self._guarded(partial(self._read, f"rank/{rank}"))):
                self._members[rank] = member
        if not self.nodes and self._ranks and len(self._members) == self._ranks:
            self.nodes = 1 + max(one["node"] for one in self._members.values())

    def put(self, energy_j: float, carbon_g: float | None, *, final: bool = False) -> None:
        """Write the totals of this node to the store.

        Args:
            energy_j: Joules of the run so far.
            carbon_g: Grams; None where they are not known.
            final: Whether the run has ended.
        """
        text = json.dumps({"energy_j": energy_j, "carbon_g": carbon_g, "final": final})
        self._guarded(lambda: self._store.set(_key(self.node), text))

    def job(self) -> MultiNodeEnergy | None:
        """Total of the nodes that have reported; None where none has, the job has one node, or the store is lost."""
        self._read_joined()
        if self.nodes < 2:
            return None
        found = self._guarded(
            lambda: [each for node in range(self.nodes) if (each := self._read(_key(node))) is not None]
        )
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
        """Total of the nodes once all have ended, or after ``wait_s``."""
        end_s = self._now_s() + wait_s
        job = self.job()
        while job is not None and not job.final and self._now_s() < end_s:
            self._sleep(_POLL_S)
            job = self.job()
        return job

    def _read(self, key: str) -> Mapping[str, Any] | None:
        if not self._store.check([key]):
            return None
        found: Mapping[str, Any] = json.loads(self._store.get(key))
        return found

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Call ``act``; where the store is lost, return None and warn once."""
        if self._lost:
            return None
        try:
            return act()
        except (RuntimeError, OSError, ValueError) as error:
            self._lost = True
            warnings.warn(f"figures cover this node only: {error}", MeasureWarning, stacklevel=4)
            return None


def in_ray(environment: Mapping[str, str]) -> bool:
    """Whether this is a worker of Ray Train: its parent, the raylet, starts the workers of other jobs too."""
    return "RAY_JOB_ID" in environment and all(environment.get(key, "").isdigit() for key in _RAY)


def open_board(environment: Mapping[str, str]) -> JobBoard | None:
    """Open the board of a job on several nodes, or of a job that Ray Train started.

    Returns None for a job of torchrun or srun on one node; returns None and warns where there is no store.
    """
    place, ray = job_place(environment), in_ray(environment)
    if place.nodes < 2 and not ray:
        return None
    try:
        from torch.distributed import PrefixStore, TCPStore

        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False)
        if not ray:
            return JobBoard(PrefixStore("joulery", store), place.node, place.nodes)
        node, rank, ranks = (int(environment[key]) for key in _RAY)
        board = JobBoard(PrefixStore("joulery", store), node, 0, ranks=ranks)
        board.join(rank, os.getpid())
        return board
    except (ImportError, KeyError, ValueError, RuntimeError, OSError) as error:
        alone = "this process" if ray else f"node {place.node} of {place.nodes}"
        warnings.warn(
            f"figures cover {alone} only: the job's store does not answer ({error})", MeasureWarning, stacklevel=3
        )
        return None


def _key(node: int) -> str:
    return f"node/{node}"
