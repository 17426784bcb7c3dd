"""What a live governor sees of a service, and what becomes of what it decides."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from joulery.app.wiring.governed_clocks import governed_clock
from joulery.config.devices import ClockConfig
from joulery.config.site import Mode
from joulery.domain.decisions import Decision
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import Outcome, QueuedRequest, RequestRecord
from joulery.domain.serving.service import Slo
from joulery.policies.clocks.observation import ColocatedService, Pending, Work
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.plans.colocated import colocated_services
from joulery.runtime.session.requests import RequestWindow
from joulery.store.leases import LeaseBook
from tests.fakes.cpufreq import cpu_machine, settings
from tests.runtime.leasing.test_leases import no_watchdog

NOW_S = 1000.0


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return cpu_machine(tmp_path, monkeypatch)


def config(**changes: Any) -> ClockConfig:
    return ClockConfig.model_validate({"device": "cpu", **changes})


def answered(latency_s: float, end_s: float, service: str = "sums") -> RequestRecord:
    start_s = end_s - 0.01
    return RequestRecord(service, "v", "r0", end_s - latency_s, start_s, end_s, Outcome.OK, 0.01, 0.01, 1, None)


class Site:
    """One service of 10 ms requests on two replicas, and an engine with a queue."""

    def __init__(self, *records: RequestRecord, queued: tuple[QueuedRequest, ...] = (), name: str = "sums") -> None:
        self.messages: list[str] = []
        window = RequestWindow(name, 4.0)
        for record in records:
            window.add(record)
        setup = SimpleNamespace(slo=Slo(0.1, 0.95))
        self.hosted: Any = SimpleNamespace(name=name, setup=setup, profile=None, window=window, rate_rps=50.0)
        replicas = tuple(
            SimpleNamespace(spec=SimpleNamespace(service=name, variant="v", standby=False)) for _ in range(2)
        )
        self.engine: Any = SimpleNamespace(replicas=lambda: replicas, backlog=lambda: queued)

    def keeper(self, clock: ClockConfig, mode: Mode = Mode.ACT, holder: LeaseHolder | None = None) -> ClockController:
        return ClockController(
            governed_clock(clock, mode),
            lambda now_s: colocated_services([self.hosted], self.engine, now_s),
            mode,
            holder,
            tell=self.messages.append,
        )


def test_what_waits_what_comes_and_how_late_it_was(tree: Path) -> None:
    records = [answered(0.02, NOW_S - 3.9 + k / 50) for k in range(190)] + [answered(0.09, NOW_S - 0.01)]
    queued = (
        QueuedRequest("sums", NOW_S - 0.03, "v", NOW_S - 0.005),
        QueuedRequest("sums", NOW_S - 0.01),
        QueuedRequest("others", NOW_S - 5.0),
    )
    view = Site(*records, queued=queued).keeper(config()).look(NOW_S)
    assert (view.device, view.clock_mhz, view.shortest_slo_s) == ("cpu", 3200.0, 0.1)
    assert [round(one.deadline_s, 6) for one in view.waiting] == [NOW_S + 0.07, NOW_S + 0.09]
    # half of the first is done; the second runs beside it; at half the clock it takes twice as long
    assert view.waiting[0].finish_s[-1] == pytest.approx(0.005)
    assert view.waiting[1].finish_s[-1] == pytest.approx(0.01)
    assert [one.queued for one in view.waiting] == [False, True]
    half = int(np.searchsorted(governed_clock(config(), Mode.ACT).clocks_mhz, 1600.0))
    assert view.waiting[1].finish_s[half] == pytest.approx(0.02)
    assert view.hosted == ((0.1, pytest.approx(0.01)),)
    (partition,) = view.partitions
    assert partition.latency_s == pytest.approx(0.02, abs=0.01)
    assert view.steady is not None
    assert np.all(np.diff(view.steady.tail_ratio) <= 0)


def test_nothing_at_all_is_idle(tree: Path) -> None:
    view = Site().keeper(config()).look(NOW_S)
    assert view.idle
    assert view.partitions[0].latency_s == 0.0


def test_services_that_share_a_device_share_its_time(tree: Path) -> None:
    records = [answered(0.02, NOW_S - 3.9 + k / 50) for k in range(190)]
    alone, site = Site(*records), Site(*records)
    one = alone.keeper(config())
    both = ClockController(
        one.clock,
        lambda now_s: colocated_services([site.hosted, alone.hosted], site.engine, now_s),
        Mode.ACT,
        None,
    )
    site.hosted.name = "other"
    first, second = one.look(NOW_S).steady, both.look(NOW_S).steady
    assert first is not None
    assert second is not None
    assert second.tail_ratio[-1] > first.tail_ratio[-1]


async def test_acting_takes_a_lease_and_advice_changes_nothing(tree: Path, tmp_path: Path) -> None:
    before = settings(tree)
    wanted = Decision("set_clock", "cpu", 2400.0, "predictive", "because")
    advising = Site().keeper(config(), Mode.SHADOW)
    assert await advising.act(wanted) == ("shadowed", "mode shadow: nothing was changed")
    assert settings(tree) == before
    assert advising.look(NOW_S).clock_mhz == 2400.0
    with LeaseHolder(LeaseBook(tmp_path / "leases"), watch=no_watchdog) as holder:
        acting = Site().keeper(config(), holder=holder)
        outcome, detail = await acting.act(wanted)
        assert (outcome, acting.look(NOW_S).clock_mhz) == ("applied", 2400.0)
        assert "full clock" in detail
        assert [lease.reason for lease in holder.held] == ["because"]
        acting.pinned = lambda: True
        assert (await acting.act(Decision("set_clock", "cpu", 1600.0, "p", "")))[0] == "advised"
        assert acting.look(NOW_S).clock_mhz == 2400.0
        assert (await acting.act(Decision("scale_out", "cpu", 1, "p", "")))[0] == "advised"
    assert settings(tree) == before


def test_a_plan_bounds_the_governor(tree: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"gpus": [{"clock_floor_mhz": 200, "clock_ceiling_mhz": 900},'
        ' {"clock_floor_mhz": 400, "clock_ceiling_mhz": 1100}]}'
    )
    first = governed_clock(config(device="emulated", plan=plan), Mode.ACT)
    assert (first.clocks_mhz[0], first.clocks_mhz[-1]) == (200, 860)
    second = governed_clock(config(device="emulated", plan=plan, plan_gpu=2, max="1 GHz"), Mode.ACT)
    assert (second.clocks_mhz[0], second.clocks_mhz[-1]) == (440, 980)


def test_bounds_knees_and_who_may_not(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    found = governed_clock(config(min="2 GHz", max="2.5 GHz", knee="1 GHz"), Mode.ACT)
    assert (found.clocks_mhz[0], found.clocks_mhz[-1], found.knee_mhz, found.knee_assumed) == (2000, 2500, 1000, False)
    assert governed_clock(config(), Mode.ACT).knee_assumed
    with pytest.raises(ConfigError, match="no clock within these bounds"):
        governed_clock(config(min="5 GHz"), Mode.ACT)
    emulated = governed_clock(config(device="emulated"), Mode.ACT)
    assert (emulated.name, emulated.knee_mhz, emulated.knee_assumed) == ("emulated:0", 1004.0, False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert governed_clock(config(), Mode.ADVISE).name == "cpu"
    with pytest.raises(CapabilityError, match="may not be set") as caught:
        governed_clock(config(), Mode.ACT)
    assert caught.value.grant == "sudo chmod a+w /sys/devices/system/cpu/cpu*/cpufreq/scaling_m*_freq"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"governor": "fixed"}, "needed with governor fixed"),
        ({"clock": "1 GHz"}, "goes with governor fixed"),
        ({"min": "2 GHz", "max": "1 GHz"}, "is above max"),
        ({"lease": "1 s"}, "at least twice the period"),
    ],
)
def test_site_files_that_make_no_sense(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(**changes)


def test_an_engine_without_a_backlog_is_governed_by_arrivals(tree: Path) -> None:
    site = Site(*[answered(0.02, NOW_S - 3.9 + k / 50) for k in range(190)])
    del site.engine.backlog
    view = site.keeper(config()).look(NOW_S)
    assert view.waiting == ()
    assert view.steady is not None
    assert math.isfinite(view.steady.tail_ratio[-1])


async def test_work_is_counted_at_the_clock_that_is_set_and_at_full_clock_where_nothing_is(
    tree: Path, tmp_path: Path
) -> None:
    queued = (QueuedRequest("sums", NOW_S - 0.01, "v", NOW_S - 0.005),)
    site = Site(*[answered(0.02, NOW_S - 1.0)], queued=queued)
    half = Decision("set_clock", "cpu", 1600.0, "predictive", "because")
    advising = site.keeper(config(), Mode.ADVISE)
    await advising.act(half)
    assert advising.look(NOW_S).waiting[0].finish_s[-1] == pytest.approx(0.005)
    assert advising.work_clock.rate == 1.0
    with LeaseHolder(LeaseBook(tmp_path / "leases"), watch=no_watchdog) as holder:
        acting = site.keeper(config(), holder=holder)
        await acting.act(half)
        assert acting.work_clock.rate == pytest.approx(0.5)
        # 5 ms at half the clock did 2.5 ms of 10
        assert acting.look(NOW_S).waiting[0].finish_s[-1] == pytest.approx(0.0075)


async def test_device_loss_is_reported_and_its_services_go_on(tree: Path) -> None:
    site = Site(*[answered(0.02, NOW_S - 1.0)])
    keeper = site.keeper(config())

    def gone() -> None:
        raise CapabilityError("gpu:0 has fallen off the bus", resource="gpu:0")

    keeper.clock.device.observe = gone  # type: ignore[method-assign,assignment]
    assert keeper.look(NOW_S).clock_mhz == 3200.0
    assert "fallen off the bus" in site.messages[0]


def test_residents_take_turns_by_arrival_each_in_an_order_of_its_own(tree: Path) -> None:
    slo = Slo(10.0)
    work = Work(1.0, 1.0, 0.0, 1, 0.0)
    text = ColocatedService(
        "llm", slo, work, [Pending(5.0, 0.5, 0.0), Pending(1.0, 2.0, 0.0), Pending(7.0, 3.0, 0.0)], []
    )
    sums = ColocatedService("sums", slo, work, [Pending(2.0, 0.25, 0.0), Pending(6.0, 0.25, 0.0)], [])
    keeper = ClockController(governed_clock(config(), Mode.ADVISE), lambda now_s: [text, sums], Mode.ADVISE, None)
    view = keeper.look(8.0)
    assert [float(one.finish_s[-1]) for one in view.waiting] == [0.25, 0.75, 2.75, 3.0, 6.0]
    assert [one.deadline_s for one in view.waiting] == [12.0, 15.0, 11.0, 16.0, 17.0]
    assert view.hosted == ((10.0, 1.0), (10.0, 1.0))
