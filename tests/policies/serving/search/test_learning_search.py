"""The search that learns: when it tries, when it stops, what it settles on."""

import numpy as np
import pytest

from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.learned_service import PredictedTrial
from joulery.policies.serving.search.learning_search import LearningBudget, LearningSearch


class Oracle:
    """Knows everything with a given doubt: latency by row, joules by row, accuracy one half."""

    def __init__(self, latency_s, energy_j, doubt=0.05):
        self.latency_s, self.energy_j, self.doubt = np.array(latency_s), np.array(energy_j), doubt
        self.learned = []

    def learn(self, known):
        self.learned.append(dict(known))

    def predict(self, rows):
        count = len(rows)
        doubt = np.full(count, self.doubt)
        return PredictedTrial(
            np.log(self.latency_s[rows]), doubt, self.energy_j[rows], doubt * 0.01, np.full(count, 0.5)
        )

    predict_roughly = predict

    def trial(self, row):
        return TrialMetrics(0.5, float(self.latency_s[row]), float(self.energy_j[row]))


def search(service, known=None, limit_s=1.0, budget=None):
    made = LearningSearch(
        service,
        len(service.energy_j),
        known or {},
        lambda m: 1 - m.energy_j / 100,
        lambda accuracy_ratio, energy_j: 1 - energy_j / 100,
        limit_s,
        budget or LearningBudget(),
    )
    while (row := made.ask()) is not None:
        made.tell(row, service.trial(row))
    return made


def test_the_best_that_surely_keeps_the_limit_is_tried_first_and_settled_on():
    made = search(Oracle([0.5, 0.5, 2.0, 0.5], [40, 20, 1, 30]))
    assert made.trials == [1]
    assert made.settled == 1


def test_a_gain_worth_the_risk_is_tried_a_hopeless_one_is_not():
    risky = Oracle([0.5, 1.02, 3.0], [40.0, 5.0, 1.0])
    made = search(risky)
    assert 1 in made.trials
    assert 2 not in made.trials
    assert made.settled == 0


def test_what_is_known_is_settled_on_without_a_trial():
    service = Oracle([0.5, 0.5], [20.0, 20.001])
    made = search(service, known={0: service.trial(0)})
    assert made.trials == []
    assert made.settled == 0


def test_what_is_known_is_weighed_anew():
    service = Oracle([0.5, 0.5, 0.5], [20.0, 30.0, 40.0])
    known = {row: service.trial(row) for row in range(3)}
    cheap = LearningSearch(service, 3, known, lambda m: -m.energy_j, lambda _, energy_j: -energy_j, 1.0)
    dear = LearningSearch(service, 3, known, lambda m: m.energy_j, lambda _, energy_j: energy_j, 1.0)
    assert (cheap.settled, dear.settled) == (0, 2)
    assert cheap.ask() is None


def test_an_invocation_spends_no_more_than_it_may():
    rows = 40
    service = Oracle(np.full(rows, 0.5), 90.0 - np.arange(rows), doubt=1.0)
    blind = Oracle(np.full(rows, 0.5), np.full(rows, 50.0))
    blind.trial = service.trial
    blind.predict = blind.predict_roughly = lambda r: PredictedTrial(
        np.full(len(r), -1.0), np.full(len(r), 0.1), np.full(len(r), 10.0), np.full(len(r), 1.0), np.full(len(r), 0.5)
    )
    assert len(search(blind).trials) == 10
    assert len(search(blind, budget=LearningBudget(new_trials=3)).trials) == 3


def test_without_a_chance_it_gives_up_and_settles_on_nothing():
    made = search(Oracle([3.0, 4.0, 5.0], [1.0, 1.0, 1.0]))
    assert made.trials == []
    assert made.settled is None
    hopeful = search(Oracle([1.05, 1.06, 5.0], [1.0, 1.0, 1.0]))
    assert hopeful.trials == [0, 1]
    assert hopeful.settled is None
    assert len(search(Oracle(np.full(60, 1.01), np.ones(60))).trials) == 40


def test_it_learns_before_each_choice():
    service = Oracle([1.05, 0.5], [1.0, 50.0])
    made = search(service)
    assert [len(known) for known in service.learned][: len(made.trials)] == list(range(len(made.trials)))


@pytest.mark.parametrize("limit_s", [0.1, 10.0])
def test_nothing_left_to_try_is_the_end(limit_s):
    service = Oracle([0.5], [1.0])
    made = search(service, known={0: service.trial(0)}, limit_s=limit_s)
    assert made.ask() is None
    assert made.settled == (0 if limit_s > 0.5 else None)
