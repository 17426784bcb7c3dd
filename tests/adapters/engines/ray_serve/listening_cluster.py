"""A Ray cluster without Ray whose replicas are the real ones, and listen: they can be ended, killed and cut off."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

from joulery.adapters.engines.ray_serve.cluster import RayPlace, ReplicaGoneError
from joulery.adapters.engines.ray_serve.replica import Instances
from joulery.domain.errors import CapabilityError
from joulery.domain.serving.engine import ModelKind, ModelRef, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind
from tests.adapters.engines.ray_serve.fake_cluster import FakeCluster

GATE = threading.Event()
"""What :func:`gated` waits for."""


def gated(inputs: dict[str, Any]) -> dict[str, Any]:
    """Answers when it may."""
    GATE.wait(60.0)
    return {"y": inputs["number"]}


def unsendable(inputs: dict[str, Any]) -> dict[str, Any]:
    """Answers what no protocol has a name for."""
    return {"y": inputs["number"] * 1j}


def spec(variant: str = "v", model: str = "gated") -> ReplicaSpec:
    """A replica of the service toy."""
    location = f"tests.adapters.engines.ray_serve.listening_cluster:{model}"
    return ReplicaSpec("toy", variant, Slice(SliceKind.CPU, cores=1), ModelRef(ModelKind.PYTHON, location))


class Replica(Instances):
    """Runs in this process, in threads; counts how often its model ran for each request."""

    def __init__(self, name: str, runs: Counter[int]) -> None:
        super().__init__()
        self._id, self.rank, self.runs, self.alive = name, 0, runs, True

    async def become(self, entry: dict[str, Any], rank: int, direct: str) -> None:
        self.rank = rank
        await self.reconfigure({"plan": [*[{}] * rank, entry], "direct": direct}, SimpleNamespace(rank=rank))

    def description(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "rank": self.rank,
            "pid": 1,
            "entry": self._entry,
            "inputs": [],
            "outputs": [],
            "platform": "python",
            "note": "",
            "failed": {},
            "served": self._served,
            "direct": None if self._listener is None else self._listener.place,
            "direct_refused": self._unheard,
            "node": "127.0.0.1",
            "startup_cpu_s": 0.0,
        }

    def _one(self, inputs: Any, *rest: Any) -> dict[str, Any]:
        before = self._served
        answer = super()._one(inputs, *rest)
        if "number" in inputs:
            self.runs[int(inputs["number"][0])] += self._served - before
        return answer

    def cut(self) -> None:
        """Break its connections; it lives."""
        for line in tuple(self._listener._lines):
            line.shutdown(2)

    def kill(self) -> None:
        """It is no more; what its model would still answer reaches no one."""
        self.alive = False
        listener, self._listener = self._listener, None
        listener.close()
        for line in tuple(listener._lines):
            line.shutdown(2)


class ListeningCluster(FakeCluster):
    """Brings up as many replicas as an application is to have, and ends the oldest first."""

    def __init__(self) -> None:
        super().__init__(RayPlace())
        self.lost, self.away, self.count = "", False, 0
        self.replicas: dict[str, list[Replica]] = {}
        self.runs: Counter[int] = Counter()
        self.through: list[str] = []
        self.stale: list[dict[str, Any]] = []
        self.ending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        if self.away:
            raise CapabilityError("no cluster", resource="ray", grant="start it")
        self.lost = ""

    def environ(self) -> dict[str, str]:
        return {}

    async def declare(self, applications: Any) -> None:
        await super().declare(applications)
        for name in {*self.declared, *self.replicas}:
            await self.settle(name)

    async def settle(self, name: str) -> None:
        """Have the replicas that an application is to have."""
        there = self.replicas.setdefault(name, [])
        there[:] = [replica for replica in there if replica.alive]
        config = self.declared[name]["deployments"][0]["user_config"] if name in self.declared else {"plan": []}
        while len(there) > len(config["plan"]):
            task = asyncio.ensure_future(self.end(there.pop(0)))
            self.ending.add(task)
        for rank, entry in enumerate(config["plan"]):
            if rank == len(there):
                self.count += 1
                there.append(Replica(f"r{self.count}", self.runs))
            await there[rank].become(entry, rank, config["direct"])

    @staticmethod
    async def end(replica: Replica) -> None:
        leaving = replica.__del__()
        if leaving is not None:
            await leaving
        replica.alive = False

    async def scale(self, application: str, deployment: str, replicas: int) -> None:
        return None

    async def describe(self, application: str) -> list[dict[str, Any]]:
        if self.stale:
            return self.stale
        await self.settle(application)
        return [replica.description() for replica in self.replicas[application]]

    async def infer(self, application: str, replica: str, request: Any, call: str = "") -> dict[str, Any]:
        self.through.append(replica)
        for one in self.replicas[application]:
            if one._id == replica and one.alive:
                inputs = dict(request.inputs)
                return await Instances.infer(one, inputs, request.outputs, request.variant, replica, call)
        raise ReplicaGoneError("ActorDiedError")

    async def close(self) -> None:
        if self.lost:
            return  # there is nothing to leave
        for there in self.replicas.values():
            for replica in there:
                await self.end(replica)
        await asyncio.gather(*self.ending)
