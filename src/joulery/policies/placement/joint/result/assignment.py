"""Assignment of instances and requests to each of several services that are alike."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.policies.placement.joint.divisions import ServiceDivision
from joulery.policies.placement.joint.master import Flow, JointSolution, KnownPattern
from joulery.policies.placement.joint.problem import JointProblem
from joulery.policies.placement.joint.result.planned_gpus import ChosenInstance, gpu_of
from joulery.policies.placement.master import add_row, new_model, run

_TINY = 1e-9
"""Part of a service's rate below which an instance gets nothing."""


class _Place(NamedTuple):
    """An instance of a pattern: indices of its GPU, its place on the GPU, its machine and its item."""

    gpu: int
    place: int
    machine: int
    item: int


class _Served(NamedTuple):
    """Service of an instance, its replica number, the number of replicas, and the requests a second it gets."""

    name: str
    replica: int
    replicas: int
    rate_rps: float


def assigned_gpus(
    problem: JointProblem,
    chosen: Sequence[tuple[KnownPattern, int]],
    whole: JointSolution,
    divisions: Sequence[ServiceDivision],
) -> tuple[PlannedGpu, ...]:
    """The GPUs of a solution in which services stand for several that are alike.

    Each service gets the instances of its division; instances that no division needs go to the services in turn. Its
    requests go where they take the fewest joules, within its floor; an instance without requests is left out.
    """
    gpus = [known for known, count in chosen for _ in range(count)]
    free: dict[int, deque[_Place]] = defaultdict(deque)
    for at, known in enumerate(gpus):
        for place, item in enumerate(known.layout.pattern):
            free[item].append(_Place(at, place, known.machine, item))
    served: dict[tuple[int, int], _Served] = {}
    for service, kind in enumerate(problem.services):
        if kind.count == 1:
            mine = [each for item in sorted(free) if problem.items[item].service == service for each in free[item]]
            _serve_one(problem, service, kind.workload.id, mine, served, _ratios(problem, whole, mine))
        else:
            _serve_alike(problem, service, free, whole, divisions, served)
    found = [_gpu(problem, known, at, served) for at, known in enumerate(gpus)]
    return tuple(gpu for gpu in found if gpu is not None)


def _serve_alike(
    problem: JointProblem,
    service: int,
    free: dict[int, deque[_Place]],
    whole: JointSolution,
    divisions: Sequence[ServiceDivision],
    served: dict[tuple[int, int], _Served],
) -> None:
    """Assign instances to each of several services; changes ``free`` and ``served``."""
    names = problem.services[service].names
    chosen = [divisions[at] for at, n in sorted(whole.divisions.items()) for _ in range(n)]
    chosen = [division for division in chosen if division.service == service][: len(names)]
    places = [[free[item].popleft() for item in division.items] for division in chosen]
    over = [each for item in sorted(free) if problem.items[item].service == service for each in free.pop(item)]
    for at, each in enumerate(over):
        places[at % len(places)].append(each)
    ratios: dict[tuple[tuple[int, int], ...], tuple[float, ...]] = {}
    for name, mine in zip(names, places, strict=True):
        key = tuple((each.machine, each.item) for each in mine)
        if key not in ratios:
            ratios[key] = _flows(problem, service, mine)
        _serve_one(problem, service, name, mine, served, ratios[key])


def _serve_one(
    problem: JointProblem,
    service: int,
    name: str,
    mine: Sequence[_Place],
    served: dict[tuple[int, int], _Served],
    parts: Sequence[float],
) -> None:
    """Store the requests of each instance of a service in ``served``: ``parts`` of the service's rate."""
    rate_rps = problem.services[service].workload.rate_rps
    getting = [(each, part) for each, part in zip(mine, parts, strict=True) if part > _TINY]
    for number, (each, part) in enumerate(getting):
        served[each.gpu, each.place] = _Served(name, number, len(getting), part * rate_rps)


def _ratios(problem: JointProblem, whole: JointSolution, mine: Sequence[_Place]) -> list[float]:
    """Part of a service's rate that each instance gets: flows, spread by the rates that instances are provided for."""

    def flow(each: _Place) -> Flow:
        item = problem.items[each.item]
        return Flow(item.service, item.variant, each.machine)

    provided: dict[Flow, float] = defaultdict(float)
    for each in mine:
        provided[flow(each)] += problem.items[each.item].rate_rps
    return [
        problem.items[each.item].part * min(1.0, whole.flows.get(flow(each), 0.0) / provided[flow(each)])
        for each in mine
    ]


def _flows(problem: JointProblem, service: int, mine: Sequence[_Place]) -> tuple[float, ...]:
    """Parts of one service's rate that each of its instances gets: the fewest joules within the floor."""
    items = [problem.items[each.item] for each in mine]
    joules = [float(problem.request_j[each.machine, each.item]) for each in mine]
    model, columns = new_model(), list(range(len(mine)))
    for item, cost in zip(items, joules, strict=True):
        model.addCol(cost, 0.0, item.part, 0, np.zeros(0, np.int32), np.zeros(0))
    add_row(model, 1.0, model.inf, columns, [1.0] * len(mine))
    if problem.services[service].floor_ratio > 0:
        add_row(model, 0.0, model.inf, columns, [problem.gain(item) for item in items])
    run(model)
    found = np.array(model.getSolution().col_value, np.float64)
    return tuple(found.tolist()) if len(found) else tuple(item.part for item in items)


def _gpu(
    problem: JointProblem, known: KnownPattern, at: int, served: dict[tuple[int, int], _Served]
) -> PlannedGpu | None:
    """One GPU; None where it gets no requests."""
    layout = problem.packings[known.machine].tightest(known.layout.pattern) or known.layout
    placed = []
    for place, (index, option, units) in enumerate(zip(layout.pattern, layout.options, layout.units, strict=True)):
        mine = served.get((at, place))
        if mine is None:
            continue
        item, one = problem.items[index], option.process
        rate_rps = min(mine.rate_rps, item.rate_rps)
        placed.append(
            ChosenInstance(
                item.service,
                item.variant,
                units,
                one.batch,
                one.limit_ms,
                item.rate_rps,
                rate_rps,
                mine.replica,
                mine.replicas,
                mine.name,
            )
        )
    return gpu_of(problem, known.machine, placed) if placed else None
