"""A shared GPU with standbys: :mod:`joulery.policies.placement.standby` in virtual time.

The GPU need not behave as the planner thought; that is what standbys are for. When a standby takes over, the original
finishes the batch it executes and every later batch runs with the standby's share. The standby was loaded
beforehand, so nothing else is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError
from joulery.policies.placement.standby import (
    ACTIVATE_STANDBY,
    StandbyObservation,
    StandbyPolicy,
    StandbyState,
    Tail,
)
from joulery.sim.core.driver import Driver
from joulery.sim.placement.colocation import GpuRun, GpuSimulation, Tenant
from joulery.sim.placement.gpu import GpuTruth


@dataclass(frozen=True, slots=True)
class Shadowed:
    """What became of a watched GPU.

    Attributes:
        run: What happened on it.
        decisions: ``(t_s, decision)``, in order.
        switched_s: When each instance's standby took over; infinity where it did not.
    """

    run: GpuRun
    decisions: tuple[tuple[float, Decision], ...]
    switched_s: tuple[float, ...]


def serve_watched(
    truth: GpuTruth,
    tenants: Sequence[Tenant],
    policy: StandbyPolicy,
    begin_s: float,
    end_s: float,
    *,
    window_s: float = 1.0,
    period_s: float = 0.5,
) -> Shadowed:
    """Serve every request, the policy looking on.

    Args:
        truth: How the GPU behaves.
        tenants: Its instances, in the order of the policy's.
        policy: Watches them.
        begin_s, end_s: Energy and busy time count within; the policy looks until ``end_s``.
        window_s: How far back a latency counts.
        period_s: How often the policy looks.

    Raises:
        ConfigError: Tenants and the policy's instances are not equally many.
    """
    if len(tenants) != len(policy.instances):
        raise ConfigError(f"{len(tenants)} tenants and {len(policy.instances)} watched instances do not fit")
    gpu = GpuSimulation(truth, tenants, begin_s, end_s)
    switched = [math.inf] * len(tenants)
    index_of = {one.key: index for index, one in enumerate(policy.instances)}
    decided: list[tuple[float, Decision]] = []

    def observe(now_s: float) -> StandbyObservation:
        since_s = [-math.inf if math.isinf(at_s) else at_s for at_s in switched]
        tails = (
            _tail(one.key, one.quantile, gpu.latencies(index, now_s - window_s, since_s[index]))
            for index, one in enumerate(policy.instances)
        )
        return StandbyObservation(now_s, tuple(tails))

    def act(now_s: float, decision: Decision) -> None:
        decided.append((now_s, decision))
        if decision.kind == ACTIVATE_STANDBY:
            index = index_of[decision.target]
            gpu.tenants[index] = replace(gpu.tenants[index], share_ratio=policy.instances[index].standby_percent / 100)
            switched[index] = now_s

    Driver(gpu.kernel, "shadow", _Until(policy, end_s), observe, act, period_s=period_s, start_s=begin_s + period_s)
    return Shadowed(gpu.run(), tuple(decided), tuple(switched))


def _tail(key: str, quantile: float, latency_s: FloatArray) -> Tail:
    return Tail(key, float(np.quantile(latency_s, quantile)) if len(latency_s) else math.nan, len(latency_s))


@dataclass(frozen=True, slots=True)
class _Until:
    """A policy that has nothing more to do from some time on, so that the simulation ends."""

    policy: StandbyPolicy
    end_s: float

    def initial(self) -> StandbyState:
        return self.policy.initial()

    def step(self, state: StandbyState, observation: StandbyObservation, /) -> Step[StandbyState]:
        if observation.now_s >= self.end_s:
            return Step(state, (), math.inf)
        return self.policy.step(state, observation)
