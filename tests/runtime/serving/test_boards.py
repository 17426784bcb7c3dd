"""Boards that services run on, where the driver names nobody who kept them busy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from joulery.accounting.charge import IdleRule
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.runtime.serving.boards import OnBoards, of_boards
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


def told(run: float, everybody: float) -> BusyTimes:
    edges_ns = (START_S + np.arange(SECONDS + 1)) * 1_000_000_000
    return BusyTimes(edges_ns, np.full(SECONDS, run), np.full(SECONDS, everybody))


def request(at_s: float, service: str = "photos", part: float = 0.5) -> RequestRecord:
    start_s = START_S + at_s
    return RequestRecord(service, "large", "r0", start_s, start_s, start_s + 0.4, Outcome.OK, 0.4, part * 0.4, 1, None)


ASKED = [request(2.1), request(2.3), request(6.5)]
ALONE = [OnBoards("photos", ("gpu:0",), 100.0)]


def charged(readings: RunReadings):
    return charge_readings(readings.traces, readings.busy, START_S, START_S + SECONDS, idle=IdleRule.WHOLE)


def test_who_nobody_names_is_told_by_the_requests() -> None:
    readings, notes = of_boards(RunReadings((board(),), {"gpu:0": told(0.0, 0.0)}), ALONE, ASKED)
    assert readings.busy["gpu:0"].app_s == pytest.approx([0, 0, 0.4, 0, 0, 0, 0.2, 0, 0, 0])
    found = charged(readings)
    assert found.run.attributed_j == pytest.approx(400.0), "what is above idle while requests ran"
    assert found.run.idle_j == pytest.approx(1000.0)
    assert found.run.energy_j == pytest.approx(1400.0) and found.other_j == 0
    assert len(notes) == 1 and "gpu:0" in notes[0]


def test_the_same_run_costs_the_same_where_the_driver_names_its_processes() -> None:
    named, notes = of_boards(RunReadings((board(),), {"gpu:0": told(1.0, 1.0)}), ALONE, ASKED)
    found = charged(named)
    assert (found.run.attributed_j, found.run.idle_j) == pytest.approx((400.0, 1000.0))
    assert notes == ()


def test_what_the_driver_says_of_others_is_believed() -> None:
    readings, notes = of_boards(RunReadings((board(),), {"gpu:0": told(0.0, 1.0)}), ALONE, ASKED)
    found = charged(readings)
    assert (found.run.attributed_j, found.other_j) == pytest.approx((0.0, 400.0))
    assert notes == ()


def test_without_a_profile_seconds_with_a_request_are_the_requests_and_others_idle() -> None:
    services = [OnBoards("photos", ("gpu:0",))]
    readings, _ = of_boards(RunReadings((board(),), {"gpu:0": told(0.0, 0.0)}), services, ASKED)
    assert math.isnan(readings.traces[0].channel.idle_w)
    found = charged(readings)
    assert (found.run.attributed_j, found.run.idle_j) == pytest.approx((600.0, 800.0))


def test_a_board_without_a_request_idles() -> None:
    two = RunReadings((board(), board("gpu:1")), {"gpu:0": told(0.0, 0.0), "gpu:1": told(0.0, 0.0)})
    services = [OnBoards("photos", ("gpu:0",), 100.0), OnBoards("more", ("gpu:1",), 90.0)]
    found = charged(of_boards(two, services, ASKED)[0])
    assert {part.device: part.energy_j for part in found.run.parts} == pytest.approx({"gpu:0": 400.0, "gpu:1": 0.0})
    assert found.run.energy_j == pytest.approx(2800.0)


def test_boards_of_one_service_share_its_idle_power_and_a_shared_board_has_the_lowest() -> None:
    two = RunReadings((board(), board("gpu:1"), board("gpu:2", idle_w=30.0), board("gpu:3")), {})
    services = [OnBoards("photos", ("gpu:0", "gpu:1"), 160.0), OnBoards("more", ("gpu:1", "gpu:2"), 140.0)]
    again = [OnBoards("unknown", ("gpu:1",)), *services, OnBoards("unknown", ("gpu:1",))]
    for order in (services, again):
        readings, notes = of_boards(two, order, [])
        watts = [trace.channel.idle_w for trace in readings.traces]
        assert watts[:3] == [80.0, 70.0, 30.0], "what a meter says itself stays"
        assert math.isnan(watts[3]), "no service runs there"
    assert notes == (), "a device nobody speaks of is its run's alone"


def test_a_request_of_an_unknown_part_of_a_board_had_it_whole() -> None:
    asked = [*ASKED[:2], ASKED[2]._replace(cpu_s=math.nan)]
    readings, _ = of_boards(RunReadings((board(),), {"gpu:0": told(0.0, 0.0)}), ALONE, asked)
    assert readings.busy["gpu:0"].app_s == pytest.approx([0, 0, 0.4, 0, 0, 0, 0.4, 0, 0, 0])
    assert charged(readings).run.attributed_j == pytest.approx(400.0)


def test_services_of_other_boards_and_unfinished_requests_are_left_out() -> None:
    lost = request(4.2)._replace(service_s=0.0, cpu_s=0.0, outcome=Outcome.CRASHED)
    asked = [*ASKED, request(0.2, "elsewhere"), lost]
    readings, _ = of_boards(RunReadings((board(),), {"gpu:0": told(0.0, 0.0)}), ALONE, asked)
    assert readings.busy["gpu:0"].app_s == pytest.approx([0, 0, 0.4, 0, 0, 0, 0.2, 0, 0, 0])
