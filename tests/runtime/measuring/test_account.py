import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.charge import IdleRule
from joulery.accounting.steps import NS_PER_S
from joulery.domain.energy.carbon import CarbonSeries, Signal
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.measuring.account import NO_SOURCE, account, account_again, intensity
from joulery.runtime.measuring.terms import IDLE_RULES, Settings, Span, Terms
from joulery.store.run.directory import create_run, open_run
from joulery.store.run.readings import RunReadings, save_readings
from joulery.ui.cli.measure import command

T0_S = 1_700_000_000
SECONDS = 10


def trace(device: str, watts: float, *, component: str = "package", meter: str = "rapl", **more: float) -> PowerTrace:
    quality = Quality.MODELLED if "band_ratio" in more else Quality.MEASURED
    channel = Channel(device, component, ReadingKind.COUNTER, meter, quality, **more)
    t_ns = (T0_S + np.arange(-1, SECONDS + 2)) * NS_PER_S
    return PowerTrace(channel, t_ns, 1000.0 + watts * np.arange(len(t_ns)), 1.0)


def busy(run_s: float, all_s: float, cpus: int = 4) -> BusyTimes:
    edges = (T0_S + np.arange(-1, SECONDS + 2)) * NS_PER_S
    return BusyTimes(edges, np.full(len(edges) - 1, run_s), np.full(len(edges) - 1, all_s), cpus)


def span(seconds: float = SECONDS, cpu_s: float = 0.0) -> Span:
    return Span(7 * NS_PER_S, round((7 + seconds) * NS_PER_S), (T0_S - 7) * NS_PER_S, cpu_s, 0)


class Grid:
    """A source that knows one hour."""

    def __init__(self, start_s: float = T0_S - 600, g_per_kwh: float = 360.0) -> None:
        self.series = CarbonSeries("XX", [start_s, start_s + 3600], [g_per_kwh], source="a test")
        self.asked: list[tuple[float, float]] = []

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        self.asked.append((t0_s, t1_s))
        if not (self.series.start_s <= t0_s and t1_s <= self.series.end_s):
            raise DataError("the test knows nothing of that", hint="ask for another hour")
        return self.series

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        raise AssertionError


def test_a_run_is_charged_its_share_of_a_socket() -> None:
    readings = RunReadings((trace("cpu:0", 100.0),), {"cpu:0": busy(1.0, 4.0)})
    report = account(readings, span(), Terms(), Grid(g_per_kwh=360.0)).report
    assert report["energy_j"] == pytest.approx(250)
    assert report["other_j"] == pytest.approx(750)
    assert report["carbon_g"] == pytest.approx(250 * 360 / 3.6e6)
    assert (report["idle_j"], report["unattributed_j"], report["coverage_ratio"]) == (0.0, 0.0, 1.0)
    assert (report["duration_s"], report["exit_code"], report["idle_rule"]) == (10.0, 0, "whole")
    assert (report["carbon_reason"], report["carbon_source"], report["schema"]) == (None, "a test", "joulery.report/1")
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("rule", "idle_j", "other_idle_j"), [("whole", 200.0, 0.0), ("share", 50.0, 150.0), ("none", 0.0, 200.0)]
)
def test_idle_is_paid_by_rule_and_nothing_is_lost(rule: str, idle_j: float, other_idle_j: float) -> None:
    readings = RunReadings((trace("cpu:0", 100.0, idle_w=20.0, band_ratio=0.5),), {"cpu:0": busy(1.0, 4.0)})
    made = account(readings, span(), Terms(idle=rule), None)
    assert made.report["idle_j"] == pytest.approx(idle_j)
    assert made.report["other_idle_j"] == pytest.approx(other_idle_j)
    assert made.report["parts"][0]["energy_j"] == pytest.approx(200)
    assert made.charged.run.energy_j + made.charged.rest.energy_j == pytest.approx(1000)
    assert made.report["band_j"] == pytest.approx(0.5 * (200 + idle_j))


def test_a_gpu_without_other_known_processes_is_the_runs_own() -> None:
    readings = RunReadings((trace("gpu:0", 300.0, component="board", meter="nvml"),), {"cpu:0": busy(1.0, 4.0)})
    report = account(readings, span(), Terms(), None).report
    assert report["parts"] == [
        {
            "device": "gpu:0",
            "component": "board",
            "energy_j": pytest.approx(3000),
            "quality": "measured",
            "meter": "nvml",
            "band_j": 0.0,
            "carbon_g": None,
        }
    ]
    assert report["other_j"] == 0.0


def test_a_gpu_others_are_on_is_shared_or_unattributed() -> None:
    traces = (trace("gpu:0", 300.0, component="board"), trace("gpu:1", 100.0, component="board"))
    readings = RunReadings(traces, {"gpu:0": busy(0.25, 1.0), "gpu:1": busy(math.nan, math.nan)})
    report = account(readings, span(), Terms(), None).report
    energies = {part["device"]: part["energy_j"] for part in report["parts"]}
    assert energies["gpu:0"] == pytest.approx(750)
    assert energies.get("gpu:1", 0.0) == 0.0
    assert report["unattributed_j"] == pytest.approx(1000)
    assert report["other_j"] == pytest.approx(2250)


def test_the_platform_is_shared_by_all_sockets_together() -> None:
    readings = RunReadings(
        (trace("machine", 100.0, component="psys"),), {"cpu:0": busy(1.0, 1.0), "cpu:1": busy(0.0, 3.0)}
    )
    assert account(readings, span(), Terms(), None).report["energy_j"] == pytest.approx(250)


def test_energy_of_a_device_without_known_processes_is_unattributed() -> None:
    report = account(RunReadings((trace("cpu:0", 100.0),)), span(), Terms(), None).report
    assert (report["unattributed_j"], report["parts"][0]["energy_j"] if report["parts"] else 0) == (
        pytest.approx(1000),
        0,
    )


def test_nothing_read_is_nothing_known() -> None:
    report = account(RunReadings(), span(), Terms(), Grid()).report
    assert [report[k] for k in ("energy_j", "idle_j", "unattributed_j", "other_j", "carbon_g")] == [None] * 5
    assert (report["coverage_ratio"], report["duration_s"]) == (0.0, 10.0)


def test_a_reading_that_ends_early_lowers_the_coverage() -> None:
    short = trace("cpu:0", 100.0)
    readings = RunReadings(
        (PowerTrace(short.channel, short.t_ns[:6], short.values[:6], 1.0),), {"cpu:0": busy(1.0, 1.0)}
    )
    report = account(readings, span(), Terms(), None).report
    assert report["coverage_ratio"] == pytest.approx(0.4)
    assert report["energy_j"] == pytest.approx(400)


def test_faults_of_a_counter_are_noted() -> None:
    whole = trace("cpu:0", 100.0)
    values = whole.values.copy()
    values[5:] -= 1400
    readings = RunReadings(
        (PowerTrace(whole.channel, whole.t_ns, values, 1.0),), {"cpu:0": busy(1.0, 1.0)}, notes=("a",)
    )
    report = account(readings, span(), Terms(), None, ("b",)).report
    assert report["notes"][0] == "a"
    assert "ran backwards" in report["notes"][1]
    assert report["notes"][2] == "b"
    assert report["coverage_ratio"] == pytest.approx(0.9)


def test_the_systems_own_account_completes_ticks_that_round_down() -> None:
    readings = RunReadings((trace("cpu:0", 100.0),), {"cpu:0": busy(0.1, 4.0)})
    # 12 intervals of 0.1 s were seen; the system says it was twice that.
    assert account(readings, span(cpu_s=2.4), Terms(), None).report["energy_j"] == pytest.approx(50)
    assert account(readings, span(cpu_s=1.0), Terms(), None).report["energy_j"] == pytest.approx(25)


def test_a_run_too_short_for_ticks_still_has_the_time_the_system_knows() -> None:
    readings = RunReadings((trace("cpu:0", 100.0),), {"cpu:0": busy(0.0, 4.0), "gpu:9": busy(0.0, 0.0)})
    report = account(readings, span(cpu_s=12.0), Terms(), None).report
    assert report["energy_j"] == pytest.approx(250)
    assert report["cpu_s"] == 12.0


def test_no_source_is_said() -> None:
    report = account(RunReadings((trace("cpu:0", 1.0),)), span(), Terms(), None).report
    assert (report["carbon_g"], report["carbon_reason"]) == (None, NO_SOURCE)


def test_a_source_that_does_not_know_the_time_gives_no_grams_and_a_reason() -> None:
    report = account(RunReadings((trace("cpu:0", 1.0),)), span(), Terms(), Grid(start_s=0)).report
    assert report["carbon_g"] is None
    assert report["carbon_reason"] == "the test knows nothing of that; ask for another hour"
    assert report["carbon_coverage_ratio"] == 0.0


def test_an_intensity_known_for_a_part_counts_that_part_and_says_so() -> None:
    class Half(Grid):
        def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
            return CarbonSeries("XX", [t0_s, t0_s + 4, t1_s], [360.0, math.nan], source="half")

    readings = RunReadings((trace("cpu:0", 100.0),), {"cpu:0": busy(1.0, 1.0)})
    report = account(readings, span(), Terms(), Half()).report
    assert report["carbon_g"] == pytest.approx(400 * 360 / 3.6e6)
    assert report["carbon_coverage_ratio"] == pytest.approx(0.4)
    assert "40.0%" in report["carbon_reason"]


def test_another_time_is_taken_for_the_intensity_alone_and_labelled() -> None:
    grid = Grid(start_s=5000.0)
    readings = RunReadings((trace("cpu:0", 100.0),), {"cpu:0": busy(1.0, 1.0)})
    made = account(readings, span(), Terms(carbon_at_s=5100.0), grid)
    assert grid.asked == [(5100.0, 5110.0)]
    assert made.report["carbon_g"] == pytest.approx(0.1)
    assert made.report["carbon_quality"] == "assumed"
    assert made.report["carbon_source"] == "a test, of another time"
    assert made.report["start_s"] == T0_S


@given(at_s=st.floats(0, 2e9), t0_s=st.floats(1e9, 2e9))
def test_a_moved_series_says_the_same_at_the_moved_time(at_s: float, t0_s: float) -> None:
    class Steps(Grid):
        def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
            return CarbonSeries("XX", [at_s - 10, at_s + 5, at_s + 50], [1.0, 2.0], signal=Signal.MARGINAL, source="x")

    series, reason = intensity(Steps(), t0_s, t0_s + 20, at_s)
    assert series is not None
    assert reason is None
    assert (series.signal, series.quality) == (Signal.MARGINAL, Quality.ASSUMED)
    assert series.at([t0_s, t0_s + 4.99, t0_s + 5.01, t0_s + 20]).tolist() == [1.0, 1.0, 2.0, 2.0]


def kept(tmp_path: Path, *, ended: bool, started: bool = True, readings: RunReadings | None = None) -> Path:
    folder = tmp_path / "run"
    writer = create_run(folder, kind="measure", argv=["x"], details={"terms": Terms(idle="share").to_dict()})
    if started:
        writer.log("started", t_s=float(T0_S), monotonic_ns=7 * NS_PER_S, pid=1)
    if ended:
        writer.log("ended", monotonic_ns=17 * NS_PER_S, cpu_s=0.0, exit_code=3)
    writer.log("warning", text="something")
    if readings is not None:
        save_readings(readings, writer)
    if ended:
        writer.close()
    return folder


READINGS = RunReadings(
    (trace("cpu:0", 100.0),),
    {"cpu:0": busy(1.0, 4.0)},
    offset_ns=(T0_S - 7) * NS_PER_S,
    end_ns=(T0_S + 4) * NS_PER_S,
)


def test_a_run_is_accounted_again_from_what_it_keeps(tmp_path: Path) -> None:
    report = account_again(open_run(kept(tmp_path, ended=True, readings=READINGS)), None).report
    assert report["energy_j"] == pytest.approx(250)
    assert (report["exit_code"], report["idle_rule"], report["duration_s"]) == (3, "share", 10.0)
    assert report["notes"] == ["something"]


def test_a_killed_run_is_accounted_until_its_last_reading(tmp_path: Path) -> None:
    report = account_again(open_run(kept(tmp_path, ended=False, readings=READINGS)), None).report
    assert report["duration_s"] == pytest.approx(4)
    assert report["energy_j"] == pytest.approx(100)
    assert report["exit_code"] is None
    assert "killed" in report["notes"][-1]


def test_a_run_killed_before_it_was_read_has_nothing_to_say(tmp_path: Path) -> None:
    report = account_again(open_run(kept(tmp_path, ended=False)), None).report
    assert (report["duration_s"], report["coverage_ratio"]) == (0.0, 1.0)


def test_what_is_no_measured_run_is_refused(tmp_path: Path) -> None:
    create_run(tmp_path / "up", kind="up").close()
    with pytest.raises(DataError, match="kind up, not measure"):
        account_again(open_run(tmp_path / "up"), None)
    with pytest.raises(DataError, match="ended before the command started"):
        account_again(open_run(kept(tmp_path, ended=False, started=False)), None)


@pytest.mark.parametrize("period_s", [0.0, -1.0, 0.0009, 1.1, math.inf, math.nan])
def test_periods_have_bounds(period_s: float) -> None:
    with pytest.raises(ConfigError, match="not a sampling period"):
        Settings(period_s)


@pytest.mark.parametrize(
    ("terms", "says"), [({"idle": "half"}, "not a rule"), ({"pue": 0.9}, "not a PUE"), ({"pue": math.inf}, "not a PUE")]
)
def test_terms_are_checked(terms: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Terms(**terms)  # type: ignore[arg-type]


def test_rules_are_named_once_for_all() -> None:
    assert tuple(rule.value for rule in IdleRule) == IDLE_RULES
    (option,) = (parameter for parameter in command.params if parameter.name == "idle")
    assert tuple(option.type.choices) == IDLE_RULES  # type: ignore[attr-defined]


def test_facility_overhead_is_part_of_the_grams() -> None:
    readings = RunReadings((trace("cpu:0", 100.0),), {"cpu:0": busy(1.0, 1.0)})
    report = account(readings, span(), Terms(pue=1.5), Grid()).report
    assert (report["energy_j"], report["pue"]) == (pytest.approx(1000), pytest.approx(1.5))
    assert report["carbon_g"] == pytest.approx(0.15)
