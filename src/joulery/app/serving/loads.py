"""Load generators of a running site, one per service or language model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from joulery.app.profiling.inputs import inputs_for, prompts_from, read_arrivals
from joulery.app.serving.gateway_handle import AnyGateway
from joulery.config.loadgen import ConstantLoad, LLMLoad, LoadConfig, TraceLoad
from joulery.config.site import Site
from joulery.domain.serving.tensors import Tensor
from joulery.runtime.load import Load, LoadPlan, LoadResult, start
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import ServingSession
from joulery.store.files import disk_errors
from joulery.store.run.directory import SAMPLES

AnyLoad = LoadConfig | LLMLoad


def longest_s(site: Site) -> float | None:
    """Duration of the longest load of a site; None where there is none."""
    loads = (
        *(site.load_of(service) for service in site.services),
        *(model.load for model in site.language_models),
        *(family.load for family in site.language_families),
    )
    return max((load.duration_s for load in loads if load is not None), default=None)


def scaled(site: Site, duration_s: float | None) -> Site:
    """Scale the site's loads so that the longest has this duration; a replayed day of the grid is scaled too."""
    lasted_s = longest_s(site)
    if duration_s is None or lasted_s is None:
        return site
    factor = duration_s / lasted_s

    def stretched(load: AnyLoad | None) -> AnyLoad | None:
        return None if load is None else load.model_copy(update={"duration_s": load.duration_s * factor})

    changed: dict[str, Any] = {
        "load": stretched(site.load),
        **{
            name: tuple(one.model_copy(update={"load": stretched(one.load)}) for one in getattr(site, name))
            for name in ("services", "language_models", "language_families")
        },
    }
    replay = getattr(site.carbon, "replay", None)
    if site.carbon is not None and replay is not None:
        shown = replay.model_copy(update={"duration_s": replay.duration_s * factor})
        changed["carbon"] = site.carbon.model_copy(update={"replay": shown})
    return site.model_copy(update=changed)


def text_key(model: str) -> str:
    """The key of a language model's load; services may have the same names."""
    return f"language_models/{model}"


class Loads:
    """Starts, ends and awaits the loads of a session.

    Args:
        session: The session whose services receive the loads.
        gate: The gateway that receives the requests.
    """

    def __init__(self, session: ServingSession, gate: AnyGateway) -> None:
        self._session, self._gate = session, gate
        self._loads: dict[str, Load] = {}
        self._waiting: dict[str, asyncio.Task[LoadResult]] = {}
        self._alone = len(session.services) == 1
        tls = gate.server.tls
        self._certificate = None if tls is None else str(tls.certificate)

    def start(self, one: RunningService) -> None:
        """Start the load of a service, if it has one.

        Raises:
            JouleryError: The inputs do not fit, or cannot be read.
        """
        if one.load is None:
            return
        view = next(view for view in self._session.engine.replicas() if view.spec.service == one.name)
        tag = "" if self._alone else f"-{one.name}"
        folder = self._session.writer.path
        inputs = inputs_for(view.inputs, one.load.inputs, seed=one.load.seed)
        plan = LoadPlan(
            url=self._gate.server.url,
            certificate=self._certificate,
            service=one.name,
            inputs=str(_write_inputs(folder / SAMPLES / f"inputs{tag}.npz", inputs)),
            out=str(folder / f"client{tag}.parquet"),
            poisson=not isinstance(one.load, ConstantLoad),
            duration_s=one.load.duration_s,
            seed=one.load.seed,
            slo_s=one.setup.slo.latency_s,
            **self._arrivals(one.load, one.rate_rps, folder / SAMPLES / f"times{tag}.npy"),
        )
        self._begin(one.name, plan)

    def start_llm(self, name: str, load: LLMLoad | None, deadline_s: float) -> None:
        """Start the load of a language model or a family, if it has one; its result is kept under :func:`text_key`.

        Raises:
            JouleryError: The prompts cannot be read.
        """
        if load is None:
            return
        folder = self._session.writer.path
        prompts = folder / SAMPLES / f"prompts-{name}.json"
        with disk_errors(prompts):
            prompts.write_bytes(orjson.dumps(prompts_from(load.prompts)))
        plan = LoadPlan(
            url=self._gate.server.url,
            certificate=self._certificate,
            service=name,
            inputs=str(prompts),
            out=str(folder / f"client-text-{name}.parquet"),
            rate_rps=load.rate_rps,
            duration_s=load.duration_s,
            seed=load.seed,
            timeout_s=deadline_s,
            max_tokens=load.max_tokens,
        )
        self._begin(text_key(name), plan)

    def end(self, name: str | None = None) -> None:
        """Stop the load of a service, or every load, from sending further requests."""
        for service, load in self._loads.items():
            if name in (None, service):
                load.end()

    async def outcomes(self) -> dict[str, LoadResult]:
        """Wait until all loads have ended, also those started meanwhile, and return the clients' results.

        Raises:
            ActuationError: A load failed; the reason is on standard error.
        """
        while pending := [task for task in self._waiting.values() if not task.done()]:
            await asyncio.wait(pending)
        return {name: task.result() for name, task in self._waiting.items()}

    def _begin(self, key: str, plan: LoadPlan) -> None:
        self._loads[key] = load = Load(start(plan, self._gate.token))
        self._waiting[key] = asyncio.create_task(load.wait(), name=f"load {key}")

    @staticmethod
    def _arrivals(load: LoadConfig, rate_rps: float, times: Path) -> dict[str, Any]:
        """The rate of the load, or its file of recorded arrivals."""
        if not isinstance(load, TraceLoad):
            return {"rate_rps": load.rate_rps or rate_rps}
        with disk_errors(times):
            np.save(times, read_arrivals(load.path))
        return {"times": str(times)}


def _write_inputs(file: Path, inputs: Sequence[Mapping[str, Tensor]]) -> Path:
    """Write inputs by name, a row a request."""
    columns = {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}
    arrays: dict[str, Any] = {
        name: array.astype(np.bytes_) if array.dtype == object else array for name, array in columns.items()
    }
    with disk_errors(file):
        np.savez(file, **arrays)  # no option beside: numpy before 2.1 writes it as an array
    return file
