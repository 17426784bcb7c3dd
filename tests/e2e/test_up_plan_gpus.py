"""``joulery up --plan`` on a GPU that is not there: each instance a process with its share, its standby beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from joulery.app.serving.planned import _divided
from joulery.config.devices import GpuDeviceConfig
from joulery.domain.errors import ConfigError
from tests.e2e.test_up import Up
from tests.e2e.test_up_plan import planned
from tests.fakes.mps import daemon, gpu_machine
from tests.fakes.nvml import NvmlFake, gpu
from tests.runtime.plan_files import planned_site, service

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    with gpu_machine(tmp_path, monkeypatch, gpu("Tesla V100-SXM2-16GB", idle_w=50.0)) as nvml:
        yield nvml


def test_a_plan_runs_under_mps(tmp_path: Path, nvml: NvmlFake) -> None:
    site = planned_site(tmp_path, service("one", duration=2), service("two", duration=2))
    text = site.read_text()
    text = text.replace("cpu: {cores: 2}", "devices: [{mode: mps}]").replace(":Sum", ":GpuSum")
    site.write_text(text.replace("use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}", "use: [nvml]"))
    with Up(site, tmp_path, "--plan", str(planned(site))) as up:
        heard = up.until("dashboard")
        running = daemon(tmp_path)
        code, said, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    assert running is not None
    assert "core on gpu:0: " in heard
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert {one["service"]: one["failed"] - one["refused"] for one in report["services"]} == {"one": 0, "two": 0}, said
    assert report["requests_j"] == pytest.approx(sum(one["requests_j"] for one in report["services"]))
    assert report["requests_j"] + report["idle_j"] == pytest.approx(report["energy_j"]) and report["requests_j"] > 0
    assert daemon(tmp_path) is None


def test_a_plan_takes_mps_or_mig() -> None:
    site = SimpleNamespace(fleet=SimpleNamespace(devices=[GpuDeviceConfig(mode="mps"), GpuDeviceConfig(gpu=1)]))
    with pytest.raises(ConfigError, match="takes MPS, or slices") as caught:
        _divided(cast(Any, site), cast(Any, None))
    assert caught.value.pointer == "fleet.devices.1.mode"
