import json
from importlib import metadata
from pathlib import Path

import pytest
from pydantic import ValidationError

from joulery.adapters.meters.fake import FakeMeter, Script
from joulery.app.wiring import meters as module
from joulery.app.wiring.meters import open_meter, open_meters, overlap, parse_meter
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.meters import MetersConfig
from joulery.domain.energy.channel import Channel, MeterSpec, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.quality import Quality
from tests.adapters.meters.powercap import Powercap
from tests.fakes.jetson import hwmon_module

FAKE = {"channels": [{"watts": [[0, 5]]}]}


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("rapl", MeterSpec("rapl")),
        ("nvml", MeterSpec("nvml")),
        ("amd", MeterSpec("amd")),
        ("jetson", MeterSpec("jetson")),
        ("jetson:VDD_CPU_CV+VDD_GPU_SOC", MeterSpec("jetson", {"rails": "VDD_CPU_CV+VDD_GPU_SOC"})),
        ("ipmi", MeterSpec("ipmi")),
        ("redfish:https://bmc", MeterSpec("redfish", {"address": "https://bmc"})),
        ("slurm:n1", MeterSpec("slurm", {"node": "n1"})),
        ("cpu-model", MeterSpec("cpu-model")),
        ("cpu-model:40,120.5", MeterSpec("cpu-model", {"idle_w": 40.0, "max_w": 120.5})),
        ("fake", MeterSpec("fake", {"channels": [{"watts": [[0, 50.0]]}]})),
        ("fake:7", MeterSpec("fake", {"channels": [{"watts": [[0, 7.0]]}]})),
    ],
)
def test_meters_by_name(text: str, spec: MeterSpec) -> None:
    assert parse_meter(text) == spec


def test_a_replay_keeps_its_file_whatever_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_meter("replay:trace.csv") == MeterSpec("replay", {"file": str(tmp_path / "trace.csv")})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rappl", "no such meter"),
        ("rapl:0", "takes no options"),
        ("ipmi:host", "takes no options"),
        ("redfish", "no BMC is named"),
        ("cpu-model:40", "not a number of watts"),
        ("cpu-model:a,b", "not a number of watts"),
        ("fake:-1", "not a number of watts"),
        ("fake:inf", "not a number of watts"),
    ],
)
def test_a_wrong_name_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_meter(text)


def test_a_fake_plays_a_script_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    channel = {"watts": [[0, 5], [1, 9]], "device": "gpu:0", "kind": "power", "silent_s": [[2, 3]]}
    file.write_text(json.dumps([channel]))
    meter = open_meter(parse_meter(f"fake:{file}"))
    assert (meter.channels[0].device, meter.channels[0].kind) == ("gpu:0", ReadingKind.POWER)
    assert meter.read() == (5.0,)
    meter.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("{}", "a list of channels"),
        ("[1]", "a list of channels"),
        ("[{}]", "not a channel"),
        ('[{"watts": [[0, 5]], "volts": 3}]', "not a channel"),
        ('[{"watts": [[0, "x"]]}]', "not a channel"),
        ('[{"watts": [[0, 5]], "kind": "heat"}]', "not a channel"),
        ('[{"watts": []}]', "start at 0 s"),
        ("[]", "at least one channel"),
    ],
)
def test_a_bad_script_is_refused_before_anything_starts(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        parse_meter(f"fake:{tmp_path / 'script.json'}")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse_meter(f"fake:{tmp_path / 'nothing.json'}")


def opened(*specs: MeterSpec) -> list[tuple[str, str]]:
    found = open_meters(specs)
    names = [(c.meter, c.device) for meter in found.meters for c in meter.channels]
    for meter in found.meters:
        meter.close()
    return names


def test_meters_that_were_named_must_all_answer(tmp_path: Path) -> None:
    cap = Powercap(tmp_path / "powercap")
    cap.zone("intel-rapl:0", "package-0")
    rapl = MeterSpec("rapl", {"root": str(cap.root)})
    gpu = MeterSpec("fake", {"channels": [{"watts": [[0, 5]], "device": "gpu:0"}]})
    assert opened(rapl, gpu) == [("rapl", "cpu:0"), ("fake", "gpu:0")]
    with pytest.raises(CapabilityError, match="no RAPL counters"):
        opened(gpu, MeterSpec("rapl", {"root": str(tmp_path / "nothing")}))
    with pytest.raises(DataError, match="No such file"):
        opened(gpu, MeterSpec("replay", {"file": str(tmp_path / "nothing.csv")}))


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:0"), ("machine", "cpu:1"), ("cpu:1", "machine")])
def test_no_device_is_counted_twice(devices: tuple[str, str]) -> None:
    specs = [MeterSpec("fake", {"channels": [{"watts": [[0, 5]], "device": device}]}) for device in devices]
    with pytest.raises(ConfigError, match=r"two meters .* same device"):
        opened(*specs)


class Choice:
    """What open_meter answers in place of the machine's own meters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[str] | CapabilityError) -> None:
        self.answers = {kind.replace("_", "-"): answer for kind, answer in answers.items()}
        monkeypatch.setattr(module, "open_meter", self)

    def __call__(self, spec: MeterSpec) -> FakeMeter:
        answer = self.answers.get(spec.kind, CapabilityError("not on this machine"))
        if isinstance(answer, CapabilityError):
            raise answer
        return FakeMeter([Script(((0.0, 1.0),), device=device) for device in answer])


def preferred() -> tuple[list[str], list[str], list[str]]:
    found = open_meters(None)
    devices = [channel.device for meter in found.meters for channel in meter.channels]
    absent = [str(error) for error in found.absent if str(error) != "not on this machine"]
    return devices, [str(error) for error in found.refused], absent


def test_the_model_stands_in_only_where_nothing_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = CapabilityError("not here")
    Choice(monkeypatch, rapl=["cpu:0"], nvml=["gpu:0"], cpu_model=["cpu:0"])
    assert preferred() == (["cpu:0", "gpu:0"], [], [])
    Choice(monkeypatch, rapl=absent, nvml=["gpu:0"], cpu_model=["cpu:0"])
    assert preferred() == (["gpu:0", "cpu:0"], [], ["not here"])
    Choice(monkeypatch, rapl=["machine"], nvml=absent, cpu_model=["cpu:0"])
    assert preferred() == (["machine"], [], ["not here"])


def test_missing_permission_is_distinguished_from_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = CapabilityError("denied", grant="sudo do it")
    Choice(monkeypatch, rapl=denied, nvml=CapabilityError("no driver"), cpu_model=["cpu:0"])
    assert preferred() == (["cpu:0"], ["denied"], ["no driver"])


def test_a_plug_in_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "watt-o-meter"

        def load(self) -> object:
            return lambda watts=3.0: FakeMeter([Script(((0.0, watts),), kind=ReadingKind.POWER)])

    def entry_points(*, group: str) -> list[Entry]:
        assert group == "joulery.meters"
        return [Entry()]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    meter = open_meter(parse_meter("watt-o-meter"))
    assert meter.read() == (3.0,)
    with pytest.raises(ConfigError, match="watt-o-meter"):
        parse_meter("no-such")


def channel(device: str, component: str) -> Channel:
    return Channel(device, component, ReadingKind.POWER, "m", Quality.MEASURED)


CPU, BOARD, HOST_POWER = channel("cpu:0", "package"), channel("gpu:0", "board"), channel("machine", "host")
PSYS = channel("machine", "psys")


@pytest.mark.parametrize(
    ("one", "other", "twice"),
    [
        (CPU, BOARD, False),
        (CPU, CPU, True),
        (PSYS, CPU, True),
        (PSYS, BOARD, False),
        (HOST_POWER, CPU, True),
        (HOST_POWER, BOARD, True),
        (HOST_POWER, PSYS, True),
    ],
)
def test_no_joule_is_counted_by_two_meters(one: Channel, other: Channel, twice: bool) -> None:
    assert bool(overlap([one], [other])) is bool(overlap([other], [one])) is twice


def test_a_host_meter_beside_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [Script(((0.0, 5.0),), device="machine", component="host")]
    monkeypatch.setitem(module._OPENERS, "ipmi", lambda options: FakeMeter(scripts))
    with pytest.raises(ConfigError, match="count the same device") as caught:
        open_meters([MeterSpec("fake", {"channels": [{"watts": [[0, 5]], "device": "gpu:0"}]}), MeterSpec("ipmi")])
    assert caught.value.got == "fake reads gpu:0 package, fake machine host"


def test_a_site_names_meters_as_the_command_line_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sys = hwmon_module(tmp_path, {"VDD_IN": (5000, 1200)})
    monkeypatch.setattr("joulery.app.wiring.meters.SYS", sys)
    config = MetersConfig(use=("jetson", "jetson:VDD_IN", "cpu-model"))
    assert meter_specs(config) == (MeterSpec("jetson"),)
    assert meter_specs(MetersConfig()) is None


@pytest.mark.parametrize("name", ["ipmitool", "redfish", "amd:0", "fake:50", "", "dcgm:"])
def test_a_site_refuses_other_meters(name: str) -> None:
    with pytest.raises(ValidationError, match="is not a meter"):
        MetersConfig(use=(name,))
