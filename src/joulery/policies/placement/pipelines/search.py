"""Placement of models on groups: simulator-guided greedy and beam search (AlpaServe, OSDI'23, section 4.2, Alg. 1, 2).

The greedy simulates, adds the model with most unserved requests to the group that serves least and has the memory, and
repeats. The beam tries every addition and keeps the best few. The score is the share of requests answered in time, then
a low latency, then replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.domain.errors import InfeasibleError
from joulery.perf.queues.pipeline_queue import (
    PipelineOutcome,
    PipelineWorkload,
    Routes,
    goodput_by_model,
    score_candidates,
    serve_pipelines,
)
from joulery.policies.placement.pipelines.device_groups import Grouping, Shape


@dataclass(frozen=True, slots=True, eq=False)
class ShapeTable:
    """Time and memory of every model in groups of one shape.

    Attributes:
        stage_s: Time of each stage, float64[models, stages]; infinite where the model cannot run in this shape.
        memory_bytes: Memory each device of a stage needs, float64[models, stages].
    """

    stage_s: FloatArray
    memory_bytes: FloatArray


@dataclass(frozen=True, slots=True)
class Overheads:
    """Overheads of the recursion on top of the stages (AlpaServe's calibration by default).

    Attributes:
        stage_ratio: Relative slowdown of each stage for every stage of the pipeline.
        request_s: Time outside the devices.
    """

    stage_ratio: float = 0.009
    request_s: float = 0.011


@dataclass(frozen=True, slots=True, eq=False)
class Hosting:
    """Assignment of models to groups.

    Attributes:
        grouping: The groups.
        hosts: Whether each group hosts each model, bool[groups, models].
    """

    grouping: Grouping
    hosts: BoolArray

    @property
    def replicas(self) -> int:
        """Copies of models in all."""
        return int(self.hosts.sum())

    def groups_of(self, model: int) -> list[int]:
        """Groups that host a model."""
        return [int(group) for group in np.flatnonzero(self.hosts[:, model])]


@dataclass(frozen=True, slots=True, eq=False)
class FoundPipelines:
    """Result of a search.

    Attributes:
        hosting: The placement.
        score: AlpaServe's score.
        goodput_ratio: Share of requests answered in time.
        simulated_requests: Requests simulated on the way.
    """

    hosting: Hosting
    score: float
    goodput_ratio: float
    simulated_requests: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacementSearch:
    """A search over placements.

    Attributes:
        tables: Time and memory of the models, by shape.
        workload: The requests to serve.
        memory_bytes: Memory of a device for models.
        overheads: Overheads of the recursion on top of the stages.
    """

    tables: Mapping[Shape, ShapeTable]
    workload: PipelineWorkload
    memory_bytes: float
    overheads: Overheads = Overheads()

    @property
    def models(self) -> int:
        """Number of models."""
        return len(self.workload.slo_s)

    def best(self, groupings: Sequence[Grouping], *, beam: int = 0) -> FoundPipelines:
        """The first of :meth:`ranked`, with the requests that all of them simulated."""
        found = self.ranked(groupings, beam=beam)
        return replace(found[0], simulated_requests=sum(each.simulated_requests for each in found))

    def ranked(self, groupings: Sequence[Grouping], *, beam: int = 0) -> list[FoundPipelines]:
        """Placements on some groupings, best score first: greedy for each, then a beam on the best one if asked.

        Args:
            groupings: Divisions of the fleet into groups.
            beam: Width of the beam; 0 for none.

        Raises:
            InfeasibleError: No grouping can host any model.
        """
        found = sorted((self.greedy(grouping) for grouping in groupings), key=lambda each: -each.score)
        if not found or not found[0].hosting.replicas:
            raise InfeasibleError(
                "no model fits any group of the fleet",
                binding="memory",
                hint="use devices with more memory, or allow more stages or shards",
            )
        if beam:
            found = sorted((*found, self.beam(found[0].hosting.grouping, beam)), key=lambda each: -each.score)
        return found

    def greedy(self, grouping: Grouping) -> FoundPipelines:
        """Simulator-guided greedy on one grouping: the best placement that it visits."""
        hosting = self.empty(grouping)
        best = FoundPipelines(hosting, -1.0, 0.0, 0)
        simulated = 0
        while True:
            found, outcome = self._judge([hosting])
            simulated += len(self.workload)
            if found[0].score > best.score:
                best = found[0]
            following = self._most_unserved(hosting, outcome)
            if following is None:
                return replace(best, simulated_requests=simulated)
            hosting = following

    def beam(self, grouping: Grouping, width: int) -> FoundPipelines:
        """Beam search on one grouping: keeps the best ``width`` additions of each step; tries equal groups once."""
        front = [self.empty(grouping)]
        best = FoundPipelines(front[0], -1.0, 0.0, 0)
        simulated = 0
        while True:
            following: dict[bytes, Hosting] = {}
            for hosting in front:
                for each in self._additions(hosting):
                    following.setdefault(_alike(each), each)
            if not following:
                break
            found, _ = self._judge(list(following.values()))
            simulated += len(self.workload) * len(found)
            ranked = sorted(found, key=lambda each: -each.score)
            front = [each.hosting for each in ranked[:width]]
            if ranked[0].score <= best.score:
                break
            best = ranked[0]
        return replace(best, simulated_requests=simulated)

    def evaluate(self, hosting: Hosting) -> tuple[FoundPipelines, PipelineOutcome]:
        """Simulate one placement exactly."""
        found, outcome = self._judge([hosting], passes=None)
        return found[0], outcome

    def empty(self, grouping: Grouping) -> Hosting:
        """The placement in which no group hosts a model."""
        return Hosting(grouping, np.zeros((len(grouping.shapes), self.models), bool))

    def fits(self, hosting: Hosting, group: int, model: int) -> bool:
        """Whether a group can take a model it does not host: a shape it can run in, and memory for every stage."""
        table = self.tables[hosting.grouping.shapes[group]]
        if hosting.hosts[group, model] or not np.isfinite(table.stage_s[model]).all():
            return False
        used = table.memory_bytes[hosting.hosts[group]].sum(axis=0)
        return bool(np.all(used + table.memory_bytes[model] <= self.memory_bytes))

    def routes(self, hostings: Sequence[Hosting]) -> Routes:
        """The routes of placements on one grouping; a stage is one device of the recursion, whatever its shards."""
        shapes = hostings[0].grouping.shapes
        stages = max(shape.stages for shape in shapes)
        first = np.concatenate(([0], np.cumsum([shape.stages for shape in shapes])))
        most = max(1, *(int(each.hosts.sum(axis=0).max()) for each in hostings))
        device = np.full((len(hostings), self.models, most, stages), -1, np.int64)
        stage_s = np.zeros(device.shape)
        for at, hosting in enumerate(hostings):
            slot = np.zeros(self.models, np.int64)
            for group, shape in enumerate(shapes):
                hosted = np.flatnonzero(hosting.hosts[group])
                factor = 1.0 + self.overheads.stage_ratio * shape.stages
                device[at, hosted, slot[hosted], : shape.stages] = first[group] + np.arange(shape.stages)
                stage_s[at, hosted, slot[hosted], : shape.stages] = factor * self.tables[shape].stage_s[hosted]
                slot[hosted] += 1
        return Routes(stage_s, device, int(first[-1]))

    def _judge(
        self, hostings: Sequence[Hosting], passes: int | None = 1
    ) -> tuple[list[FoundPipelines], PipelineOutcome]:
        outcome = serve_pipelines(self.workload, self.routes(hostings), self.overheads.request_s, passes=passes)
        scores = score_candidates(outcome, [each.replicas for each in hostings])
        goodput = outcome.accepted.mean(axis=1) if len(self.workload) else np.ones(len(hostings))
        found = [
            FoundPipelines(hosting, float(score), float(ratio), len(self.workload))
            for hosting, score, ratio in zip(hostings, scores, goodput, strict=True)
        ]
        return found, outcome

    def _most_unserved(self, hosting: Hosting, outcome: PipelineOutcome) -> Hosting | None:
        """The next placement of the greedy: the most unserved model on the least serving group that takes it."""
        asked, answered = goodput_by_model(self.workload, outcome)
        unserved = asked - answered[0]
        served = self._served(hosting, outcome)
        for model in np.argsort(-unserved, kind="stable"):
            if unserved[model] <= 0:
                break
            for group in np.argsort(served, kind="stable"):
                if self.fits(hosting, int(group), int(model)):
                    return _added(hosting, int(group), int(model))
        return None

    def _served(self, hosting: Hosting, outcome: PipelineOutcome) -> FloatArray:
        """Requests each group answered, float64[groups]."""
        served = np.zeros(len(hosting.grouping.shapes))
        accepted, route = outcome.accepted[0], outcome.route[0]
        for model in range(self.models):
            groups = hosting.groups_of(model)
            taken = route[accepted & (self.workload.model == model)]
            if groups and len(taken):
                served[groups] += np.bincount(taken, minlength=len(groups))
        return served

    def _additions(self, hosting: Hosting) -> list[Hosting]:
        groups, models = hosting.hosts.shape
        return [
            _added(hosting, group, model)
            for model in range(models)
            for group in range(groups)
            if self.fits(hosting, group, model)
        ]


def _added(hosting: Hosting, group: int, model: int) -> Hosting:
    hosts = hosting.hosts.copy()
    hosts[group, model] = True
    return Hosting(hosting.grouping, hosts)


def _alike(hosting: Hosting) -> bytes:
    """A key that is equal for placements that differ only in the order of equal groups."""
    shapes = hosting.grouping.shapes
    rows = sorted((shape.stages, shape.shards, row.tobytes()) for shape, row in zip(shapes, hosting.hosts, strict=True))
    return b"".join(row for _, _, row in rows)
