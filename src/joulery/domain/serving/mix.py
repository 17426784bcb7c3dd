"""Shares of requests for the variants that a replica keeps loaded, by the slack of the queue.

A policy decides on a :class:`VariantMix`; the engine and the simulator follow it request by request with
:class:`MixCounter`. Proteus (ASPLOS 2024) and SuperServe (NSDI 2025) scale accuracy by such a choice per request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from joulery.domain.errors import DataError

Weights = tuple[tuple[str, float], ...]
"""``((variant, share), …)``: each variant answers its share of the requests, the replica's own variant the rest."""


@dataclass(frozen=True, slots=True)
class MixStep:
    """Weights, and the queue up to which they hold.

    Attributes:
        rate_rps: Requests a second that the replicas serve with these weights.
        delay_s: They hold while the wait of the oldest queued request and the time to serve the whole queue at that
            rate sum to at most this.
        weights: The shares.
    """

    rate_rps: float
    delay_s: float
    weights: Weights = ()

    def holds(self, waiting: int, oldest_wait_s: float) -> bool:
        """Whether these weights hold for a queue."""
        return oldest_wait_s + waiting / self.rate_rps <= self.delay_s


@dataclass(frozen=True, slots=True)
class VariantMix:
    """The shares of requests that variants answer, by the slack of the queue.

    Attributes:
        steps: The first step that holds decides, the last one where none does. Without steps each replica's own
            variant answers.

    Raises:
        DataError: A rate is not positive, a delay is NaN, or shares are negative or sum to more than 1.
    """

    steps: tuple[MixStep, ...] = ()

    def __post_init__(self) -> None:
        for step in self.steps:
            shares = [share for _, share in step.weights]
            if any(not 0 <= share <= 1 for share in shares) or math.fsum(shares) > 1 + 1e-9:
                raise DataError(f"shares of requests are 0 to 1 and sum to at most 1, got {shares}")
            if not 0 < step.rate_rps < math.inf or math.isnan(step.delay_s):
                raise DataError(f"a step of a mix needs a rate above 0 and a delay, got {step}")

    def weights(self, waiting: int, oldest_wait_s: float) -> Weights:
        """The weights in force for a queue.

        Args:
            waiting: Requests that wait.
            oldest_wait_s: Seconds that the oldest of them has waited.
        """
        if not self.steps:
            return ()
        found = next((step for step in self.steps if step.holds(waiting, oldest_wait_s)), self.steps[-1])
        return found.weights

    @property
    def steady(self) -> Weights:
        """The weights while nothing waits."""
        return self.steps[0].weights if self.steps else ()

    def as_list(self) -> list[dict[str, Any]]:
        """The steps as a JSON-ready list."""
        return [
            {"rate_rps": step.rate_rps, "delay_s": step.delay_s, "weights": dict(step.weights)} for step in self.steps
        ]

    @classmethod
    def of(cls, steps: Iterable[Mapping[str, Any]]) -> VariantMix:
        """The inverse of :meth:`as_list`.

        Raises:
            DataError: The list is not a mix.
        """
        try:
            return cls(
                tuple(
                    MixStep(
                        float(step["rate_rps"]),
                        float(step["delay_s"]),
                        tuple((str(name), float(share)) for name, share in step["weights"].items()),
                    )
                    for step in steps
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a mix of variants: {error!r}") from error


OWN = VariantMix()
"""Every replica answers with its own variant."""


class MixCounter:
    """Chooses the variant of each request so that the shares of a mix are kept to within one request, or one batch.

    Attributes:
        mix: The mix in force; may be replaced between two requests.
    """

    def __init__(self, mix: VariantMix = OWN) -> None:
        self.mix = mix
        self._due: dict[str, float] = {}
        self._picked: tuple[Weights, str] = ((), "")

    def choose(self, own: str, warm: Collection[str], waiting: int, oldest_wait_s: float, requests: int = 1) -> str:
        """The variant that answers the next request, or the next batch.

        Args:
            own: The replica's own variant; it takes the share that no other has, or that is not loaded.
            warm: Variants that the replica keeps loaded beside its own.
            waiting: Requests that wait behind this one.
            oldest_wait_s: Seconds that the oldest of them has waited; 0 for none.
            requests: Number of requests in the batch.
        """
        variant = self.pick(own, warm, waiting, oldest_wait_s, requests)
        self.count(requests)
        return variant

    def pick(self, own: str, warm: Collection[str], waiting: int, oldest_wait_s: float, requests: int = 1) -> str:
        """Choose a variant without counting it, where the batch size depends on the variant. See :meth:`count`."""
        weights = self.mix.weights(waiting, oldest_wait_s)
        if not weights:
            self._picked = (), ""
            return own
        shares = {**dict(weights), "": _rest(weights)}
        due = self._due
        chosen = max(shares, key=lambda name: due.get(name, 0.0) + shares[name] * requests)
        self._picked = weights, chosen
        return chosen if chosen in warm else own

    def count(self, requests: int) -> None:
        """Count requests that are answered by the variant that was picked last."""
        weights, chosen = self._picked
        if not weights:
            return
        for name, share in (*weights, ("", _rest(weights))):
            self._due[name] = self._due.get(name, 0.0) + share * requests
        self._due[chosen] -= requests


def _rest(weights: Weights) -> float:
    """The share of each replica's own variant."""
    return max(0.0, 1.0 - sum(share for _, share in weights))


class ServiceMixes:
    """The mix of each service by name: the part of an engine that implements :class:`joulery.domain.ports.Steering`.

    A mix stays in force when its service ends and starts again.
    """

    def __init__(self) -> None:
        self._counters: dict[str, MixCounter] = {}
        self._next: dict[str, VariantMix] = {}

    def set_mix(self, service: str, mix: VariantMix, /) -> None:
        """Set the mix that divides a service's requests from the next one on; replicas do not change."""
        self._steering_of(service).mix = mix

    def mix(self, service: str, /) -> VariantMix:
        """The mix of a service that is in force."""
        return self._steering_of(service).mix

    def set_next_mixes(self, mixes: Mapping[str, VariantMix], /) -> None:
        """Set the mixes of services from the next change of the replicas on; they replace mixes set so before."""
        self._next = dict(mixes)

    def _turn_mixes(self) -> None:
        """Put the next mixes into force, when the replicas change."""
        for service, mix in self._next.items():
            self._steering_of(service).mix = mix
        self._next = {}

    def _steering_of(self, service: str) -> MixCounter:
        """The counter that chooses the variants of a service; always the same object for one name."""
        return self._counters.setdefault(service, MixCounter())
