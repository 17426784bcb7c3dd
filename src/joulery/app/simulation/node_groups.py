"""Groups of nodes of a training scenario: their definition, the jobs that may run on them, and their energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from joulery.app.simulation import ResultTable
from joulery.config.scenario import NodeGroupConfig, RecordedTrace, SyntheticTrace, TrainingScenario
from joulery.domain.arrays import IntArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.power.training_power import RTX3090_W, NodePower
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.node_groups import NodeGroup, groups_of
from joulery.sim.training.plant import Jobs
from joulery.tabular import csv_header, read_csv


def node_groups(scenario: TrainingScenario) -> tuple[NodeGroup, ...]:
    """The groups of a scenario's cluster; none where its nodes are all alike."""
    return tuple(_group(group) for group in scenario.cluster.groups)


def _group(config: NodeGroupConfig) -> NodeGroup:
    node = NodePower(
        gpus=config.gpus,
        waiting_gpu_w=max(config.idle_w, NodePower().waiting_gpu_w * (config.limit_w / RTX3090_W)),
        idle_gpu_w=config.idle_w,
        cpu_w=config.cpu_w,
        static_w=config.static_w * config.gpus,
        asleep_w=config.asleep_w * config.gpus,
    )
    partition = config.partition or ""
    return NodeGroup(config.type, config.nodes, node, config.limit_w, config.speed_ratio, partition)


def with_groups(
    jobs: Jobs, trace: SyntheticTrace | RecordedTrace, groups: Sequence[NodeGroup], streams: Streams
) -> Jobs:
    """Add to the jobs of a trace the groups on which each may run.

    Raises:
        ConfigError: Jobs name a GPU type that no group has, or shares of types exceed 1.
        DataError: A row of the file names such a type.
    """
    if not groups:
        if isinstance(trace, SyntheticTrace) and trace.gpu_types:
            raise ConfigError(
                "the cluster has no GPU types", pointer="trace.gpu_types", hint="name them in cluster.groups"
            )
        return jobs
    if isinstance(trace, SyntheticTrace):
        return replace(jobs, groups=_drawn(len(jobs), trace.gpu_types, groups, streams))
    return replace(jobs, groups=_recorded(trace.file, groups)[: len(jobs)])


def _drawn(n: int, shares: dict[str, float], groups: Sequence[NodeGroup], streams: Streams) -> IntArray:
    known = sorted({group.type for group in groups})
    for name in shares:
        if name not in known:
            raise ConfigError("no group has this GPU type", pointer="trace.gpu_types", got=name,
                              expected=", ".join(known))  # fmt: skip
    if (left := 1.0 - sum(shares.values())) < -1e-9:
        raise ConfigError("the shares of types exceed 100 %", pointer="trace.gpu_types", got=f"{100 * (1 - left):g} %")
    bits = np.array([groups_of(groups, name, "") for name in (*shares, "")], np.int64)
    weights = np.array([*shares.values(), max(0.0, left)])
    return bits[streams("gpu type").choice(len(bits), n, p=weights / weights.sum())]


def _recorded(file: Path, groups: Sequence[NodeGroup]) -> IntArray:
    header = csv_header(file)
    wanted = [name for name in ("gpu_type", "partition") if name in header]
    table = read_csv(file)
    places = [header.index(name) for name in wanted]
    known: dict[tuple[str, ...], int] = {}
    found = []
    for number, cells in table.lines:
        if not cells:
            continue
        key = tuple(cells[place].strip() if place < len(cells) else "" for place in places)
        if key not in known:
            named = dict(zip(wanted, key, strict=True))
            known[key] = groups_of(groups, named.get("gpu_type", ""), named.get("partition", ""))
            if not known[key]:
                description = " ".join(f"{name} {value!r}" for name, value in named.items())
                types = ", ".join(sorted({f"{group.type} in {group.partition or 'any partition'}" for group in groups}))
                raise DataError(f"no group of nodes has {description}; there are {types}", file=str(file), row=number)
        found.append(known[key])
    return np.array(found, np.int64)


def type_rows(run: TrainingRun) -> list[dict[str, Any]]:
    """Energy and carbon by GPU type, JSON-ready; nothing where the cluster has no types."""
    return [
        {
            "type": use.type,
            "gpus": use.gpus,
            "job_energy_kwh": use.job_j / JOULES_PER_KWH,
            "idle_energy_kwh": use.idle_j / JOULES_PER_KWH,
            "job_carbon_kg": use.job_kg,
            "idle_carbon_kg": use.idle_kg,
            "busy_ratio": use.gpu_s / (use.gpus * run.makespan_s) if run.makespan_s else 0.0,
        }
        for use in run.by_type
    ]


def type_table(rows: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> ResultTable:
    """Energy by GPU type of each policy.

    Args:
        rows: Each policy with its :func:`type_rows`, averaged over seeds.
    """
    columns = ("policy", "GPU type", "GPUs", "busy", "jobs\nMWh", "idle\nMWh", "CO2e\nkg")
    table = ResultTable(columns, left=("policy", "GPU type"))
    for policy, types in rows:
        for at, use in enumerate(types):
            grams = use["job_carbon_kg"] + use["idle_carbon_kg"]
            energies = (f"{use[key] / 1e3:.4g}" for key in ("job_energy_kwh", "idle_energy_kwh"))
            busy = f"{100 * use['busy_ratio']:.0f} %"
            table.add("" if at else policy, use["type"], str(use["gpus"]), busy, *energies, f"{grams:.4g}")
    return table


def mean_rows(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Average the rows of several seeds, type by type."""
    return [
        {key: float(np.mean([use[key] for use in same])) if key != "type" else same[0]["type"] for key in same[0]}
        | {"gpus": same[0]["gpus"]}
        for same in zip(*runs, strict=True)
    ]
