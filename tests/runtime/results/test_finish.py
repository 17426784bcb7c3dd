"""GPUs that services run on, where the driver names no busy process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from joulery.accounting.charge import IdleRule
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.runtime.results.finish import GpuService, with_requests
from joulery.runtime.session.requests import RequestColumns
from joulery.store.run.readings import RunReadings
from tests.accounting.readings import charge_readings

START_S = 1_700_000_000
SECONDS = 10


def board(device: str = "gpu:0", idle_w: float = math.nan) -> PowerTrace:
    """100 W, and 300 W in the third second and the seventh."""
    channel = Channel(device, "board", ReadingKind.COUNTER, "nvml", Quality.MEASURED, idle_w=idle_w)
    watts = np.full(SECONDS, 100.0)
    watts[[2, 6]] = 300.0
    edges_ns = (START_S + np.arange(SECONDS + 1)) * 1_000_000_000
    return PowerTrace(channel, edges_ns, np.concatenate(([0.0], np.cumsum(watts))), 1.0)


def busy(run: float, everyone: float) -> BusyTimes:
    edges_ns = (START_S + np.arange(SECONDS + 1)) * 1_000_000_000
    return BusyTimes(edges_ns, np.full(SECONDS, run), np.full(SECONDS, everyone))


def request(at_s: float, service: str = "photos", part: float = 0.5) -> RequestRecord:
    start_s = START_S + at_s
    return RequestRecord(service, "large", "r0", start_s, start_s, start_s + 0.4, Outcome.OK, 0.4, part * 0.4, 1, None)


ASKED = [request(2.1), request(2.3), request(6.5)]
ALONE = [GpuService("photos", ("gpu:0",), 100.0)]


def charged(readings: RunReadings):
    return charge_readings(readings.traces, readings.busy, START_S, START_S + SECONDS, idle=IdleRule.WHOLE)


def test_busy_times_that_the_driver_does_not_report_come_from_the_requests() -> None:
    readings, notes = with_requests(RunReadings((board(),), {"gpu:0": busy(0.0, 0.0)}), ALONE, RequestColumns.of(ASKED))
    assert readings.busy["gpu:0"].app_s == pytest.approx([0, 0, 0.4, 0, 0, 0, 0.2, 0, 0, 0])
    found = charged(readings)
    assert found.run.attributed_j == pytest.approx(400.0), "what is above idle while requests ran"
    assert found.run.idle_j == pytest.approx(1000.0)
    assert found.run.energy_j == pytest.approx(1400.0) and found.other_j == 0
    assert len(notes) == 1 and "gpu:0" in notes[0]


def test_the_same_run_costs_the_same_where_the_driver_names_its_processes() -> None:
    named, notes = with_requests(RunReadings((board(),), {"gpu:0": busy(1.0, 1.0)}), ALONE, RequestColumns.of(ASKED))
    found = charged(named)
    assert (found.run.attributed_j, found.run.idle_j) == pytest.approx((400.0, 1000.0))
    assert notes == ()


def test_the_drivers_report_of_other_processes_counts() -> None:
    readings, notes = with_requests(RunReadings((board(),), {"gpu:0": busy(0.0, 1.0)}), ALONE, RequestColumns.of(ASKED))
    found = charged(readings)
    assert (found.run.attributed_j, found.other_j) == pytest.approx((0.0, 400.0))
    assert notes == ()


def test_without_a_profile_seconds_with_a_request_are_the_requests_and_others_idle() -> None:
    services = [GpuService("photos", ("gpu:0",))]
    readings, _ = with_requests(RunReadings((board(),), {"gpu:0": busy(0.0, 0.0)}), services, RequestColumns.of(ASKED))
    assert math.isnan(readings.traces[0].channel.idle_w)
    found = charged(readings)
    assert (found.run.attributed_j, found.run.idle_j) == pytest.approx((600.0, 800.0))


def test_a_board_without_a_request_idles() -> None:
    two = RunReadings((board(), board("gpu:1")), {"gpu:0": busy(0.0, 0.0), "gpu:1": busy(0.0, 0.0)})
    services = [GpuService("photos", ("gpu:0",), 100.0), GpuService("more", ("gpu:1",), 90.0)]
    found = charged(with_requests(two, services, RequestColumns.of(ASKED))[0])
    assert {part.device: part.energy_j for part in found.run.parts} == pytest.approx({"gpu:0": 400.0, "gpu:1": 0.0})
    assert found.run.energy_j == pytest.approx(2800.0)


def test_boards_of_one_service_share_its_idle_power_and_a_shared_board_has_the_lowest() -> None:
    two = RunReadings((board(), board("gpu:1"), board("gpu:2", idle_w=30.0), board("gpu:3")), {})
    services = [GpuService("photos", ("gpu:0", "gpu:1"), 160.0), GpuService("more", ("gpu:1", "gpu:2"), 140.0)]
    again = [GpuService("unknown", ("gpu:1",)), *services, GpuService("unknown", ("gpu:1",))]
    for order in (services, again):
        readings, notes = with_requests(two, order, RequestColumns.of([]))
        watts = [trace.channel.idle_w for trace in readings.traces]
        assert watts[:3] == [80.0, 70.0, 30.0], "what a meter says itself stays"
        assert math.isnan(watts[3]), "no service runs there"
    assert notes == (), "a device without a report is its run's alone"


def test_a_request_of_an_unknown_part_of_a_board_had_it_whole() -> None:
    asked = [*ASKED[:2], ASKED[2]._replace(cpu_s=math.nan)]
    readings, _ = with_requests(RunReadings((board(),), {"gpu:0": busy(0.0, 0.0)}), ALONE, RequestColumns.of(asked))
    assert readings.busy["gpu:0"].app_s == pytest.approx([0, 0, 0.4, 0, 0, 0, 0.4, 0, 0, 0])
    assert charged(readings).run.attributed_j == pytest.approx(400.0)


def test_services_of_other_boards_and_unfinished_requests_are_left_out() -> None:
    lost = request(4.2)._replace(service_s=0.0, cpu_s=0.0, outcome=Outcome.CRASHED)
    asked = [*ASKED, request(0.2, "elsewhere"), lost]
    readings, _ = with_requests(RunReadings((board(),), {"gpu:0": busy(0.0, 0.0)}), ALONE, RequestColumns.of(asked))
    assert readings.busy["gpu:0"].app_s == pytest.approx([0, 0, 0.4, 0, 0, 0, 0.2, 0, 0, 0])
