"""Workloads of a node and counters of inference engines: values that readers pass to the energy accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, order=True)
class NodeWorkload:
    """A group of processes that energy is attributed to.

    Attributes:
        kind: ``slurm`` (a job), ``pod`` (Kubernetes), ``container``, ``service`` (systemd), ``user`` (a login) or
            ``process`` (a command without a control group of its own); ``other`` and ``ended`` collect the rest.
        name: Job number, UID of the pod of Kubernetes, first 12 digits of the container, unit, user id, or command.
    """

    kind: str
    name: str


OTHER = NodeWorkload("other", "")
"""Workloads beyond the number that is exported by name."""
ENDED = NodeWorkload("ended", "")
"""Workloads that have ended: their joules stay in the sum."""


@dataclass(frozen=True, slots=True)
class WorkloadUse:
    """CPU time of workloads between two readings of a node.

    Attributes:
        cpu_s: CPU seconds by workload.
        workload_of: NodeWorkload of each living process.
        process_cpu_s: CPU seconds of each living process.
    """

    cpu_s: Mapping[NodeWorkload, float]
    workload_of: Mapping[int, NodeWorkload]
    process_cpu_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ModelCounters:
    """Counters of an engine for one model since the engine started.

    Attributes:
        requests: Requests answered.
        prompt_tokens, output_tokens: Tokens read and generated; NaN where the engine counts none.
        compute_s: Seconds the model computed; NaN where the engine does not count them.
    """

    requests: float
    prompt_tokens: float = math.nan
    output_tokens: float = math.nan
    compute_s: float = math.nan


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """One reading of an engine.

    Attributes:
        engine: ``vllm``, ``sglang``, ``triton`` or ``tensorrt-llm``.
        models: Counters by model.
        active: Requests that run or wait now; NaN where the engine does not report them.
        by_agent: Whether an agent of the node (Ray's) reports the counters, from a process that is not the engine's.
    """

    engine: str
    models: Mapping[str, ModelCounters] = field(default_factory=lambda: MappingProxyType({}))
    active: float = math.nan
    by_agent: bool = False
