"""GPUs that need not be alike: the spaces the paper describes, tried by simulation, searched by the same searches."""

from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.mig import A100_40GB
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.policies.serving.search.configuration_graph import one_gpu, published_odds, summed_odds
from joulery.sim.core.streams import Streams
from joulery.sim.serving.mixed_table import mixed
from joulery.sim.serving.outcome import StudySettings
from joulery.sim.serving.schemes import run_variants
from joulery.sim.serving.trial_table import bench, exhaustive_table

MENU = replace(A100_40GB, partitions=(("7g.40gb",), ("3g.20gb", "4g.20gb"), ("3g.20gb", "2g.10gb", "2g.10gb")))
GRID = [100.0, 300.0, 104.0]


@pytest.fixture(scope="module")
def alike():
    costs = CLOVER_SERVICES["yolo"]
    table = exhaustive_table(costs, MENU, Streams(0), (costs.loads_s[0], costs.loads_s[-1]))
    return bench(table, MENU, costs=costs)


@pytest.fixture(scope="module")
def own(alike):
    return mixed(alike)


def test_two_gpus_have_every_sum_of_one_and_its_odds(alike, own):
    single, total = len(alike.space), own.space
    pairs = {
        tuple((alike.space.graphs[a] + alike.space.graphs[b]).tolist()) for a in range(single) for b in range(single)
    }
    assert {tuple(row) for row in total.graphs.tolist()} == pairs
    assert own.odds.sum() == pytest.approx(1.0)
    expected = np.zeros(len(total))
    for a in range(single):
        for b in range(single):
            row = total.index(alike.space.graphs[a] + alike.space.graphs[b])
            expected[row] += alike.odds[a] * alike.odds[b]
    assert own.odds == pytest.approx(expected)


def test_the_published_space_has_so_many():
    space = one_gpu(A100_40GB, ("l", "x", "6"))
    both = space.plus(space)
    assert len(both) == 18_688
    odds = summed_odds(both, space, published_odds(space, A100_40GB), space, published_odds(space, A100_40GB))
    assert odds.min() > 0
    assert odds.sum() == pytest.approx(1.0)


def test_alike_pools_do_the_same_in_both_spaces(alike, own):
    """Simulated again on other requests: the joules to the noise of a window, the accuracy nearly exactly."""
    row = alike.space.index(alike.space.vector([("yolov5l", "3g.20gb"), ("yolov5x", "4g.20gb")]))
    twice = own.space.index(2 * alike.space.graphs[row])
    assert own.metrics[twice].accuracy_ratio == pytest.approx(alike.metrics[row].accuracy_ratio, abs=5e-4)
    assert own.metrics[twice].energy_j == pytest.approx(alike.metrics[row].energy_j, rel=0.06)
    assert own.same_gpus_j[twice] == pytest.approx(alike.same_gpus_j[row], rel=0.06)
    assert own.space.instances(own.space.graphs[own.base_row]) == (("yolov5x6", "7g.40gb"),) * 2


def test_searches_find_no_less_among_more(alike, own):
    settings = StudySettings()
    top = run_variants("oracle", own, "any", GRID, settings, Streams(0))
    assert top.objective >= run_variants("oracle", alike, "any", GRID, settings, Streams(0)).objective - 0.004
    learned = run_variants("learning", own, "any", GRID, settings, Streams(0))
    assert learned.settled_violations == 0
    assert learned.objective >= top.objective - 0.01
    walked = run_variants("clover", own, "any", GRID, settings, Streams(0))
    assert walked.settled_violations == 0
    assert walked.trials <= 40
    assert own.shortlist is not None
    assert len(own.shortlist) <= len(own.space)


def test_surroundings_hold_the_neighbours(own):
    rows = own.layouts.candidate_rows([5])
    assert set(own.space.neighbours(5).tolist()) <= set(rows.tolist())
    assert rows.tolist() == sorted(set(rows.tolist()))


def test_what_cannot_be_mixed_is_said(alike):
    with pytest.raises(ConfigError, match="not only a table"):
        mixed(replace(alike, costs=None))
    with pytest.raises(ConfigError, match="listed for two GPUs"):
        mixed(replace(alike, table=replace(alike.table, gpus=3)))
