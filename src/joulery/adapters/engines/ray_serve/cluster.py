"""Connection to a Ray cluster: starts or joins the cluster, and declares its Serve applications over its REST API.

A declaration replaces all earlier ones; applications that are not joulery's are declared again as they were. Declared
changes of ``user_config`` and ``num_replicas`` keep the running processes; ``serve.run`` would restart all of them.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.serving.engine import InferRequest
from joulery.user import home_folder

OURS = "joulery."
"""Prefix of the names of joulery's applications."""
_DESCRIBE_S = 5.0
"""Time limit for replicas to describe themselves."""
_METER_S = 20.0
"""Time limit for the meter of a node to start and answer."""
_OBJECT_STORE_BYTES = 200 << 20
_REST = "/api/serve/applications/"
_NO_PROXIES = "Disabled"
_RAY_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Replicas at nice 15, as Ray would have them, lose against everything else that runs.
    "RAY_worker_niceness": "0",
    # A busy machine needs more than Ray's minute to start the dashboard, and a cluster without one is none.
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
}
"""Values of Ray's environment variables where the environment does not set them."""


@dataclass(frozen=True, slots=True)
class RayPlace:
    """Location of a Ray cluster.

    Attributes:
        address: ``local`` starts a cluster on this machine that ends with the engine; otherwise what ``ray.init`` takes
            (``auto``, ``ray://host:10001``).
        dashboard: URL of its dashboard, for the REST API; for ``local`` found by itself.
        cpus: CPUs a local cluster counts; None for all of this machine.
        temp_dir: Where a local cluster keeps sessions and logs; empty for Ray's own (``/tmp/ray``).
        environ: Variables for the replicas.
    """

    address: str = "local"
    dashboard: str = ""
    cpus: int | None = None
    temp_dir: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether the cluster is started and ended here."""
        return self.address == "local"


class ReplicaGoneError(Exception):
    """A replica ended, or Ray cannot reach it; the message is Ray's name for the error."""


class RayCluster:
    """A connection to a Ray cluster. Opens nothing before :meth:`open`.

    Args:
        place: Where Ray runs.
    """

    def __init__(self, place: RayPlace) -> None:
        self.place = place
        self._serve: Any = None
        self._ray: Any = None
        self._client: httpx.AsyncClient | None = None
        self._handles: dict[str, Any] = {}
        self._meters: dict[str, Any] = {}

    async def open(self) -> None:
        """Start or join the cluster, once; a local one takes about ten seconds.

        Raises:
            CapabilityError: Ray is not installed, or its cluster is not reachable.
            ConfigError: A cluster elsewhere was named without its dashboard.
        """
        if self._client is not None:
            return
        if not self.place.local and not self.place.dashboard:
            raise ConfigError(
                "a Ray cluster needs the URL of its dashboard", pointer="dashboard", expected="http://host:8265"
            )
        url = await asyncio.to_thread(self._start)
        token = _token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=30.0, trust_env=False)

    async def declare(self, applications: Sequence[Mapping[str, Any]]) -> None:
        """Declare joulery's applications, in place of those declared before.

        Raises:
            ActuationError: Ray refuses them, or does not answer.
        """
        serve = (await self._ask("GET", _REST)).json()
        theirs = [
            found["deployed_app_config"]
            for name, found in serve["applications"].items()
            if not name.startswith(OURS) and found.get("deployed_app_config")
        ]
        # A cluster's own proxies stay. Where Serve does not run yet, Ray would start one a node, at every address.
        location = serve.get("proxy_location") or _NO_PROXIES
        await self._ask("PUT", _REST, {"proxy_location": location, "applications": [*theirs, *applications]})
        for name in self._handles.keys() - {application["name"] for application in applications}:
            del self._handles[name]

    async def applications(self) -> dict[str, Any]:
        """Every application of Ray Serve, by name.

        Raises:
            ActuationError: Ray does not answer.
        """
        found: dict[str, Any] = (await self._ask("GET", _REST)).json()["applications"]
        return found

    async def scale(self, application: str, deployment: str, replicas: int) -> None:
        """Set the number of replicas of a deployment that leaves that to an external scaler.

        Raises:
            ActuationError: Ray refuses, or does not answer.
        """
        path = f"/api/v1/applications/{application}/deployments/{deployment}/scale"
        await self._ask("POST", path, {"target_num_replicas": replicas})

    async def describe(self, application: str) -> list[dict[str, Any]] | None:
        """The description of each replica of an application; None where one of them has just gone."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            asked = self._handle(application).broadcast("describe")
            found: list[dict[str, Any]] = await asked.results_async(timeout_s=_DESCRIBE_S)
        except (RayError, RayServeException, TimeoutError):
            return None
        return found

    async def infer(self, application: str, replica: str, request: InferRequest, call: str = "") -> dict[str, Any]:
        """The answer of one replica of an application; see :meth:`.replica.Instances.infer`.

        Raises:
            ReplicaGoneError: The replica ended, or Ray cannot reach it.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            answer: dict[str, Any] = await self._handle(application).infer.remote(
                dict(request.inputs), request.outputs, request.variant, replica=replica, call=call
            )
        except (RayError, RayServeException) as error:
            raise ReplicaGoneError(type(error).__name__) from error
        return answer

    async def nodes(self, meter: str, options: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """The answer of the meter on each living node, by the node's address.

        Args:
            meter: The class of the meters, ``module:class``; one is started on each node that has none.
            options: Its arguments.

        Returns:
            What its ``read`` returns; ``refusal`` where it cannot be started or does not answer, ``gone`` too where the
            node may be lost.
        """
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        self._meters = {node: actor for node, actor in self._meters.items() if node in alive}
        for node in alive.keys() - self._meters.keys():
            self._meters[node] = self._actor_on(node, meter, options)
        reads = [self._read(node, self._meters[node]) for node in alive]
        return dict(zip(alive.values(), await asyncio.gather(*reads), strict=True))

    def _actor_on(self, node: str, kind: str, options: Sequence[Any]) -> Any:
        """An actor on one node; it ends with this connection."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        module, _, name = kind.partition(":")
        actor = self._ray.remote(getattr(importlib.import_module(module), name))
        placed = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        environ = {"env_vars": dict(self.environ())}
        return actor.options(num_cpus=0, scheduling_strategy=placed, runtime_env=environ).remote(*options)

    async def _read(self, node: str, meter: Any) -> dict[str, Any]:
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(_METER_S):
                found: dict[str, Any] = await meter.read.remote()
        except RayError as error:
            if self._meters.get(node) is meter:  # another call may have started the next one
                del self._meters[node]
            return {"gone": True, "refusal": f"its meter ended: {type(error).__name__}"}
        except TimeoutError:
            return {"gone": True, "refusal": f"its meter did not answer within {_METER_S:g} s"}
        return found

    def _handle(self, application: str) -> Any:
        if application not in self._handles:
            self._handles[application] = self._serve.get_app_handle(application)
        return self._handles[application]

    async def close(self) -> None:
        """Disconnect from the cluster; a local one ends. Safe to call twice."""
        client, self._client = self._client, None
        if client is None:
            return
        await client.aclose()
        await asyncio.to_thread(self._stop)

    def environ(self) -> dict[str, str]:
        """Environment variables of the replicas; in a local cluster these import what this process can import."""
        here = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)} if self.place.local else {}
        return {**here, **self.place.environ}

    def _start(self) -> str:
        for name, value in _RAY_DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            import ray
            from ray import serve
        except ImportError as error:
            raise CapabilityError(
                "Ray Serve is not installed", resource="ray", grant="pip install 'joulery[ray]'"
            ) from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        place, port = self.place, _free_port()
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "joulery"}
        try:
            if place.local:
                ray.init(
                    address="local",
                    num_cpus=place.cpus,
                    include_dashboard=True,
                    dashboard_host="127.0.0.1",
                    dashboard_port=port,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    **({"_temp_dir": place.temp_dir} if place.temp_dir else {}),
                    **quiet,
                )
                serve.start(proxy_location=_NO_PROXIES)
            else:
                ray.init(address=place.address, **quiet)
        except Exception as error:  # bare ones too, with the end of a log in them
            raise CapabilityError(_refusal(place, error), resource="ray") from error
        self._ray, self._serve = ray, serve
        return f"http://127.0.0.1:{port}" if place.local else place.dashboard

    def _stop(self) -> None:
        if self.place.local:
            self._serve.shutdown()
        self._ray.shutdown()

    async def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        if self._client is None:
            raise ActuationError("the Ray cluster was left")
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ActuationError(f"Ray's dashboard at {self._client.base_url} does not answer: {error!r}") from error
        if response.is_error:
            raise ActuationError(f"Ray's dashboard answers {response.status_code}: {response.text[:500]}")
        return response


def _refusal(place: RayPlace, error: Exception) -> str:
    """Reason why there is no cluster: the first line of Ray's message, which names the log where there is more."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if place.local:
        return f"a Ray cluster cannot be started on this machine: {reason}"
    return f"the Ray cluster at {place.address!r} is not reachable: {reason}"


def _token() -> str:
    """Token for Ray's REST API, where Ray keeps it (docs.ray.io, token authentication); empty for none."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return ""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or home_folder() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
