"""The variants of a service that run on this machine, beside others on upstream servers.

This machine acts as one more server of the service: replicas on its cores keep all variants of this machine loaded, and
a request that the service sends here names the variant that answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from joulery.domain.errors import ConfigError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
)
from joulery.domain.serving.service import Slice, SliceKind

Cores = Mapping[str, tuple[tuple[int, ...], ...]]
"""The CPU cores of each replica, by service."""


class LocalVariants:
    """The variants of services that run on this machine.

    Args:
        engine: Engine that runs only these variants.
        cores: The CPU cores of each replica of a service.
    """

    def __init__(self, engine: Engine, cores: Cores) -> None:
        self._engine, self._cores = engine, cores
        self._models: dict[str, dict[str, ModelRef]] = {}

    def has(self, service: str, variant: str) -> bool:
        """Whether a variant of a service runs here."""
        return variant in self._models.get(service, {})

    @property
    def models(self) -> frozenset[tuple[str, str, ModelRef]]:
        """Service, variant and model of all that run here."""
        return frozenset((service, name, ref) for service, known in self._models.items() for name, ref in known.items())

    def view(self, service: str, variant: str) -> ReplicaView | None:
        """A replica that keeps a variant loaded, a ready one if possible; None where there is none."""
        views = [
            view
            for view in self._engine.replicas()
            if view.spec.service == service and variant in (view.spec.variant, *view.warm)
        ]
        return min(views, key=lambda view: view.state is not ReplicaState.READY, default=None)

    def is_up(self, service: str, variant: str) -> bool:
        """Whether a replica can answer with a variant now."""
        found = self.view(service, variant)
        return found is not None and found.state is ReplicaState.READY

    async def apply(self, models: Iterable[tuple[str, str, ModelRef]]) -> float:
        """Keep these variants of these services loaded, and no others; return the CPU seconds spent.

        Raises:
            JouleryError: A variant cannot be loaded; the former ones stay.
        """
        wanted: dict[str, dict[str, ModelRef]] = {}
        for service, name, model in sorted(models):
            if not self._cores.get(service):
                raise ConfigError(f"{service}/{name} is a model of this machine", got=model.location)
            wanted.setdefault(service, {})[name] = model
        if wanted == self._models:
            return 0.0
        specs = [
            ReplicaSpec(
                service,
                next(iter(loaded)),
                Slice(SliceKind.CPU, cores=len(cores)),
                next(iter(loaded.values())),
                cores=cores,
                warm=tuple(loaded.items())[1:],
            )
            for service, loaded in wanted.items()
            for cores in self._cores[service]
        ]
        change = await self._engine.apply(specs)
        self._models = wanted
        return change.startup_cpu_s

    async def infer(self, service: str, request: InferRequest) -> InferResponse:
        """The answer of the variant that a request names; ``cpu_s`` are CPU seconds of this machine.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        start_s = asyncio.get_running_loop().time()
        try:
            answer = await self._engine.infer(service, request)
        except RequestError as error:
            if error.outcome is not Outcome.UNKNOWN:
                raise
            # The service knows the variant: its replicas change at this moment.
            raise RequestError(str(error), Outcome.UNAVAILABLE, variant=request.variant) from error
        return answer._replace(service_s=asyncio.get_running_loop().time() - start_s)

    async def close(self) -> None:
        """End the replicas."""
        await self._engine.close()
