"""A variant joins a service of the burst plant with assumed times: it may be much slower than planned."""

from dataclasses import replace

import numpy as np

from benchmarks._burst_controllers import PolicyController
from benchmarks._elastic_service import ElasticService, PlantSettings
from joulery.perf.blend import rescaled, stretched
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, layouts
from joulery.policies.serving.variants.changes import family_of
from tests.policies.serving.test_slo_first import MS, VARIANTS, arriving, policy, predictor

ENOUGH = 30
"""Live answers from which its times are known."""
SLICES = [cpu_slices(cut) for cut in core_partitions(2)]


class Joining(PolicyController):
    """The policy of a service that a fourth variant joins.

    Attributes:
        assumed_ms, true_ms: Its times on one core, as planned and as they are.
        first_share: Whether it answers a small share first; else it is planned with what is assumed.
        known_s: When its times were known; NaN while they are not.
    """

    def __init__(self, made, join_s, assumed_ms, true_ms, *, accuracy_ratio=0.78, first_share=True):
        super().__init__(made)
        self.join_s, self.assumed_ms, self.true_ms = join_s, assumed_ms, true_ms
        self.accuracy_ratio, self.first_share = accuracy_ratio, first_share
        self.joined, self.known_s, self.answers = False, np.nan, 0

    def decide(self, now_s, service):
        if now_s >= self.join_s and not self.joined:
            self.joined = True
            self._join(service)
        self.answers = sum(name == "third" for name in service._variant)
        if self.joined and np.isnan(self.known_s) and self._ended(service) >= ENOUGH:
            self.known_s = now_s
            self._plan(rescaled(self.predictor.profile, "third", self.true_ms / self.assumed_ms), assumed=False)
        super().decide(now_s, service)

    @property
    def predictor(self):
        return self.policy.search.predictor

    def _ended(self, service):
        pairs = zip(service._variant, service._end_s, strict=True)
        return sum(name == "third" and end_s < np.inf for name, end_s in pairs)

    def _join(self, service):
        """Replicas load it, which takes the plant no time: the change of layout is not what is studied."""
        ratio = self.assumed_ms / MS["large"]
        self._plan(stretched(self.predictor.profile, "third", "large", ratio), assumed=True)
        service.settings = replace(service.settings, loaded=(*VARIANTS, "third"))

    def _plan(self, profile, *, assumed):
        accuracy = {**self.predictor.accuracy_ratio, "third": self.accuracy_ratio}
        known = replace(self.predictor, profile=profile, accuracy_ratio=accuracy)
        names = VARIANTS if assumed and self.first_share else (*VARIANTS, "third")
        search = replace(self.policy.search, predictor=known, candidates=layouts(SLICES, names))
        family = family_of((*VARIANTS, "third"), ("third",) if assumed else ())
        self.policy = self._stepper.policy = replace(self.policy, search=search, family=family)


def joined(assumed_ms, true_ms, rate_rps=40.0, until_s=120.0, seed=0, join_s=30.0, **changes):
    """A calm service that a variant joins; what became of the requests, and the controller."""
    made = policy(rate_rps=rate_rps)
    made = replace(made, family=family_of(VARIANTS))
    controller = Joining(made, join_s, assumed_ms, true_ms, **changes)
    known = predictor()
    table = {(e.variant, e.slice): (e.loaded.service_s, e.loaded.cpu_s, e.active_w) for e in known.profile.entries}
    for (name, piece), (service_s, cpu_s, watts) in list(table.items()):
        if name == "large":
            ratio = true_ms / MS["large"]
            table["third", piece] = service_s * ratio, cpu_s * ratio, watts
    times = arriving(lambda _: rate_rps, until_s, seed)
    plant = PlantSettings(made.objectives.slo.latency_s, 0.0, VARIANTS)
    return ElasticService(table, times, plant, controller, seed).simulate(until_s + 5.0), controller
