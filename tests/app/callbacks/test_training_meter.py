"""Figures of a training run, whatever the framework: of steps, of epochs, and none where nothing measures."""

import pytest

from joulery.adapters.carbon.stated import Stated
from joulery.adapters.meters.fake import Script
from joulery.app.callbacks.training_meter import TrainingMeter, launched, measures_here
from joulery.app.windows import MachineMeter
from joulery.domain.errors import CapabilityError
from joulery.runtime.measuring.terms import MeasureWarning
from tests.runtime.measuring.hand import Hand

pytestmark = pytest.mark.filterwarnings("ignore::joulery.MeasureWarning")
RAY = {"NODE_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"}
SLURM = {
    "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"
}  # fmt: skip
OPTIONS = {"meters": ["fake:50"], "carbon": "360 g/kWh"}


def test_steps_and_epochs_of_a_run():
    hand = Hand(Script(((0.0, 50.0),)), source=Stated(360.0))
    meter = TrainingMeter(OPTIONS, lambda **options: hand.meter)
    meter.begin()
    meter.epoch_begins()
    for _ in range(4):
        hand.run(2.0, own_s=8.0)
        meter.step()
    figures, epoch = meter.metrics(), meter.epoch_ends()
    assert figures["joulery/step_energy_j"] == pytest.approx(100.0)
    assert figures["joulery/run_energy_j"] == pytest.approx(400.0)
    assert figures["joulery/power_w"] == pytest.approx(50.0)
    assert epoch["joulery/epoch_carbon_g"] == pytest.approx(epoch["joulery/epoch_energy_j"] * 1e-4)
    assert "joulery/step_energy_j" not in meter.metrics()
    meter.end()
    meter.end()
    assert meter.footprint.energy_j >= epoch["joulery/epoch_energy_j"]
    assert meter.metrics() == meter.epoch_ends() == {}


def test_without_an_intensity_there_are_no_grams():
    meter = TrainingMeter({"meters": ["fake:50"]})
    meter.begin()
    meter.step()
    assert not any(name.endswith("_g") for name in meter.metrics())
    meter.end()


def test_a_process_that_does_not_measure_says_nothing():
    meter = TrainingMeter(OPTIONS, here=False)
    meter.begin()
    meter.epoch_begins()
    meter.step()
    assert (meter.metrics(), meter.epoch_ends(), meter.footprint) == ({}, {}, None)
    meter.end()


def test_a_meter_that_cannot_be_opened_does_not_end_training():
    def refuse(**options):
        raise CapabilityError("no meter answers here")

    meter = TrainingMeter({}, refuse)
    with pytest.warns(MeasureWarning, match="training is not measured: no meter"):
        meter.begin()
    meter.step()
    assert meter.metrics() == {}
    meter.end()


@pytest.mark.parametrize(
    ("environment", "here", "several"),
    [
        ({}, True, False),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, True, True),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, False, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, True, False),
        ({"LOCAL_WORLD_SIZE": "x"}, True, False),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RAY_JOB_ID": "01", **RAY}, False, False),
        (SLURM, True, True),
        ({**SLURM, "SLURM_LOCALID": "1"}, False, True),
        ({**SLURM, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, True, False),
    ],
)
def test_one_process_of_a_node_measures(environment, here, several):
    assert (measures_here(environment), launched(environment)) == (here, several)


def test_the_launcher_and_all_it_started_are_charged():
    with MachineMeter(meters=["fake:50"], launcher=True) as meter:
        assert {meter._pid} <= meter._readers.tree.pids()
        assert len(meter._readers.tree.pids()) > 1
