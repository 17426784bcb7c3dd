"""The contract of a meter: one suite, run over all meters against their fakes."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from joulery.adapters.meters.amd import open_amd
from joulery.adapters.meters.cpu_model import open_cpu_model
from joulery.adapters.meters.dcgm import open_dcgm
from joulery.adapters.meters.fake import FakeMeter, Script
from joulery.adapters.meters.host.ipmi import open_ipmi
from joulery.adapters.meters.host.redfish import open_redfish
from joulery.adapters.meters.host.slurm_energy import open_slurm_energy
from joulery.adapters.meters.jetson import open_jetson
from joulery.adapters.meters.nvml import open_nvml
from joulery.adapters.meters.rapl import open_rapl
from joulery.adapters.meters.replay import open_replay
from joulery.app.wiring.meters import KINDS
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.ports import Meter
from joulery.store.run.channels import channel_from_dict, channel_to_dict
from tests.adapters.meters.nvml_fake import FakeBoard, FakeNvml
from tests.adapters.meters.powercap import Powercap
from tests.adapters.meters.proc import Machine
from tests.fakes import bmc, engine_pages
from tests.fakes.amdsmi import AmdBoard, AmdSmiFake
from tests.fakes.jetson import hwmon_module


@dataclass
class Rig:
    """A meter, and a way to break what it reads (None where nothing can break without the machine)."""

    meter: Meter
    break_it: Callable[[], None] | None = None


def rapl(root: Path) -> Rig:
    cap = Powercap(root / "powercap")
    cap.zone("intel-rapl:0", "package-0", 5_000_000, 9_000_000)
    cap.zone("intel-rapl:0:0", "dram", 1_000_000)
    return Rig(open_rapl(cap.root), lambda: cap.set("intel-rapl:0", "broken"))


def nvml(root: Path) -> Rig:
    board = FakeBoard()
    return Rig(
        open_nvml(FakeNvml(board, FakeBoard(energy_mj=None), FakeBoard(energy_mj=None, instant_mw=None))),
        lambda: setattr(board, "lost", True),
    )


def dcgm(root: Path) -> Rig:
    pages = [engine_pages.dcgm((1000, None))]
    return Rig(open_dcgm("localhost:9400", lambda _: pages[0]), lambda: pages.__setitem__(0, ""))


def amd(root: Path) -> Rig:
    smi = AmdSmiFake(AmdBoard(), AmdBoard(count=None))
    return Rig(open_amd(smi, smi.sleep), lambda: setattr(smi.boards[0], "lost", True))


def jetson(root: Path) -> Rig:
    meter = open_jetson(sys=hwmon_module(root, {"VDD_IN": (5000, 1200), "VDD_SOC": (5000, 100)}))
    return Rig(meter, (root / "class/hwmon/hwmon0/in1_input").unlink)


def ipmi(root: Path) -> Rig:
    return Rig(open_ipmi(lambda: (0, bmc.dcmi(), "")))


def redfish(root: Path) -> Rig:
    return Rig(open_redfish("bmc", bmc.newer().get))


def slurm(root: Path) -> Rig:
    def ask(what: str) -> str:
        return "AcctGatherEnergyType = acct_gather_energy/ipmi\n" if what == "configuration" else "CurrentWatts=171\n"

    return Rig(open_slurm_energy("n1", ask))


def cpu_model(root: Path) -> Rig:
    machine = Machine(root, [0, 0, 1, 1])
    return Rig(open_cpu_model(10.0, 40.0, proc=machine.proc, sys=machine.sys))


def replay(root: Path) -> Rig:
    file = root / "trace.csv"
    file.write_text("t_s,energy_j\n0,1\n1000,5\n")
    return Rig(open_replay(file))


def fake(root: Path) -> Rig:
    now = [0.0]
    scripts = [
        Script(((0.0, 5.0),), silent_s=((10.0, 20.0),)),
        Script(((0.0, 5.0),), device="gpu:0", kind=ReadingKind.POWER),
        Script(((0.0, 5.0),), device="gpu:1", kind=ReadingKind.AVERAGE),
    ]
    return Rig(FakeMeter(scripts, lambda: now[0]), lambda: now.__setitem__(0, 15.0))


RIGS = {
    "rapl": rapl,
    "nvml": nvml,
    "amd": amd,
    "jetson": jetson,
    "dcgm": dcgm,
    "ipmi": ipmi,
    "redfish": redfish,
    "slurm": slurm,
    "cpu-model": cpu_model,
    "replay": replay,
    "fake": fake,
}


@pytest.fixture(params=sorted(RIGS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    made = RIGS[request.param](tmp_path)
    request.addfinalizer(made.meter.close)
    return made


def test_no_meter_is_left_out_of_this_suite() -> None:
    assert set(RIGS) == set(KINDS)


def test_channels_are_fixed_and_no_part_of_a_device_is_read_twice(rig: Rig) -> None:
    channels = rig.meter.channels
    assert channels
    assert len({(channel.device, channel.component) for channel in channels}) == len(channels)
    assert len({channel.meter for channel in channels}) == 1
    rig.meter.read()
    assert rig.meter.channels == channels


def test_a_reading_is_one_value_a_channel_and_makes_a_trace(rig: Rig) -> None:
    for channel, value in zip(rig.meter.channels, rig.meter.read(), strict=True):
        assert value >= 0
        assert len(PowerTrace(channel, [1], [value], 0.01)) == 1


def test_a_counter_does_not_run_backwards(rig: Rig) -> None:
    readings = [rig.meter.read() for _ in range(5)]
    for slot, channel in enumerate(rig.meter.channels):
        column = [reading[slot] for reading in readings]
        if channel.kind is ReadingKind.COUNTER and channel.wrap_j == 0:
            assert column == sorted(column)


def test_a_channel_says_what_a_reading_means(rig: Rig) -> None:
    for channel in rig.meter.channels:
        assert (channel.averaging_s > 0) == (channel.kind is ReadingKind.AVERAGE)
        assert channel.wrap_j == 0 or channel.kind is ReadingKind.COUNTER
        assert channel.update_s >= 0
        assert 0 <= channel.band_ratio <= 1


def test_a_channel_survives_json(rig: Rig) -> None:
    for channel in rig.meter.channels:
        text = json.dumps(channel_to_dict(channel), allow_nan=False)
        again = channel_from_dict(json.loads(text))
        assert repr(again) == repr(channel)


@pytest.mark.parametrize("rig", ["rapl", "nvml", "amd", "jetson", "fake"], indirect=True)
def test_what_breaks_is_missing_with_a_note_and_the_rest_goes_on(rig: Rig) -> None:
    assert rig.break_it is not None
    rig.meter.notes()
    rig.break_it()
    assert [math.isnan(value) for value in rig.meter.read()].count(True) == 1
    assert len(rig.meter.notes()) == 1
    rig.meter.read()
    assert rig.meter.notes() == ()


def test_closing_twice_is_safe_and_nothing_is_read_afterwards(rig: Rig) -> None:
    rig.meter.close()
    rig.meter.close()
    assert all(math.isnan(value) for value in rig.meter.read())
    assert len(rig.meter.read()) == len(rig.meter.channels)
