"""``joulery rapl-helper``: open the counters and the socket as root, switch to another user, and answer requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from joulery.adapters.meters.rapl import POWERCAP, SOCKET, open_rapl
from joulery.adapters.meters.rapl_server import RaplServer, group_number, listening
from joulery.adapters.privileges import become
from joulery.domain.errors import CapabilityError
from joulery.runtime.schedule.polling import stopped_by_signals


@dataclass(frozen=True, slots=True)
class HelperConfig:
    """Settings of the helper.

    Attributes:
        listen: Path of its socket.
        group: The group whose members are answered.
        user: User to switch to once everything is open; empty to keep the present one.
        root: The powercap folder.
    """

    listen: Path = SOCKET
    group: str = "joulery"
    user: str = "65534"
    root: Path = POWERCAP


def run_rapl_helper(config: HelperConfig, say: Callable[[str], None], started: Callable[[int], None]) -> None:
    """Answer until a signal ends it.

    Args:
        config: Settings of the helper.
        say: Receives messages for the operator.
        started: Receives the number of counters once the helper listens.

    Raises:
        CapabilityError: There are no counters, they may not be read, or the socket cannot be made.
        ConfigError: No such group or user, or another helper listens.
    """
    group = group_number(config.group)
    try:
        meter = open_rapl(config.root, helper=None)
    except CapabilityError as error:
        if error.grant is None:
            raise
        raise CapabilityError(
            f"{error.message}; the helper must be started as root", resource=error.resource
        ) from error
    with closing(meter), listening(config.listen, group) as listener:
        server = RaplServer(meter, listener, group, say)
        if config.user:
            become(config.user)
        with stopped_by_signals() as stop:
            started(len(meter.channels))
            server.serve(stop)
