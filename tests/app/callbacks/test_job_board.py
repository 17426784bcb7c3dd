"""A job on several nodes: its sums over all of them, and a store that is late or gone keeps no node from training."""

import json

import pytest

from joulery.app.callbacks.job_board import LAST_WAIT_S, JobBoard, MultiNodeEnergy, nodes_of_job, open_board
from joulery.app.callbacks.training_meter import TrainingMeter
from joulery.runtime.measuring.measure import MeasureWarning

SCRIPTED = pytest.mark.filterwarnings("ignore::joulery.MeasureWarning")
OPTIONS = {"meters": ["fake:50"], "carbon": "360 g/kWh"}


class Store:
    """A key-value store in memory."""

    def __init__(self):
        self.values, self.lost = {}, False

    def _answer(self):
        if self.lost:
            raise RuntimeError("Connection reset by peer")

    def set(self, key, value):
        self._answer()
        self.values[key] = value.encode()

    def check(self, keys):
        self._answer()
        return all(key in self.values for key in keys)

    def get(self, key):
        self._answer()
        return self.values[key]


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def sleep(self, seconds):
        self.now_s += seconds


def boards(nodes, store=None):
    store, clock = store or Store(), Clock()
    return [JobBoard(store, node, nodes, lambda: clock.now_s, clock.sleep) for node in range(nodes)], store, clock


def test_the_sums_of_a_job_are_those_of_its_nodes():
    (first, second, third), _, _ = boards(3)
    assert first.job() is None
    first.put(10.0, 1.0)
    second.put(20.0, 2.0)
    assert first.job() == MultiNodeEnergy(30.0, 3.0, 3, 2, False)
    third.put(5.0, None)
    second.put(25.0, 2.5)
    assert first.job() == second.job() == MultiNodeEnergy(40.0, None, 3, 3, False)


def test_the_first_node_waits_for_the_last_sums_but_not_forever():
    (first, second), _, clock = boards(2)
    first.put(10.0, None, final=True)
    assert first.last() == MultiNodeEnergy(10.0, None, 2, 1, False)
    assert clock.now_s == pytest.approx(LAST_WAIT_S, abs=0.2)
    second.put(7.0, None, final=True)
    before_s = clock.now_s
    assert first.last() == MultiNodeEnergy(17.0, None, 2, 2, True)
    assert clock.now_s == before_s


def test_a_store_that_is_gone_is_said_once():
    (first, _), store, _ = boards(2)
    first.put(10.0, 1.0)
    store.lost = True
    with pytest.warns(MeasureWarning, match="of this node alone"):
        first.put(11.0, 1.0)
    first.put(12.0, 1.0)
    assert first.job() is None and first.last() is None


@SCRIPTED
def test_a_run_logs_its_job_once_all_nodes_have_reported():
    (first, second), store, _ = boards(2)
    meter = TrainingMeter(OPTIONS, board=lambda: first)
    meter.begin()
    meter.step()
    alone = meter.metrics()
    assert alone["joulery/job_nodes_reported"] == 1.0 and "joulery/job_energy_j" not in alone
    second.put(1000.0, 0.5)
    meter.step()
    figures = meter.metrics()
    assert figures["joulery/job_energy_j"] == pytest.approx(1000.0 + figures["joulery/run_energy_j"])
    assert figures["joulery/job_carbon_g"] == pytest.approx(0.5 + figures["joulery/run_carbon_g"])
    second.put(1100.0, 0.6, final=True)
    meter.end()
    assert meter.job == MultiNodeEnergy(
        pytest.approx(1100.0 + meter.footprint.energy_j), pytest.approx(0.6 + meter.footprint.carbon_g), 2, 2, True
    )
    assert json.loads(store.values["node/0"])["final"] is True


@SCRIPTED
def test_a_run_on_one_node_has_no_job():
    meter = TrainingMeter(OPTIONS, board=lambda: None)
    meter.begin()
    meter.step()
    assert not any("job" in name for name in meter.metrics())
    meter.end()
    assert meter.job is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"}, (1, 2)),
        ({"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "3"}, (3, 4)),
        ({"GROUP_WORLD_SIZE": "two", "GROUP_RANK": "1"}, (0, 1)),
        ({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "2"}, (0, 1)),
    ],
)
def test_which_node_of_how_many(environment, expected):
    assert nodes_of_job(environment) == expected


def test_without_a_store_the_figures_are_said_to_be_of_one_node():
    assert open_board({}) is None
    with pytest.warns(MeasureWarning, match="node 1 of 2 alone"):
        assert open_board({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"}) is None
