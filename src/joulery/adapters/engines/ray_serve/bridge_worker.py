"""The process that is connected to Ray for a gateway.

Started as ``python -m joulery.adapters.engines.ray_serve.bridge_worker FD PARENT MODULE:CLASS``. It reads pickled calls
``(number, method, arguments)`` from a socket that only its parent has, runs them concurrently, and answers
``(kind, value)`` under the call's number. The first call is ``open`` with the :class:`RayPlace`. It ends with the
socket, and the kernel ends it when its parent dies first; Ray ends it when the head stays away.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import socket
import sys
from contextlib import suppress
from typing import Any

from joulery.adapters.engines.embedded.wire import pack_error
from joulery.adapters.engines.embedded.worker import die_with
from joulery.adapters.engines.ray_serve.bridge import ANSWER, LENGTH
from joulery.adapters.engines.ray_serve.cluster import ReplicaGoneError
from joulery.domain.errors import ActuationError, JouleryError

HEAD_AWAY = ("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
"""Seconds after which Ray ends what is connected to a head that stays away; its own default is a minute."""


class _Bridge:
    def __init__(self, cluster: str, writer: asyncio.StreamWriter) -> None:
        module, _, name = cluster.partition(":")
        self.kind = getattr(importlib.import_module(module), name)
        self.cluster: Any = None
        self.writer = writer

    async def answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Make one call and send its result or its error."""
        kind, value = "value", None
        try:
            if method == "open":
                self.cluster = self.kind(*arguments)
                await self.cluster.open()
            else:
                value = await getattr(self.cluster, method)(*arguments)
        except ReplicaGoneError as error:
            kind, value = "gone", str(error)
        except ActuationError as error:
            kind, value = "actuation", str(error)
        except JouleryError as error:
            kind, value = "error", pack_error(error)
        except Exception as error:  # noqa: BLE001 - a defect of the child is an error of the call, and not of the gateway
            kind, value = "actuation", f"{type(error).__name__}: {error}"
        try:
            frame = pickle.dumps((kind, value), protocol=5)
        except Exception as error:  # noqa: BLE001 - what cannot be sent is an error of its call too
            frame = pickle.dumps(("actuation", f"an answer cannot be sent: {error!r}"), protocol=5)
        self.writer.writelines([ANSWER.pack(len(frame), number), frame])


async def serve(descriptor: int, cluster: str) -> None:
    """Make calls until the socket ends."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    bridge, running = _Bridge(cluster, writer), set()
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            call = asyncio.create_task(bridge.answer(*pickle.loads(await reader.readexactly(length))))
            running.add(call)
            call.add_done_callback(running.discard)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    os.environ.setdefault(*HEAD_AWAY)
    asyncio.run(serve(int(sys.argv[1]), sys.argv[3]))
