"""A job on several nodes: its sums over all of them, and a store that is late or gone keeps no node from training."""

import json

import pytest

from joulery.app.callbacks.job_board import LAST_WAIT_S, JobBoard, MultiNodeEnergy, open_board
from joulery.app.callbacks.training_meter import TrainingMeter
from joulery.app.windows import MachineMeter
from joulery.runtime.measuring.terms import MeasureWarning

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
    with pytest.warns(MeasureWarning, match="cover this node only"):
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


def workers(places):
    """Boards of the workers of a Ray job, by ``(node, pid)`` in the order of their ranks."""
    store, clock = Store(), Clock()
    return [JobBoard(store, node, 0, lambda: clock.now_s, clock.sleep, ranks=len(places)) for node, _ in places]


def test_workers_of_ray_find_each_other_and_their_nodes():
    places = [(0, 100), (1, 200), (1, 201)]
    first, second, third = workers(places)
    first.join(0, 100)
    second.join(1, 200)
    assert (second.pids(), first.pids(), first.nodes) == ({200}, {100}, 0)
    second.put(5.0, None)
    first.put(10.0, None)
    assert first.job() is None  # on how many nodes the job runs is not known yet
    third.join(2, 201)
    assert second.pids() == {200, 201}
    assert first.job() == MultiNodeEnergy(15.0, None, 2, 2, False)


def test_a_ray_job_on_one_node_has_no_sum_of_nodes():
    first, second = workers([(0, 100), (0, 101)])
    first.join(0, 100)
    second.join(1, 101)
    first.put(10.0, 1.0, final=True)
    assert (first.pids(), first.job(), first.last()) == ({100, 101}, None, None)


@SCRIPTED
def test_a_worker_of_ray_that_does_not_measure_joins_and_the_one_that_does_charges_all():
    opened, joined = {}, []

    def open_meter(**options):
        opened.update(options)
        return MachineMeter(**{key: value for key, value in options.items() if key != "processes"})

    measuring, other = workers([(0, 100), (0, 101)])
    TrainingMeter(OPTIONS, here=False, board=lambda: joined.append(1) or other, joins=True).begin()
    assert joined == [1]
    other.join(1, 101)
    meter = TrainingMeter(OPTIONS, open_meter, board=lambda: measuring, joins=True)
    meter.begin()
    assert opened["processes"]() == {101}
    meter.end()
    TrainingMeter(OPTIONS, here=False, board=lambda: joined.append(2), joins=False).begin()
    assert joined == [1]


def test_the_energy_of_a_job_reads_well():
    assert str(MultiNodeEnergy(4.85, 0.001, 2, 2, True)) == "4.85 J on 2 of 2 nodes, 1.00 mg CO2e"
    assert str(MultiNodeEnergy(4.85, None, 2, 1, False)).endswith("1 of 2 nodes, not all nodes have ended")
    assert MultiNodeEnergy(4.85, None, 2, 1, False).as_dict()["energy_j"] == 4.85


def test_without_a_store_the_figures_are_said_to_be_of_one_node():
    assert open_board({}) is None
    with pytest.warns(MeasureWarning, match="node 1 of 2 only"):
        assert (
            open_board({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) is None
        )
    ray = {"RAY_JOB_ID": "01000000", "NODE_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    with pytest.warns(MeasureWarning, match="this process only"):
        assert open_board(ray) is None
