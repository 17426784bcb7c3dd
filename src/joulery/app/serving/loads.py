"""What is sent to the services of a running site: started, ended, waited for, one load a service."""

from __future__ import annotations

import asyncio
from typing import Any

from joulery.app.serving.gateway_handle import GatewayHandle
from joulery.config.language import LanguageModelConfig
from joulery.config.loadgen import LLMLoad, LoadConfig
from joulery.config.site import Site
from joulery.runtime.serving.loading import Load, LoadResult, start_load, start_text_load
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import Session
from joulery.store.run.directory import SAMPLES

AnyLoad = LoadConfig | LLMLoad


def longest_s(site: Site) -> float | None:
    """How long the longest load of a site lasts; None where there is none."""
    loads = (*(site.load_of(service) for service in site.services), *(model.load for model in site.language_models))
    return max((load.duration_s for load in loads if load is not None), default=None)


def scaled(site: Site, duration_s: float | None) -> Site:
    """The site over another duration: its longest load lasts so long, and what the grid replays is fitted into it."""
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
            for name in ("services", "language_models")
        },
    }
    replay = getattr(site.carbon, "replay", None)
    if site.carbon is not None and replay is not None:
        shown = replay.model_copy(update={"lasts_s": replay.lasts_s * factor})
        changed["carbon"] = site.carbon.model_copy(update={"replay": shown})
    return site.model_copy(update=changed)


def text_key(model: str) -> str:
    """What the load of a language model is kept under; services may have the same names."""
    return f"language_models/{model}"


class Loads:
    """The loads of a session.

    Args:
        session: Whose services they go to.
        gate: The gateway they ask.
    """

    def __init__(self, session: Session, gate: GatewayHandle) -> None:
        self._session, self._gate = session, gate
        self._loads: dict[str, Load] = {}
        self._waiting: dict[str, asyncio.Task[LoadResult]] = {}
        self._alone = len(session.hosted) == 1

    def start(self, one: RunningService) -> None:
        """Start what is sent to a service, if anything is.

        Raises:
            JouleryError: The inputs do not fit, or cannot be read.
        """
        if one.load is None:
            return
        view = next(view for view in self._session.engine.replicas() if view.spec.service == one.name)
        load = start_load(
            one.load,
            rate_rps=one.rate_rps,
            service=one.name,
            specs=view.inputs,
            url=self._gate.server.url,
            token=self._gate.token,
            folder=self._session.writer.path,
            scratch=self._session.writer.path / SAMPLES,
            tag="" if self._alone else f"-{one.name}",
        )
        self._await(one.name, load)

    def start_llm(self, model: LanguageModelConfig) -> None:
        """Start what is sent to a language model, if anything is; its result is kept under :func:`text_key`.

        Raises:
            JouleryError: The prompts cannot be read.
        """
        if model.load is None:
            return
        folder = self._session.writer.path
        load = start_text_load(
            model.load,
            model=model.name,
            timeout_s=model.deadline_s,
            url=self._gate.server.url,
            token=self._gate.token,
            folder=folder,
            scratch=folder / SAMPLES,
        )
        self._await(text_key(model.name), load)

    def _await(self, key: str, load: Load) -> None:
        self._loads[key] = load
        self._waiting[key] = asyncio.create_task(load.wait(), name=f"load {key}")

    def end(self, name: str | None = None) -> None:
        """Ask the load of a service, or every load, to send nothing more."""
        for service, load in self._loads.items():
            if name in (None, service):
                load.end()

    async def outcomes(self) -> dict[str, LoadResult]:
        """What the clients saw, once all have ended, those too that were started meanwhile.

        Raises:
            ActuationError: One failed; it said why on standard error.
        """
        while pending := [task for task in self._waiting.values() if not task.done()]:
            await asyncio.wait(pending)
        return {name: task.result() for name, task in self._waiting.items()}
