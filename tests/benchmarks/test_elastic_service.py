"""The plant of burst studies against the queue that layouts are predicted with, and its own rules."""

import numpy as np
import pytest

from benchmarks._elastic_service import ElasticService, PlantSettings
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.mix import MixCounter, MixStep, VariantMix
from joulery.perf.queues.batched_pool import BatchInstance, serve_batches
from joulery.perf.queues.pull_queue import replay
from tests.policies.serving.test_slo_first import predictor

KNOWN = predictor()
TABLE = {
    (e.variant, e.slice): (np.sort(e.loaded.service_s), np.sort(e.loaded.cpu_s), e.active_w)
    for e in KNOWN.profile.entries
}
LARGE, SMALL = Layout.parse(["large on cpu:1"] * 2), Layout.parse(["small on cpu:1"] * 2)


class Script:
    """Does at each second what its script says."""

    def __init__(self, **script) -> None:
        self.script = {int(second.lstrip("at")): action for second, action in script.items()}

    def decide(self, now_s, service):
        if now_s in self.script:
            self.script[now_s](service)


def play(script, rate=90.0, until_s=20.0, batches=None, **settings):
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1.0 / rate, int(rate * until_s)))
    service = ElasticService(TABLE, arrivals, PlantSettings(0.1, **settings), script, seed=4, batches=batches or {})
    return service.simulate(until_s * 2), service


def test_one_layout_is_the_queue_that_layouts_are_predicted_with():
    outcome, service = play(Script(at0=lambda one: one.run(LARGE)))
    oracle = replay(outcome.arrival_s, service._pick, [(-np.inf, KNOWN.instances(LARGE))])
    assert outcome.latency_s == pytest.approx(oracle.latency_s)
    assert outcome.energy_j == pytest.approx(oracle.cpu_s * 10.0) and outcome.refused == 0


def test_new_processes_take_their_time_and_loaded_variants_none():
    def change(one):
        one.run(SMALL)

    first = Script(at0=lambda one: one.run(LARGE), at5=change)
    for loaded, takes_over_s in (((), 6.5), (("large", "small"), 5.0)):
        outcome, _ = play(first, start_s=1.5, loaded=loaded, rate=60.0)
        small_s = [t for t, name in zip(outcome.arrival_s, outcome.variant, strict=True) if name == "small"]
        assert takes_over_s - 0.2 <= min(small_s) <= takes_over_s + 0.2


def test_a_change_that_another_replaces_never_takes_over():
    script = Script(at0=lambda one: one.run(LARGE), at5=lambda one: one.run(SMALL), at6=lambda one: one.run(LARGE))
    outcome, service = play(script, start_s=3.0, rate=60.0)
    assert set(outcome.variant) == {"large"} and not service.changing


def test_a_bounded_queue_refuses_and_late_requests_are_dropped_where_asked():
    def bound(one):
        one.run(LARGE)
        one.limit = QueueLimit(3)

    outcome, _ = play(Script(at0=bound), rate=400.0)
    assert outcome.refused > 0 and np.nanmax(outcome.latency_s[np.isfinite(outcome.latency_s)]) < 5 * 0.02
    dropped, _ = play(Script(at0=lambda one: one.run(LARGE)), rate=400.0, drop_late=True)
    assert dropped.refused > 0 and dropped.late == 0

    def impatient(one):
        one.run(LARGE)
        one.limit = QueueLimit(1000, 0.03)

    outcome, _ = play(Script(at0=impatient), rate=400.0)
    assert outcome.refused > 0 and np.max(outcome.latency_s[np.isfinite(outcome.latency_s)]) <= 0.03 + 0.03


def test_a_mix_and_a_slow_machine_show_in_the_times():
    def steer(one):
        one.run(LARGE)
        one.steering = MixCounter(VariantMix((MixStep(1.0, 1e9, (("small", 0.5),)),)))

    outcome, _ = play(Script(at0=steer), rate=10.0, loaded=("large", "small"), slowdown=lambda t: 2.0)
    assert abs(outcome.variant.count("small") - outcome.variant.count("large")) <= 1
    small = [s for s, name in zip(outcome.latency_s, outcome.variant, strict=True) if name == "small"]
    assert np.median(small) == pytest.approx(0.004, rel=0.1)


def halves(name, *sizes):
    """Batches that take half of a request's time once, and half for each request."""
    pieces = [key for key in TABLE if key[0] == name]
    return {key: {n: tuple(samples * (1 + n) / 2 for samples in TABLE[key][:2]) for n in sizes} for key in pieces}


@pytest.mark.parametrize("rate", [60.0, 150.0, 400.0])
@pytest.mark.parametrize("delay_s", [0.0, 0.004])
def test_batches_are_those_of_the_queue_that_layouts_are_predicted_with(rate, delay_s):
    script = Script(at0=lambda one: one.run(LARGE))
    outcome, service = play(script, rate, batches=halves("large", 2, 4), batch_delay_s=delay_s)
    samples, at = TABLE["large", LARGE.slices[0]][0], (service._pick * 100).astype(int)
    times = [samples[at] * part for part in (1.0, 1.5, 2.5)]
    oracle = serve_batches(outcome.arrival_s.tolist(), [BatchInstance((1, 2, 4), times)] * 2, delay_s)
    assert outcome.batch.tolist() == oracle.batch.tolist()
    assert outcome.latency_s == pytest.approx(oracle.start_s + oracle.service_s - outcome.arrival_s)
    assert outcome.energy_j.sum() == pytest.approx(10.0 * np.sum(oracle.service_s / oracle.batch)), (
        "CPU time is the time of a core, and a batch's is divided over its requests"
    )
    assert 1.0 <= outcome.mean_batch <= 4.0 and (rate < 100.0 or outcome.mean_batch > 1.2)


def test_a_batch_is_as_large_as_the_variant_that_answers_takes():
    def steer(one):
        one.run(LARGE)
        one.steering = MixCounter(VariantMix((MixStep(1.0, 1e9, (("small", 1.0),)),)))

    batches = {**halves("large", 2), **halves("small", 2, 4, 8)}
    outcome, _ = play(Script(at0=steer), rate=1500.0, until_s=5.0, loaded=("large", "small"), batches=batches)
    assert set(outcome.variant) == {"small"} and outcome.batch.max() == 8


def test_the_last_of_a_batch_that_would_be_late_are_dropped_and_the_rest_is_answered():
    first = Script(at0=lambda one: one.run(LARGE))
    outcome, _ = play(first, rate=400.0, batches=halves("large", 2, 4), drop_late=True)
    assert outcome.refused > 0 and outcome.late == 0 and outcome.answered + outcome.refused == len(outcome.latency_s)
