"""Meters of the whole host: ipmitool, Redfish, Slurm; asked in the background."""

import math
import threading
from pathlib import Path

import pytest

from joulery.adapters.clusters.slurm_commands import Done
from joulery.adapters.meters.host import ipmi as ipmi_module
from joulery.adapters.meters.host.ipmi import open_ipmi
from joulery.adapters.meters.host.polled import DIVIDED, PolledMeter
from joulery.adapters.meters.host.redfish import RedfishClient, open_redfish, redfish_address
from joulery.adapters.meters.host.slurm_energy import open_slurm_energy, slurm_printer
from joulery.domain.energy.channel import HOST, Channel, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.quality import Quality
from tests.fakes.bmc import CHASSIS, dcmi, link, newer, older, serving

CHANNEL = Channel("machine", HOST, ReadingKind.POWER, "ipmi", Quality.MEASURED, update_s=1.0)


def said(meter: PolledMeter) -> tuple[str, ...]:
    """What a meter says beyond how a host's energy is divided."""
    return tuple(note for note in meter.notes() if note != DIVIDED)


class Source:
    """A source that answers, or does not."""

    def __init__(self) -> None:
        self.now_s, self.watts, self.asked = 0.0, 100.0, 0
        self.down = False

    def fetch(self) -> tuple[float, ...]:
        self.asked += 1
        if self.down:
            raise CapabilityError("it is down")
        return (self.watts,)

    def meter(self) -> PolledMeter:
        return PolledMeter((CHANNEL,), self.fetch, "the source", 1.0, now_s=lambda: self.now_s, background=False)


def test_a_source_is_asked_once_a_period_and_read_from_memory() -> None:
    source = Source()
    meter = source.meter()
    for tenth in range(25):
        source.now_s = tenth / 10
        assert meter.read() == (100.0,)
    assert source.asked == 3


def test_a_lost_source_is_said_once_and_gives_nothing() -> None:
    source = Source()
    meter = source.meter()
    meter.read()
    source.down = True
    for second in range(1, 6):
        source.now_s = second
        assert math.isnan(meter.read()[0])
    assert said(meter) == ("the source cannot be read: it is down",)
    source.down, source.now_s = False, 6.0
    assert meter.read() == (100.0,)
    assert said(meter) == ("the source answers again",)


def test_an_answer_that_hangs_goes_stale_while_reading_goes_on() -> None:
    now_s, asked, release = [0.0], threading.Event(), threading.Event()

    def fetch() -> tuple[float, ...]:
        asked.set()
        release.wait(60)
        return (5.0,)

    meter = PolledMeter((CHANNEL,), fetch, "the source", 1.0, now_s=lambda: now_s[0], first=(4.0,))
    assert meter.read() == (4.0,)
    assert asked.wait(60)
    now_s[0] = 3.5
    assert math.isnan(meter.read()[0]) and math.isnan(meter.read()[0])
    assert said(meter) == ("the source cannot be read: no answer in time",)
    meter.close()
    release.set()


def test_ipmi_reads_the_power_of_the_node() -> None:
    meter = open_ipmi(lambda: (0, dcmi(220), ""), background=False)
    assert (meter.channels[0].device, meter.channels[0].component) == ("machine", HOST)
    assert meter.read() == (220.0,)
    assert meter.notes() == (DIVIDED,)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((0, dcmi(0), ""), "answers 0 W"),
        ((0, dcmi(220, "deactivated"), ""), "power reading is deactivated"),
        ((0, "", ""), "no power reading"),
        ((1, "", "Could not open device at /dev/ipmi0 or /dev/ipmi/0: No such file or directory"), "no BMC here"),
        ((1, "", "DCMI request failed because: Invalid command (c1)"), "ipmitool fails: DCMI request failed"),
        ((3, "", ""), "exit status 3"),
    ],
)
def test_ipmi_takes_nothing_else_for_a_measurement(answer, says: str) -> None:
    with pytest.raises(CapabilityError, match=says):
        open_ipmi(lambda: answer)


def test_ipmi_that_stops_answering() -> None:
    answers = [(0, dcmi(200), ""), (0, dcmi(0), "")]
    meter = open_ipmi(lambda: answers.pop(0), background=False)
    assert meter.read() == (200.0,)
    meter.ask()
    assert math.isnan(meter.read()[0])
    assert said(meter) == ("the BMC (ipmitool) cannot be read: the BMC answers 0 W: it has no power sensor",)


def test_ipmitool_itself(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapabilityError, match="ipmitool is not installed"):
        open_ipmi()
    tool = tmp_path / "ipmitool"
    tool.write_text(f"#!/bin/sh\n[ \"$*\" = 'dcmi power reading' ] && [ \"$LC_ALL\" = C ] && echo '{dcmi(333)}'\n")
    tool.chmod(0o755)
    assert open_ipmi(background=False).read() == (333.0,)
    assert ipmi_module.COMMAND[0] == "ipmitool"


def test_redfish_reads_the_counter_of_the_outer_chassis() -> None:
    with serving(newer(joules=5_000_000), "ro", "pw") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDFISH_USER", "ro")
        patch.setenv("REDFISH_PASSWORD", "pw")
        meter = open_redfish(url, background=False)
        assert (meter.channels[0].kind, meter.channels[0].component) == (ReadingKind.COUNTER, HOST)
        assert meter.read() == (5_000_000.0,)


@pytest.mark.parametrize(("resources", "watts"), [(newer(joules=None), 1349.26), (older(344), 344.0)])
def test_redfish_reads_power_where_there_is_no_counter(resources, watts: float) -> None:
    meter = open_redfish("bmc", resources.get, background=False)
    assert meter.channels[0].kind is ReadingKind.POWER
    assert meter.read() == (watts,)
    assert said(meter) == ()


def test_redfish_adds_up_no_power_controls() -> None:
    meter = open_redfish("bmc", older(344, more=(120.0,)).get, background=False)
    assert meter.read() == (344.0,)
    (note,) = said(meter)
    assert "reports 2 powers: only the first, 'Power Control 0', is read" in note


def test_redfish_with_several_chassis_wants_one_named() -> None:
    resources = newer()
    resources[f"{CHASSIS}/HGX"]["Links"] = {}
    with pytest.raises(ConfigError, match="2 chassis that report power") as caught:
        open_redfish("https://bmc", resources.get)
    assert caught.value.expected == f"one of them, such as redfish:https://bmc{CHASSIS}/Self"
    meter = open_redfish(f"https://bmc{CHASSIS}/HGX", resources.get, background=False)
    assert meter.read() == (900.0,)


def test_redfish_that_changes_its_answer_gives_nothing() -> None:
    resources = newer()
    meter = open_redfish("bmc", resources.get, background=False)
    del resources[f"{CHASSIS}/Self/EnvironmentMetrics"]["EnergyJoules"]
    meter.ask()
    assert math.isnan(meter.read()[0])


@pytest.mark.parametrize("reading", [None, 0, -5, True, "344", math.inf, math.nan])
def test_redfish_takes_no_other_value_for_power(reading) -> None:
    with pytest.raises(CapabilityError, match="reports its power"):
        open_redfish("bmc", older(reading).get)


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {CHASSIS: {"Members": 3}},
        {CHASSIS: {"Members": [3, {"@odata.id": "http://elsewhere/"}, {}]}},
        {CHASSIS: {"Members": [link(f"{CHASSIS}/a")]}, f"{CHASSIS}/a": {"Power": 3, "EnvironmentMetrics": []}},
    ],
)
def test_redfish_of_another_shape(resources) -> None:
    with pytest.raises(CapabilityError):
        open_redfish("bmc", resources.get)


def test_redfish_accounts_and_answers() -> None:
    with serving({**older(), "/bad": b"<html>"}, "ro", "pw") as url:
        address = redfish_address(url)
        with pytest.raises(CapabilityError, match="answers 401"):
            RedfishClient(address, {}).get(CHASSIS)
        client = RedfishClient(address, {"REDFISH_USER": "ro", "REDFISH_PASSWORD": "pw"})
        assert client.get(f"{CHASSIS}/none") is None
        with pytest.raises(CapabilityError, match="no JSON object"):
            client.get("/bad")
    with pytest.raises(CapabilityError, match="does not answer"):
        client.get(CHASSIS)


def test_redfish_sends_no_password_in_the_clear_and_shows_none() -> None:
    with pytest.raises(ConfigError, match="not sent without TLS"):
        RedfishClient(redfish_address("http://bmc"), {"REDFISH_USER": "ro", "REDFISH_PASSWORD": "pw"})
    with pytest.raises(ConfigError) as caught:
        redfish_address("https://ro:secret@bmc")
    assert "secret" not in f"{caught.value} {caught.value.got}"
    for text in ("ftp://bmc", "https://", "https://bmc:0", "https://[::1"):
        with pytest.raises(ConfigError):
            redfish_address(text)


def test_redfish_certificates(tmp_path) -> None:
    with pytest.raises(CapabilityError, match="REDFISH_CA cannot be read"):
        RedfishClient(redfish_address("https://bmc"), {"REDFISH_CA": str(tmp_path / "none.pem")})


CONFIG = "Configuration data as of 2026-11-02T09:00:00\nAcctGatherEnergyType    = acct_gather_energy/{}\n"
NODE = "NodeName=n1 Arch=x86_64 CoresPerSocket=32\n   CurrentWatts={} AveWatts=129\n"


def slurm(plugin: str = "ipmi", watts: str = "171", code: int = 0):
    def run(words):
        config = words[:3] == ("scontrol", "show", "config")
        return Done(code, CONFIG.format(plugin) if config else NODE.format(watts), "" if not code else "no controller")

    return slurm_printer(run)


@pytest.mark.parametrize(
    ("plugin", "component"), [("ipmi", HOST), ("xcc", HOST), ("pm_counters", HOST), ("rapl", "packages")]
)
def test_slurms_reading_of_the_node(plugin: str, component: str) -> None:
    meter = open_slurm_energy("n1", slurm(plugin), background=False)
    assert (meter.channels[0].device, meter.channels[0].component, meter.channels[0].meter) == (
        "machine",
        component,
        "slurm",
    )
    assert meter.read() == (171.0,)


def test_slurms_node_is_the_one_that_slurm_started_this_process_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    asked: list[str] = []
    answers = slurm()

    def ask(what: str) -> str:
        asked.append(what)
        return answers(what)

    open_slurm_energy("", ask, background=False)
    assert asked == ["configuration", "n1"]
    with pytest.raises(ConfigError, match=r"jobs\.slurm\.conf: is not a file"):
        open_slurm_energy("n1", conf=Path("nowhere.conf"))


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (slurm("gpu"), "AcctGatherEnergyType is gpu"),
        (slurm("none"), "AcctGatherEnergyType is none"),
        (slurm(watts="n/s"), "no power reading of node n1"),
        (slurm(watts="0"), "no power reading of node n1"),
        (slurm(code=1), "Slurm does not answer"),
    ],
)
def test_slurm_without_a_reading(ask, says: str) -> None:
    with pytest.raises(CapabilityError, match=says):
        open_slurm_energy("n1", ask)
