"""Create the gRPC server of a gateway."""

from __future__ import annotations

import os

from joulery.gateway.access import address
from joulery.gateway.app import Gateway
from joulery.gateway.server import BesideServer
from joulery.gateway.tls import TlsFiles


def grpc_server(
    gateway: Gateway,
    where: str | None,
    *,
    token: str | None,
    tls: TlsFiles | None,
    drain_s: float,
    joined: bool = False,
    shared_port: bool = False,
) -> BesideServer | None:
    """Create the gRPC server of a gateway; None where no address is given.

    Args:
        gateway: The gateway that answers requests.
        where: ``HOST:PORT``; port 0 takes a free one.
        token: Bearer token that a request must carry; None for none.
        tls: Certificate and key; None for plain text.
        drain_s: How long a stop waits for running requests.
        joined: Whether the gateway is one of several.
        shared_port: Whether other gateways listen on the same port.

    Raises:
        ConfigError: ``where`` is not an address, or one reachable from other machines without a token.
        ModuleNotFoundError: The extra ``grpc`` is not installed.
    """
    if where is None:
        return None
    # grpcio writes to stderr what is raised as an error as well.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from joulery.gateway.grpc_api.server import GrpcServer

    host, port = address(where, "grpc")
    return GrpcServer(
        gateway, host, port, token=token, tls=tls, drain_s=drain_s, joined=joined, shared_port=shared_port
    )
