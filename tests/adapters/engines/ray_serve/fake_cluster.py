"""A Ray cluster without Ray, for the process that is connected to it: replicas are names that behave as they say."""

import asyncio
import os
from pathlib import Path
from typing import Any

from joulery.adapters.engines.ray_serve.cluster import ReplicaGoneError
from joulery.domain.errors import ActuationError, CapabilityError, InfeasibleError


class Unreadable:
    """Can be pickled in the process that has it, and read nowhere."""

    def __reduce__(self) -> Any:
        return (_fail_to_read, ())


def _fail_to_read() -> None:
    raise ValueError("it cannot be read")


def _fail_twice(file: Path) -> None:
    """Fail unless the file has two lines of earlier attempts."""
    before = file.read_text() if file.exists() else ""
    file.write_text(f"{before}{os.getpid()}\n")
    if before.count("\n") < 2:
        raise CapabilityError("the current node timed out during startup", resource="ray")


class FakeCluster:
    """Has the methods of a cluster; its replicas answer their own tensors."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.declared: dict[str, Any] = {}

    async def open(self) -> None:
        if "tries" in self.place.environ:
            _fail_twice(Path(self.place.environ["tries"]))
        if self.place.address == "nowhere":
            raise CapabilityError("the Ray cluster at 'nowhere' is not reachable", resource="ray", grant="start it")

    async def declare(self, applications: Any) -> None:
        self.declared = {one["name"]: one for one in applications}

    async def applications(self) -> dict[str, Any]:
        return {name: {"status": "RUNNING"} for name in self.declared}

    async def scale(self, application: str, deployment: str, replicas: int) -> None:
        raise ActuationError(f"the dashboard answers 500: {application}, {deployment}, {replicas}")

    async def describe(self, application: str) -> list[dict[str, Any]]:
        plan = self.declared[application]["deployments"][0]["user_config"]["plan"]
        known = {"inputs": [], "outputs": [], "platform": "fake", "note": "", "failed": {}, "served": 0}
        return [
            {
                **known,
                "id": f"{rank} {os.getpid()}",
                "rank": rank,
                "pid": os.getpid(),
                "entry": entry,
                "startup_cpu_s": 0.0,
            }
            for rank, entry in enumerate(plan)
        ]

    async def infer(self, application: str, replica: str, request: Any, call: str = "") -> dict[str, Any]:
        if replica == "gone":
            raise ReplicaGoneError("RayActorError")
        if replica == "defect":
            return {"y": 1 / 0}
        if replica == "cannot be sent":
            return {"y": lambda: 0}
        if replica == "cannot be read":
            return {"y": Unreadable()}
        if replica == "infeasible":
            raise InfeasibleError("no room", binding="memory")
        stuck = request.inputs.get("stuck")
        if stuck is not None and int(stuck[0]) == os.getpid():
            await asyncio.Event().wait()
        return {"variant": "v", "s": 0.0, "c": 0.0, "y": {**request.inputs, "pid": os.getpid()}}

    async def nodes(self, meter: str, options: Any) -> dict[str, Any]:
        return {"10.0.0.1": {"meter": meter, "options": options}}

    async def close(self) -> None:
        return None


class NoCluster(FakeCluster):
    """One that is not there any more."""

    async def open(self) -> None:
        raise CapabilityError("the Ray cluster is not reachable", resource="ray", grant="start it")
