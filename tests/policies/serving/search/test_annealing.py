"""Clover's search: the mended penalty, the schedule, history, termination, and what each proposer proposes."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.gpu.mig import A100_40GB
from joulery.policies.serving.search.annealing import (
    AnnealingSchedule,
    AnnealingSearch,
    LayoutNeighbourhood,
    RandomProposals,
    TrialMetrics,
    penalised,
)
from joulery.policies.serving.search.configuration_graph import one_gpu, published_odds, published_partitions
from joulery.policies.serving.search.layout_space import LayoutSpace

SPACE = one_gpu(A100_40GB, ("l", "x", "6"), {("6", "1g.5gb")})
NEAR = LayoutNeighbourhood(SPACE, published_odds(SPACE, A100_40GB))
SCORES = st.floats(-1.0, 1.0)
LATENCIES = st.floats(1e-3, 1e3)


@given(SCORES, LATENCIES, LATENCIES)
def test_a_violated_limit_never_outranks_the_same_score_within_it(score, latency_s, limit_s):
    mended = penalised(score, latency_s, limit_s)
    assert mended == score if latency_s <= limit_s else mended <= score
    if latency_s > limit_s * 1.001 and abs(score) > 1e-6:
        assert mended < score


@given(SCORES, LATENCIES, LATENCIES, LATENCIES)
def test_a_worse_break_never_scores_more(score, one_s, other_s, limit_s):
    near, far = sorted((one_s, other_s))
    assert penalised(score, far, limit_s) <= penalised(score, near, limit_s)


def test_positive_scores_are_penalised_as_published():
    assert penalised(0.3, 0.2, 0.1) == pytest.approx(0.3 * 0.1 / 0.2)
    assert penalised(-0.3, 0.2, 0.1) == pytest.approx(-0.6)
    assert penalised(-0.3, math.inf, 0.1) == -math.inf


def trials(search, table):
    """Every row the search asked for, with its metrics, in order."""
    found = []
    while (row := search.ask()) is not None:
        metrics = table.evaluate(row)
        search.tell(row, metrics)
        found.append((row, metrics))
    return found


@dataclass
class Walk:
    """Proposes rows in a given order; remembers around which centre it was asked."""

    rows: list[int]
    centres: list[int] = field(default_factory=list)

    def propose(self, centre, seen, rng):
        self.centres.append(centre)
        return self.rows.pop(0) if self.rows else None

    def anything(self, seen, rng):
        return None


def search(rows, *, start=0, known=None, schedule=None, limit_s=1.0, rng=None):
    walk = Walk(list(rows))
    made = AnnealingSearch(
        walk,
        start,
        known or {},
        lambda metrics: -metrics.energy_j,
        limit_s,
        rng or np.random.default_rng(0),
        schedule or AnnealingSchedule(),
    )
    return made, walk


@dataclass
class Table:
    energy_j: dict[int, float]
    slow: frozenset[int] = frozenset()

    def evaluate(self, row, /):
        return TrialMetrics(0.5, 2.0 if row in self.slow else 1.0, self.energy_j.get(row, 9.0))


def test_it_starts_from_what_runs_and_settles_on_the_best_within_the_limit():
    made, _ = search([1, 2, 3])
    found = trials(made, Table({0: 5.0, 1: 4.0, 2: 1.0, 3: 6.0}, slow=frozenset({2})))
    assert [row for row, _ in found] == [0, 1, 2, 3]
    assert made.settled == 1
    assert made.trials == made.looked_at == [0, 1, 2, 3]


def test_five_in_a_row_without_a_better_one_end_it():
    made, _ = search(range(1, 100))
    trials(made, Table({0: 5.0, 1: 4.0, 3: 3.5}))
    assert made.looked_at == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert made.settled == 3


def test_a_tie_is_no_improvement():
    made, _ = search(range(1, 100))
    trials(made, Table({}))
    assert made.looked_at == [0, 1, 2, 3, 4, 5]
    assert made.settled == 0


def test_ten_new_trials_end_it_however_well_it_goes():
    made, _ = search(range(1, 100))
    trials(made, Table({row: 100.0 - row for row in range(100)}))
    assert made.trials == list(range(10))
    assert made.settled == 9


def test_what_is_known_is_not_tried_again_but_counts_as_looked_at():
    known = {row: TrialMetrics(0.5, 1.0, 9.0) for row in range(4)}
    made, _ = search(range(1, 100), known=known)
    found = trials(made, Table({}))
    assert [row for row, _ in found] == [4, 5]
    assert made.looked_at == [0, 1, 2, 3, 4, 5]


def test_known_improvements_count_as_such():
    known = {row: TrialMetrics(0.5, 1.0, 9.0 - row) for row in range(20)}
    made, _ = search(range(1, 100), known=known, schedule=AnnealingSchedule(new_trials=1))
    assert [row for row, _ in trials(made, Table({}))] == [20]
    assert made.settled == 19


def test_without_anything_within_the_limit_it_is_bounded_and_settles_on_nothing():
    slow = frozenset(range(1000))
    made, _ = search(range(1, 1000))
    trials(made, Table({}, slow=slow))
    assert len(made.trials) == 40
    assert made.settled is None


def test_it_goes_on_past_its_patience_until_something_keeps_the_limit():
    made, _ = search(range(1, 1000))
    trials(made, Table({}, slow=frozenset(range(25))))
    assert made.settled == 25
    assert len(made.trials) == 26


def test_the_end_of_the_neighbours_is_the_end():
    made, _ = search([1])
    trials(made, Table({}))
    assert made.looked_at == [0, 1]


def test_the_centre_moves_up_always_and_down_by_the_temperature():
    """From score -1 to -1.01, one percentage point at temperature 1 %: accepted with probability 1/e."""
    moved = 0
    for seed in range(4000):
        made, walk = search([1, 2], rng=np.random.default_rng(seed), schedule=AnnealingSchedule(patience=9, step=0.0))
        trials(made, Table({0: 1.0, 1: 1.01, 2: 0.9}))
        assert walk.centres[0] == 0
        moved += walk.centres[1] == 1
        assert walk.centres[2] == 2
    assert moved / 4000 == pytest.approx(math.exp(-1), abs=4 * math.sqrt(0.23 / 4000))


def test_the_temperature_falls_by_a_step_a_look_down_to_its_floor():
    """Twenty looks at falling temperature; acceptance of the same loss becomes rarer."""
    schedule = AnnealingSchedule(start=1e-2, step=5e-4, floor=1e-3, patience=99, new_trials=99)
    accepted = np.zeros(24)
    for seed in range(3000):
        made, walk = search(range(1, 25), rng=np.random.default_rng(seed), schedule=schedule)
        energy = {row: 1.0 + 0.005 * row for row in range(25)}
        trials(made, Table(energy))
        accepted += [centre == look for look, centre in enumerate(walk.centres[1:25], 1)]
    first = math.exp(-0.005 / 9.5e-3)
    assert accepted[0] / 3000 == pytest.approx(first, abs=0.04)
    assert accepted[-1] / 3000 < 0.02


def test_neighbourhood_proposes_only_unseen_neighbours_by_their_odds():
    base = SPACE.index(SPACE.vector([("6", "7g.40gb")]))
    near = SPACE.neighbours(base).tolist()
    rng, seen = np.random.default_rng(0), set(near[::2]) | {base}
    drawn = Counter(NEAR.propose(base, seen, rng) for _ in range(20_000))
    assert set(drawn) <= set(near) - seen
    rest = [row for row in near if row not in seen]
    odds = NEAR.odds[rest] / NEAR.odds[rest].sum()
    expected = 20_000 * odds
    observed = np.array([drawn[row] for row in rest])
    assert float(np.sum((observed - expected) ** 2 / expected)) < len(rest) + 5 * math.sqrt(2 * len(rest))
    assert NEAR.propose(base, set(near) | {base}, rng) is None


def test_a_search_in_a_corner_widens_until_something_keeps_the_limit():
    """All neighbours of the start are too slow; a feasible one lies farther away."""
    base = SPACE.index(SPACE.vector([("6", "7g.40gb")]))
    near = set(SPACE.neighbours(base).tolist())
    made = AnnealingSearch(
        NEAR,
        base,
        {},
        lambda m: m.accuracy_ratio,
        1.0,
        np.random.default_rng(1),
        AnnealingSchedule(desperate_trials=500),
    )
    trials(made, Table({}, slow=frozenset(near | {base})))
    assert made.settled is not None
    assert made.settled not in near


def test_anything_ends_when_everything_has_been_seen():
    rng = np.random.default_rng(0)
    assert NEAR.anything(set(range(len(SPACE))) - {7}, rng) == 7
    assert NEAR.anything(set(range(len(SPACE))), rng) is None


def test_guesses_are_even_over_partitions_and_strings_and_never_spell_one_twice():
    layouts = LayoutSpace.of(A100_40GB, ("a", "b"), {("b", "1g.5gb"), ("b", "2g.10gb")}, 1)
    small = layouts.graph
    strings = sum(2 ** len(partition) for partition in published_partitions(A100_40GB))
    rng = np.random.default_rng(0)
    guesses = RandomProposals(layouts)
    drawn = []
    while (row := guesses.propose(0, set(), rng)) is not None:
        drawn.append(row)
    able = sum(
        2 ** sum(profile in ("7g.40gb", "4g.20gb", "3g.20gb") for profile in partition)
        for partition in published_partitions(A100_40GB)
    )
    assert len(drawn) == able < strings
    assert set(drawn) == set(range(len(small)))
    firsts = Counter(RandomProposals(layouts).anything(set(), rng) for _ in range(3000))
    whole = [small.index(small.vector([(v, "7g.40gb")])) for v in "ab"]
    assert firsts[whole[0]] == pytest.approx(firsts[whole[1]], rel=0.35)


def test_equal_seeds_give_equal_searches():
    def run(seed):
        made = AnnealingSearch(NEAR, 5, {}, lambda m: -m.energy_j, 1.0, np.random.default_rng(seed))
        return trials(made, Table({row: (row * 37 % 101) / 50 for row in range(208)})), made.looked_at

    assert run(3) == run(3)
    assert run(3) != run(4)
