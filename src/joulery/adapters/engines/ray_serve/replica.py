"""One replica of a Ray Serve deployment: loads the variant its rank calls for and answers one request at a time.

A deployment runs the instances of one service on slices of one size. Its ``user_config`` is a plan: which variant each
rank runs. A changed plan reaches every replica as ``reconfigure``: one with another variant loads the new model beside
the old, then swaps them, so that it answers all the time and its process stays. Ray imports this module on its nodes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from joulery.adapters.engines.embedded.models import LoadedModel, failure, load, warm_up
from joulery.adapters.engines.embedded.wire import Frame, pack_error
from joulery.adapters.engines.ray_serve.listener import LOOPBACK, NODE_ADDRESS, Listener
from joulery.domain.errors import JouleryError
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.tensors import Tensor

DEPLOYMENT = "Instances"
ONGOING = 16
"""Requests Ray may hand to a replica at once. One arrives at a time; a limit of 1 makes Ray poll and back off."""
_CALLERS = 8
"""Number of callers whose newest answer a replica keeps; there is one unless a gateway replaces another."""


def app(arguments: Mapping[str, Any]) -> Any:
    """Build the application for Ray: one deployment, configured from outside.

    Args:
        arguments: Not used.
    """
    from ray import serve

    return serve.deployment(name=DEPLOYMENT, max_ongoing_requests=ONGOING)(Instances).bind()


class Instances:
    """The replica, as a class that Ray Serve deploys."""

    def __init__(self) -> None:
        self._id = ""
        self._entry: dict[str, Any] = {}
        self._model: LoadedModel | None = None
        self._turn = threading.Lock()
        self._listener: Listener | None = None
        self._unheard = ""
        self._answered: dict[str, tuple[str, dict[str, Any]]] = {}
        self._startup_cpu_s = 0.0
        self._failed: dict[str, Any] = {}
        self._note = ""
        self._served = 0

    async def reconfigure(self, config: Mapping[str, Any], rank: Any) -> None:
        """Load the model that the plan has for this rank.

        Ray ends a replica when its ``reconfigure`` raises, and the service with it. A model that cannot be loaded is
        therefore reported by :meth:`describe`, and the former model continues to serve.
        """
        if config.get("direct") and self._listener is None:
            host = _own_address() if config["direct"] == NODE_ADDRESS else LOOPBACK
            try:
                self._listener, self._unheard = Listener(host, self._asked), ""
            except OSError as error:
                self._unheard = f"{host}: {error.strerror or error}"
        plan = config["plan"]
        place = int(rank.rank)
        if place >= len(plan) or plan[place] == self._entry:
            self._failed = {}
            return
        entry = plan[place]
        before_s = time.process_time()
        reference = ModelRef(ModelKind(entry["kind"]), entry["location"], entry["options"])
        try:
            model = await asyncio.to_thread(load, reference, entry["threads"])
        except JouleryError as error:
            self._failed = {"entry": entry, "error": pack_error(error)}
            return
        note = await asyncio.to_thread(warm_up, model)
        await asyncio.to_thread(self._swap, entry, model, note)
        self._startup_cpu_s = time.process_time() - before_s

    def _swap(self, entry: dict[str, Any], model: LoadedModel, note: str) -> None:
        """Answer with another model once the present request is done."""
        with self._turn:
            self._entry, self._model, self._note, self._failed = entry, model, note, {}

    def _own_id(self) -> str:
        if not self._id:
            from ray import serve

            self._id = str(serve.get_replica_context().replica_id.unique_id)
        return self._id

    async def describe(self) -> dict[str, Any]:
        """The present description of this replica."""
        from ray import serve

        context = serve.get_replica_context()
        model = self._model
        return {
            "id": self._own_id(),
            "rank": context.rank.rank,
            "pid": os.getpid(),
            "entry": self._entry,
            "inputs": [] if model is None else [tuple(spec) for spec in model.inputs],
            "outputs": [] if model is None else [tuple(spec) for spec in model.outputs],
            "platform": "" if model is None else model.platform,
            "note": self._note,
            "failed": self._failed,
            "served": self._served,
            "direct": None if self._listener is None else self._listener.place,
            "direct_refused": self._unheard,
            "node": _own_address(),
            "startup_cpu_s": self._startup_cpu_s,
        }

    def __del__(self) -> Any:
        """Wait until clients have closed their connections. Ray calls and awaits this once when it ends the replica."""
        listener, self._listener = self._listener, None
        return None if listener is None else asyncio.to_thread(listener.leave)

    async def infer(
        self, inputs: dict[str, Tensor], outputs: tuple[str, ...], variant: str, replica: str, call: str = ""
    ) -> dict[str, Any]:
        """Answer one request.

        Args:
            inputs: Arrays by name.
            outputs: Names wanted; empty for all.
            variant: The only one that may answer; empty for any.
            replica: Id of the replica that is meant, for the router; another one runs no model.
            call: The request's number, ``CALLER/NUMBER``; empty for none. A repeat of a caller's newest request gets
                the stored answer: no model runs twice for it.

        Returns:
            ``variant``, ``s`` and ``c`` (seconds and CPU seconds), and ``y`` (arrays by name) or ``e`` and ``o`` (error
            and outcome); ``moved`` and ``id`` (this replica's own) when no model ran, because another replica was meant
            or another variant.
        """
        self._own_id()
        return await asyncio.to_thread(self._one, inputs, outputs, variant, replica, call)

    def _asked(self, frame: Frame) -> dict[str, Any]:
        """Answer a request that arrived on one of joulery's own connections."""
        header = frame.header
        outputs, call = tuple(header.get("w", ())), str(header.get("n", ""))
        return self._one(frame.tensors, outputs, str(header["v"]), str(header["id"]), call)

    def _one(
        self, inputs: dict[str, Tensor], outputs: tuple[str, ...], variant: str, replica: str, call: str
    ) -> dict[str, Any]:
        caller = call.partition("/")[0]
        with self._turn:
            newest, answer = self._answered.get(caller, ("", {}))
            if call and newest == call:
                return answer
            model, here = self._model, str(self._entry.get("variant", ""))
            if model is None or (variant and variant != here) or replica != self._id:
                return {"variant": here, "s": 0.0, "c": 0.0, "moved": True, "id": self._id}
            self._served += 1
            answer = {"variant": here, **_answer(model, inputs, outputs)}
            if call:
                self._answered.pop(caller, None)
                self._answered[caller] = (call, answer)
                if len(self._answered) > _CALLERS:
                    del self._answered[next(iter(self._answered))]
            return answer


def _own_address() -> str:
    """The address of this node, as Ray knows it."""
    import ray

    return str(ray.util.get_node_ip_address())


def _answer(model: LoadedModel, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> dict[str, Any]:
    import numpy

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    answer: dict[str, Any]
    try:
        results = model.run(inputs, outputs)
        answer = {"y": {str(name): numpy.asarray(value) for name, value in results.items()}}
    except Exception as error:  # noqa: BLE001 - an error of the model is the client's answer; the replica goes on
        message, outcome = failure(error)
        answer = {"e": message, "o": outcome.value}
    return {**answer, "s": time.perf_counter() - start_s, "c": time.process_time() - start_cpu_s}
