"""A service learned from trials: predictions before, during and after; doubt that shrinks where it was tried."""

import numpy as np
import pytest

from joulery.domain.gpu.mig import A100_40GB
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.configuration_graph import one_gpu
from joulery.policies.serving.search.learned_service import Baseline, LearnedService, ServiceSetting
from joulery.sim.core.streams import Streams
from joulery.sim.queues.pull_fit import simulate

COSTS = CLOVER_SERVICES["efficientnet"]
NAMES = tuple(variant.name for variant in COSTS.variants)
SPACE = one_gpu(A100_40GB, NAMES)
GAPS = Streams(0)("gaps").exponential(1.0, 2000)
RATE = 1 / COSTS.loads_s[-1]


def trial(row, load_s=COSTS.loads_s[-1], requests=1000):
    found = simulate(COSTS, SPACE.instances(SPACE.graphs[row]), GAPS[:requests], load_s, Streams(0))
    return TrialMetrics(found.accuracy_ratio, found.p95_s, found.energy_j_per_request)


BASE = SPACE.index(SPACE.vector([(NAMES[-1], "7g.40gb")]))
BASELINE = Baseline(trial(BASE, COSTS.loads_s[0], 2000), 1 / COSTS.loads_s[0])
SETTING = ServiceSetting(SPACE, A100_40GB, np.array([v.accuracy_ratio for v in COSTS.variants]), 2, RATE, BASELINE)
UNSEEN = np.arange(3, len(SPACE), 97)
TRUTH = [trial(int(row)) for row in UNSEEN]
CALM = np.array([truth.latency_s < 2 * BASELINE.metrics.latency_s for truth in TRUTH])


def learned(count):
    service = LearnedService(SETTING)
    rows = np.random.default_rng(1).permutation([row for row in range(len(SPACE)) if row not in UNSEEN])[:count]
    service.learn({int(row): trial(int(row)) for row in rows})
    return service


def errors(predicted):
    latency = predicted.log_latency - np.log([truth.latency_s for truth in TRUTH])
    energy = np.log(predicted.energy_j) - np.log([truth.energy_j for truth in TRUTH])
    return np.abs(latency[CALM]), np.abs(energy)


def test_a_dozen_trials_predict_the_others():
    latency, energy = errors(learned(12).predict(UNSEEN))
    assert np.median(latency) < 0.06
    assert np.median(energy) < 0.03
    accuracy = np.abs(learned(12).predict(UNSEEN).accuracy_ratio - [truth.accuracy_ratio for truth in TRUTH])
    assert np.max(accuracy[CALM]) < 0.004


def test_more_trials_predict_better():
    few, many = ([float(np.mean(error)) for error in errors(learned(count).predict(UNSEEN))] for count in (2, 25))
    assert many[0] < few[0]
    assert many[1] < few[1]


def test_doubt_is_honest():
    """The latencies of configurations not tried lie within three standard deviations, and doubt is not boundless."""
    predicted = learned(12).predict(UNSEEN)
    off = np.abs(predicted.log_latency - np.log([truth.latency_s for truth in TRUTH])) / predicted.latency_doubt
    assert np.mean(off[CALM] < 3) >= 0.9
    assert np.median(predicted.latency_doubt) < 0.2
    before = LearnedService(SETTING).predict(UNSEEN)
    assert np.all(before.latency_doubt[CALM] > predicted.latency_doubt[CALM])
    assert np.median(before.energy_doubt) > 3 * np.median(predicted.energy_doubt)


def test_a_rough_prediction_agrees_on_the_mean():
    service = learned(8)
    close, rough = service.predict(UNSEEN), service.predict_roughly(UNSEEN)
    assert rough.log_latency == pytest.approx(close.log_latency)
    assert rough.energy_j == pytest.approx(close.energy_j)


def test_equal_trials_give_equal_predictions():
    first, again = learned(6), learned(6)
    known = {int(row): trial(int(row)) for row in UNSEEN[:2]}
    assert first.predict(UNSEEN).log_latency.tolist() == again.predict(UNSEEN).log_latency.tolist()
    first.learn(known)
    before = first.predict(UNSEEN).log_latency.tolist()
    first.learn(known)
    assert first.predict(UNSEEN).log_latency.tolist() == before


def test_the_baseline_alone_already_anchors_the_level():
    service = LearnedService(SETTING)
    service.learn({})
    whole = service.predict(np.array([BASE]))
    assert np.exp(whole.log_latency[0]) > 0.8 * BASELINE.metrics.latency_s
