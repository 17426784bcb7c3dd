"""What the limit of a live device sees of its services, and what becomes of what it decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.devices.power.nvidia_activity import NvidiaActivity
from joulery.adapters.devices.power.nvidia_power import NvidiaPower
from joulery.app.serving.governed.power_limits import limit_fact, limit_policy
from joulery.app.wiring.limited_devices import limited_cpus
from joulery.config.devices import PowerLimitConfig
from joulery.config.fleet import FleetConfig
from joulery.domain.decisions import Decision
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSpec
from joulery.domain.serving.engine import Outcome, QueuedRequest, ReplicaState, RequestRecord
from joulery.domain.serving.service import Slo, SloScope
from joulery.policies.clocks.limit_comparison import LimitComparison, LimitRecord
from joulery.policies.clocks.service_limit import ServiceLimitTuner
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.limited_device import LimitedDevice
from joulery.runtime.serving.limiting import AnsweredWork, PowerLimitController, llm_load, service_load, totals
from joulery.runtime.session.requests import RequestWindow
from joulery.store.leases import LeaseBook
from tests.fakes.nvml import NvmlFake, as_administrator, gpu
from tests.fakes.powercap import limits, powercap_tree
from tests.runtime.leasing.test_leases import no_watchdog

NOW_S = 1000.0
TUNER = ServiceLimitTuner("cpu")


def answered(end_s: float, service_s: float = 0.01, variant: str = "v", outcome: Outcome = Outcome.OK) -> RequestRecord:
    start_s = end_s - service_s
    return RequestRecord("sums", variant, "r0", start_s - 0.01, start_s, end_s, outcome, service_s, 0.01, 1, None)


class Site:
    """One service on two replicas, and an engine with a queue."""

    def __init__(self, *queued: QueuedRequest, slo: Slo | None = None) -> None:
        window = RequestWindow("sums", 4.0)
        self.hosted: Any = SimpleNamespace(name="sums", setup=SimpleNamespace(slo=slo or Slo(0.1, 0.95)), window=window)
        self.variant, self.queued, self.messages = "v", queued, list[str]()
        self.engine: Any = SimpleNamespace(replicas=self.replicas, backlog=lambda: self.queued)

    def replicas(self) -> tuple[Any, ...]:
        spec = SimpleNamespace(service="sums", variant=self.variant, standby=False, batch=1, slice="1 core")
        return (SimpleNamespace(spec=spec, state=ReplicaState.READY),) * 2

    def controller(self, device: LimitedDevice, holder: LeaseHolder) -> PowerLimitController:
        def loads(now_s: float) -> list[Any]:
            return [service_load(self.hosted, self.engine, now_s)]

        return PowerLimitController(
            device, TUNER, loads, self.engine, holder, tell=self.messages.append, now_s=lambda: NOW_S
        )


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaseHolder]:
    monkeypatch.setenv("JOULERY_UNGUARDED", "1")
    with LeaseHolder(LeaseBook(tmp_path / "leases"), watch=no_watchdog) as holder:
        yield holder


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = powercap_tree(tmp_path / "powercap", 1)
    monkeypatch.setenv("JOULERY_POWERCAP", str(root))
    return root


def cpus(tmp_path: Path, holder: LeaseHolder) -> LimitedDevice:
    return limited_cpus(holder, LeaseBook(tmp_path / "leases"))


def set_to(value: float) -> Decision:
    return Decision("set_power_limit", "cpu", value, TUNER.name, "because")


async def test_an_answer_is_counted_once_and_is_fresh_where_it_began_under_the_limit(
    tmp_path: Path, tree: Path, holder: LeaseHolder
) -> None:
    site = Site()
    controller = site.controller(cpus(tmp_path, holder), holder)
    for end_s in (NOW_S - 1.0, NOW_S - 0.5):
        site.hosted.window.add(answered(end_s))
    site.hosted.window.add(answered(NOW_S - 0.4, outcome=Outcome.CRASHED))
    (work,) = controller.look(NOW_S).answers
    assert (work.kind, work.count, work.fresh_count, work.size) == ("sums/v", 2, 2, 2.0)
    assert work.service_s == pytest.approx(0.02)
    assert controller.look(NOW_S).answers == ()
    await controller.act(set_to(0.75))
    site.hosted.window.add(answered(NOW_S + 2.5, 3.0))  # began before the limit was set
    site.hosted.window.add(answered(NOW_S + 2.6, 0.5))  # while the device settled: 2 s
    site.hosted.window.add(answered(NOW_S + 2.7, 0.5))
    seen = controller.look(NOW_S + 3.0)
    assert (seen.ratio, seen.set_s, seen.answers[0].count, seen.answers[0].fresh_count) == (0.75, NOW_S, 3, 2)


def test_a_queue_and_late_answers_are_pressure_and_running_requests_count_with_their_age(
    tmp_path: Path, tree: Path, holder: LeaseHolder
) -> None:
    site = Site(
        QueuedRequest("sums", NOW_S - 0.03, "v", NOW_S - 0.02),
        *(QueuedRequest("sums", NOW_S - 0.01) for _ in range(4)),
        QueuedRequest("others", NOW_S - 9.0),
    )
    for index in range(30):
        site.hosted.window.add(answered(NOW_S - 1 + index / 100, 0.01 if index < 27 else 0.2))
    seen = site.controller(cpus(tmp_path, holder), holder).look(NOW_S)
    (pressure,) = seen.services
    assert (pressure.slo_s, pressure.quantile, pressure.answers) == (0.1, 0.95, 30)
    assert pressure.oldest_s == pytest.approx(0.03)
    assert pressure.delay_s == pytest.approx(4 * (27 * 0.01 + 3 * 0.2) / 30 / 2)
    assert pressure.attainment_ratio == pytest.approx(0.9)
    assert "90.0 % within the SLO" in replace(pressure, delay_s=0.0).threat()
    assert (seen.servers, seen.running_s) == (2, pytest.approx(0.02))
    service = Site(*site.queued, slo=Slo(0.1, 0.95, SloScope.SERVICE))
    (alone,) = service.controller(cpus(tmp_path, holder), holder).look(NOW_S).services
    assert (alone.oldest_s, alone.delay_s) == (pytest.approx(0.02), 0.0)


def test_tokens_are_the_size_of_a_language_models_answer() -> None:
    answers = [
        SimpleNamespace(end_s=NOW_S, latency_s=3.0, work_s=2.0, tokens=20),
        SimpleNamespace(end_s=NOW_S, latency_s=3.0, work_s=2.0, tokens=0),  # its time in the engine is not known
    ]
    tasks = (
        SimpleNamespace(arrival_s=NOW_S - 5, start_s=NOW_S - 4, in_engine=True),
        SimpleNamespace(arrival_s=NOW_S - 6, start_s=math.nan, in_engine=False),
    )
    llm: Any = SimpleNamespace(
        name="small",
        settings=SimpleNamespace(slo=Slo(60.0, 0.99), deadline_s=300.0, max_num_seqs=8),
        traffic=SimpleNamespace(served=lambda now_s: answers),
        tasks=lambda: tasks,
    )
    load = llm_load(llm, NOW_S)
    assert load.answers == (AnsweredWork("small", NOW_S - 2, NOW_S, 2.0, 20.0),)
    assert (load.running_s, load.servers, load.pressure.oldest_s) == (4.0, 8, 6.0)


async def test_a_limit_is_leased_and_full_power_gives_the_former_one_back(
    tmp_path: Path, tree: Path, holder: LeaseHolder
) -> None:
    before = limits(tree)
    controller = Site().controller(cpus(tmp_path, holder), holder)
    assert (await controller.act(set_to(1.0)))[1] == "it has the limit that it had before"
    outcome, detail = await controller.act(set_to(0.75))
    assert (outcome, limits(tree)["intel-rapl:0/constraint_0_power_limit_uw"]) == ("applied", "90000000")
    assert "at most 90 W" in detail
    assert [lease.reason for lease in holder.held] == ["because"]
    await controller.act(set_to(1.0))
    assert (limits(tree), holder.held, controller.look(NOW_S).ratio) == (before, (), 1.0)


async def test_a_limit_that_another_process_reverted_is_no_longer_in_force(
    tmp_path: Path, tree: Path, holder: LeaseHolder
) -> None:
    controller = Site().controller(cpus(tmp_path, holder), holder)
    await controller.act(set_to(0.75))
    LeaseBook(tmp_path / "leases").remove("cpu.power")
    assert holder.renew() == ("cpu.power",)
    assert controller.look(NOW_S).ratio == 1.0


async def test_a_device_that_refuses_is_left_at_full_power(tmp_path: Path, tree: Path, holder: LeaseHolder) -> None:
    site = Site()
    controller = site.controller(cpus(tmp_path, holder), holder)
    logged: list[Any] = []
    history: Any = SimpleNamespace(add_policy=logged.append, add_step=None, add_decision=None)
    driver = controller.driver(history)
    assert logged == [TUNER]

    def refuse(wanted: object) -> None:
        raise CapabilityError("the firmware locks the CPU power limit", resource="cpu")

    controller.device.device.apply = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(CapabilityError, match="firmware"):
        await controller.act(set_to(0.75))
    assert controller.look(NOW_S).ratio == 1.0
    assert isinstance(driver.policy, ServiceLimitTuner)
    assert driver.policy.ratios == ()
    assert site.messages == ["cpu keeps full power: its power limit could not be set"]
    assert holder.held == ()


def test_energy_that_cannot_be_read_is_reported(tmp_path: Path, tree: Path, holder: LeaseHolder) -> None:
    site = Site()
    controller = site.controller(cpus(tmp_path, holder), holder)
    controller.look(NOW_S)
    assert site.messages == []
    (tree / "intel-rapl:0/energy_uj").write_text("")
    assert math.isnan(controller.look(NOW_S + 1.0).energy_j)
    assert site.messages == ["the energy of cpu cannot be read: no power limit is tried meanwhile"]


def test_other_replicas_are_another_arrangement(tmp_path: Path, tree: Path, holder: LeaseHolder) -> None:
    site = Site()
    controller = site.controller(cpus(tmp_path, holder), holder)
    first = controller.look(NOW_S).arrangement
    assert first == "2 sums/v on 1 core, batch 1"
    site.variant = "w"
    assert controller.look(NOW_S).arrangement != first


def board(nvml: NvmlFake, full_w: float | None = None) -> LimitedDevice:
    device = NvidiaPower(0, nvml)
    able = device.capability()
    return LimitedDevice(
        0, able.device, device, DeviceSpec("nvidia-power", {"gpu": 0}), NvidiaActivity(0, nvml), able.name, able.uuid,
        full_w or able.default_w, able.limits_w[0],
    )  # fmt: skip


@given(full_w=st.floats(105.0, 400.0), minimum=st.floats(0.05, 0.99))
def test_no_limit_ever_lies_outside_what_the_device_takes(full_w: float, minimum: float) -> None:
    device = board(NvmlFake(gpu("NVIDIA A100-SXM4-40GB")), full_w)
    config = PowerLimitConfig.model_validate({"device": "nvidia", "min": minimum})
    try:
        policy = limit_policy(config, device)
    except ConfigError as error:
        assert max(minimum, 100.0 / full_w) > 0.917 - 1e-5, error
        return
    low_w, high_w = device.device.capability().limits_w
    assert policy.ratios
    assert all(low_w <= device.limit_w(ratio) <= min(high_w, full_w) for ratio in policy.ratios)
    assert all(ratio >= minimum - 1e-5 for ratio in policy.ratios)


async def test_a_gpu_is_limited_by_the_same_controller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, holder: LeaseHolder
) -> None:
    as_administrator(monkeypatch)
    nvml = NvmlFake(gpu("NVIDIA A30", busy=100, demand_mw=165_000))
    device = board(nvml)
    config = PowerLimitConfig.model_validate({"device": "nvidia", "min": "70 %"})
    assert limit_fact(device, limit_policy(config, device)).startswith("gpu:0 (NVIDIA A30): 123.75 to 165 W")
    controller = Site().controller(device, holder)
    await controller.act(set_to(0.75))
    assert nvml.boards[0]["limit_mw"] == 124_000
    assert controller.look(NOW_S).ratio == 0.75
    await controller.act(set_to(1.0))
    assert nvml.boards[0]["limit_mw"] == 165_000


def test_what_was_learned_is_reported(tmp_path: Path, tree: Path, holder: LeaseHolder) -> None:
    controller = Site().controller(cpus(tmp_path, holder), holder)
    assert controller.summary()["limits"] == []
    history: Any = SimpleNamespace(add_policy=lambda policy: None, add_step=None, add_decision=None)
    driver = controller.driver(history)
    records = (
        LimitRecord(0.833, (LimitComparison(0.02, -0.1), LimitComparison(0.03, -0.1), LimitComparison(0.04, -0.1))),
        LimitRecord(0.75, (LimitComparison(0.2, -0.2),)),
    )
    driver._stepper.state = replace(driver.state, records=records)
    found = controller.summary()
    assert (found["device"], found["full_w"], found["best_ratio"]) == ("cpu", 120.0, 0.833)
    assert found["best_w"] == pytest.approx(99.96)
    first, second = found["limits"]
    assert first["slowdown"] == pytest.approx(math.exp(0.03))
    assert first["energy_ratio"] == pytest.approx(math.exp(-0.1))
    assert first["slowdown_low"] < first["slowdown"] < first["slowdown_high"] < 1.1
    assert (first["within_bound"], second["within_bound"], second["comparisons"]) == (True, False, 1)
    assert math.isnan(second["slowdown_high"])


def test_totals_by_kind() -> None:
    work = [AnsweredWork("b", 5.0, 6.0, 1.0, 2.0), AnsweredWork("a", 3.0, 6.0, 3.0, 1.0)]
    a, b = totals(work, 4.0)
    assert (a.kind, a.count, a.fresh_count, a.service_s, a.seconds_a_size) == ("a", 1, 0, 3.0, 0.0)
    assert (b.kind, b.count, b.fresh_count, b.size, b.seconds_a_size) == ("b", 1, 1, 2.0, 0.5)


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        ({"power_limits": [{"device": "cpu", "lease": "1 s"}]}, "at least twice the period"),
        ({"power_limits": [{"device": "cpu", "trial": "100 ms"}]}, "between the period and the review"),
        ({"power_limits": [{"device": "cpu", "max_slowdown": 0.9}]}, "max_slowdown"),
        ({"power_limits": [{"device": "cpu", "baseline": "0 %"}]}, "baseline"),
        ({"power_limits": [{"device": "cpu"}, {"device": "cpu"}]}, "is listed twice"),
        ({"clocks": [{"device": "cpu"}], "power_limits": [{"device": "cpu"}]}, "a governor sets the clock"),
    ],
)
def test_sections_that_make_no_sense(fleet: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FleetConfig.model_validate({key: tuple(entries) for key, entries in fleet.items()})


def test_a_clock_and_a_limit_of_different_devices_fit() -> None:
    both = {"clocks": ({"device": "cpu"},), "power_limits": ({"device": "nvidia"}, {"device": "nvidia", "gpu": 1})}
    assert len(FleetConfig.model_validate(both).power_limits) == 2
