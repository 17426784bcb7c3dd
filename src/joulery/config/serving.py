"""``serving``: where the gateway listens and how it protects itself."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from joulery.config.carbon import CarbonConfig
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import Bytes, Seconds, SecondsOrZero
from joulery.config.parsing.section import InputFile, Name, OutputPath, Section, Text


def _check_address(value: str) -> str:
    split_address(value)
    return value


def _check_token(value: SecretStr) -> SecretStr:
    if len(value.get_secret_value()) < 8:
        raise problem("a token needs at least 8 characters", got="")
    return value


def split_address(value: str) -> tuple[str, int]:
    """Host and port of ``host:port``, ``[v6]:port`` or ``:port`` (loopback).

    Raises:
        PydanticCustomError: Not such an address, or a port outside 0 to 65535.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise problem("is not an address", expected="host:port such as 127.0.0.1:8080, port 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or not host.isprintable() or " " in host:
        raise problem("is not an address", expected="host:port, an IPv6 host in brackets: [::1]:8080")
    return host or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """True when only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class EmbeddedEngine(Section):
    """Replicas as worker processes of this machine, started and watched by joulery."""

    kind: Literal["embedded"]


class RayNodeConfig(Section):
    """A node of the Ray cluster: its cores or GPUs for replicas, and the grid that it is on."""

    name: Name
    """Its name in reports."""
    address: Text
    """Its address as Ray knows it (``ray list nodes``, or ray start --node-ip-address), such as 10.0.0.2."""
    cores: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Cores that replicas may use there; a node has cores or gpus."""
    gpus: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs that replicas may use there, each a whole one; those of ray start --num-gpus when left out."""
    carbon: CarbonConfig | None = None
    """Carbon intensity of its grid; the site's carbon when left out."""
    sleep: tuple[Text, ...] | None = None
    """Command that sends the node to sleep while no replica is on it, such as [ssh, south, sudo systemctl suspend]."""
    wake: tuple[Text, ...] | None = None
    """Command that wakes it and has it join the cluster again; it may be given to a node that is awake."""
    sleep_after_s: Seconds = Field(alias="sleep_after", default=300.0)
    """For how long no replica must have been on it before it sleeps."""
    wakes_in_s: Seconds = Field(alias="wakes_in", default=120.0)
    """Time from the command under wake until Ray has the node again."""

    @property
    def units(self) -> int:
        """Cores, or GPUs."""
        return self.cores or self.gpus or 0

    @model_validator(mode="after")
    def _has_cores_or_gpus(self) -> RayNodeConfig:
        if (self.cores is None) == (self.gpus is None):
            raise problem("has either cores or gpus for replicas", expected="cores: 4, or gpus: 2", at=("cores",))
        return self

    @model_validator(mode="after")
    def _sleeps_and_wakes(self) -> RayNodeConfig:
        if (self.sleep is None) != (self.wake is None):
            missing = "wake" if self.wake is None else "sleep"
            raise problem(f"needs {missing} too: a node that sleeps is woken", expected=f"{missing}: [...]")
        for key in ("sleep", "wake"):
            if getattr(self, key) == ():
                raise problem("is a command, word by word", expected="such as [ssh, south, suspend]", at=(key,))
        given = {"sleep_after_s", "wakes_in_s"} & self.model_fields_set
        if given and self.sleep is None:
            raise problem("is of a node that sleeps", hint="give it sleep and wake", at=(given.pop()[:-2],))
        return self


class RayEngine(Section):
    """Replicas on Ray Serve (``pip install 'joulery[ray]'``), with joulery's queue and gateway in front."""

    kind: Literal["ray"]
    address: Text = "local"
    """local starts a cluster on this machine; otherwise what ray.init takes, such as auto or ray://host:10001."""
    dashboard: Text | None = None
    """URL of the cluster's dashboard, such as http://host:8265; not needed for local."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs a local cluster counts; all of this machine when left out."""
    claim_ratio: Annotated[float, Field(gt=0, le=1)] = Field(alias="claim", default=0.5)
    """CPUs that a replica reserves in Ray for each core; above 0.5 old and new replicas may not fit side by side."""

    direct: bool | None = None
    """Whether requests go to replicas on connections of joulery's own, not through Ray's handle; unencrypted, as Ray's
    own traffic, and only who has a replica's token is answered. Left out: over loopback, to replicas on joulery's own
    machine. With true, replicas of a cluster elsewhere listen at their node's address. With false, or where a replica
    cannot be reached, its requests pass through Ray's handle."""
    nodes: tuple[RayNodeConfig, ...] = ()
    """Nodes that replicas are placed on, each metered, with its grid; requests go to the cleaner grid first. When left
    out, Ray places replicas, and the nodes of a cluster elsewhere are metered without grams."""

    @model_validator(mode="after")
    def _nodes_differ(self) -> RayEngine:
        for key in ("name", "address"):
            values = [getattr(node, key) for node in self.nodes]
            for index, value in enumerate(values):
                if value in values[:index]:
                    raise problem("is listed twice; nodes differ", at=("nodes", index, key))
        return self

    @model_validator(mode="after")
    def _nodes_are_alike(self) -> RayEngine:
        if {node.gpus is None for node in self.nodes} == {True, False}:
            raise problem("have cores, or all of them GPUs", hint="a site file for each kind", at=("nodes",))
        return self

    @model_validator(mode="after")
    def _check_head_awake(self) -> RayEngine:
        head = self.address.removeprefix("ray://").rpartition(":")[0]
        for index, node in enumerate(self.nodes):
            if node.sleep is not None and node.address == head:
                raise problem("is of Ray's head, without which there is no cluster", at=("nodes", index, "sleep"))
        return self

    @model_validator(mode="after")
    def _check_dashboard(self) -> RayEngine:
        if self.address != "local" and self.dashboard is None:
            raise problem("a cluster elsewhere needs the URL of its dashboard", at=("dashboard",))
        return self


EngineConfig = Annotated[EmbeddedEngine | RayEngine, Field(discriminator="kind")]


class TlsConfig(Section):
    """Certificate and key of the gateway."""

    certificate: InputFile
    """PEM file: the certificate, and the chain up to a root behind it."""
    key: InputFile
    """PEM file of its private key, without a passphrase."""


class GatewaysConfig(Section):
    """Several gateway processes in front of one engine, with one controller."""

    count: Annotated[int, Field(ge=1, le=64)] = 2
    """Gateway processes on this machine; they share the port of serving.listen."""
    listen: tuple[Annotated[str, AfterValidator(_check_address)], ...] = ()
    """host:port of each gateway where they do not share one."""
    join: Annotated[str, AfterValidator(_check_address)] | None = None
    """host:port where gateways of other machines join (joulery gateway --join); none when left out."""
    join_token_file: InputFile | None = None
    """A file that holds the token of those gateways."""
    join_tls: TlsConfig | None = None
    """Encrypts what passes between those gateways and the engine server; unencrypted when left out."""
    state: Annotated[OutputPath, Field(strict=False)] = Field(default="joulery-gateways", validate_default=True)
    """Folder of what outlives the controller: the sockets and logs of the engine server and its gateways."""
    outlive_s: Seconds = Field(alias="outlive", default=86400.0)
    """Time that the gateways serve on without a controller, such as 12 h."""

    @model_validator(mode="after")
    def _fits(self) -> GatewaysConfig:
        if self.listen and "count" in self.model_fields_set and self.count != len(self.listen):
            raise problem(f"lists {len(self.listen)} addresses for {self.count} gateways", at=("listen",))
        if len(set(self.listen)) != len(self.listen):
            raise problem("lists an address twice", at=("listen",))
        if self.join is not None and self.join_token_file is None:
            raise problem("gateways of other machines need a token", hint="add join_token_file", at=("join",))
        if self.join is None and self.join_tls is not None:
            raise problem("has no effect without join", hint="add join: host:port", at=("join_tls",))
        return self


class ServingConfig(Section):
    """The gateway."""

    listen: Annotated[str, AfterValidator(_check_address)] = "127.0.0.1:8080"
    """host:port; port 0 takes a free one."""
    grpc: Annotated[str, AfterValidator(_check_address)] | None = None
    """host:port of the Open Inference Protocol over gRPC (pip install 'joulery[grpc]'); none when left out."""
    token: Annotated[SecretStr, AfterValidator(_check_token)] | None = None
    """Bearer token that every request must carry; better kept in a file: token_file."""
    token_file: InputFile | None = None
    """A file that holds the token."""
    open_monitoring: bool = False
    """Answer /metrics and /v2/health/ready without the token, for Prometheus and probes."""
    tls: TlsConfig | None = None
    """Serve HTTPS; plain HTTP when left out."""
    queue: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that may wait for one service; beyond it the answer is 429."""
    deadline_s: Seconds = Field(alias="deadline", default=30.0)
    """A request that waited longer is answered with 504, such as 2 s."""
    body_bytes: Annotated[Bytes, Field(ge=1024, le=2**40)] = Field(alias="body", default=float(16 << 20))
    """Longest request body, such as 64 MiB; beyond it the answer is 413."""
    drain_s: SecondsOrZero = Field(alias="drain", default=10.0)
    """Time that a stop waits for accepted requests."""
    engine: EngineConfig = Field(default_factory=lambda: EmbeddedEngine(kind="embedded"))
    """Engine that runs the replicas."""
    gateways: GatewaysConfig | None = None
    """Several gateways behind one controller; one, in the controller's process, when left out."""

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> ServingConfig:
        if self.token is not None and self.token_file is not None:
            raise problem("give token or token_file, not both", at=("token_file",))
        if self.token is None and self.token_file is None:
            shared = [("gateways", where) for where in (self.gateways.listen if self.gateways else ())]
            for key, where in (("listen", self.listen), ("grpc", self.grpc), *shared):
                if where is not None and not is_loopback(split_address(where)[0]):
                    hint = "add serving.token_file, or listen on 127.0.0.1"
                    raise problem("listening beyond this machine needs a token", hint=hint, at=(key,))
        if self.gateways is not None and self.grpc is not None:
            if self.gateways.listen:
                hint = "leave out gateways.listen: they share the ports of listen and grpc then"
                raise problem("gateways with addresses of their own share no port for gRPC", hint=hint, at=("grpc",))
            if split_address(self.grpc)[1] == 0:
                raise problem("several gateways share the port of gRPC", expected="a port above 0", at=("grpc",))
        return self

    @property
    def host(self) -> str:
        """The host to listen on."""
        return split_address(self.listen)[0]

    @property
    def port(self) -> int:
        """The port to listen on."""
        return split_address(self.listen)[1]
