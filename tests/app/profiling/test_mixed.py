"""Profiles of services with variants on this machine and on other servers: whose watts they are, and how well known."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.app.profiling.service_profile import measure_profile, read_profile, write_profile
from joulery.app.profiling.upstreams import mixed_profile
from joulery.app.serving.service import service_setup
from joulery.app.wiring.site_meters import meter_specs
from joulery.config import load
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.runtime.profiling.slice_timings import Plan
from tests.app.serving.test_service import profile

SITE = """\
joulery: 1
meters: {{period: 50 ms, use: [cpu-model], cpu_model: {{idle: 20 W, max: 60 W}}}}
services:
  - name: net
    slo: {{latency: 2 s}}
    concurrency: 2
    cpu: {{cores: 1}}
    family:
      variants:
        - {{name: large, accuracy: 90 %, accuracy_source: made up,
            model: {{kind: open_inference, url: "http://127.0.0.1:{port}/net", power: 40 W}}}}
        - {{name: small, accuracy: 85 %, accuracy_source: made up,
            model: {{kind: python, target: "tests.runtime.toy_models:Double", options: {{busy_s: 0.004}}}}}}
"""


def test_a_server_has_stated_watts_and_this_machine_those_of_its_meters(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.fakes.open_inference_server", "0", "net", "0.002", str(tmp_path / "log")]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            (tmp_path / "site.yaml").write_text(SITE.format(port=int(server.stdout.readline())))
            site = load(tmp_path / "site.yaml")
            setup = service_setup(site, site.services[0], tmp_path)
            plan = Plan(warmup=2, alone=5, loaded=8)
            found = asyncio.run(measure_profile(setup, folder=None, meters=meter_specs(site.meters), plan=plan))
        finally:
            server.terminate()
    write_profile(tmp_path / "profile.json", found)
    assert read_profile(tmp_path / "profile.json").as_dict() == found.as_dict()
    (large, small) = found.entries
    assert (large.variant, large.active_w, large.quality) == ("large", 40.0, Quality.ASSUMED)
    assert small.active_w == pytest.approx(20.0, rel=0.5) and small.quality not in (None, Quality.ASSUMED)
    assert found.quality is Quality.ASSUMED, "the weakest of both"
    assert found.quality_of("small") is small.quality and found.quality_of("large") is Quality.ASSUMED
    assert bool((large.alone.cpu_s >= large.alone.service_s - 1e-6).all()), "seconds of a slot"
    assert small.alone.mean_cpu_s >= 0.004, "CPU seconds"


def test_a_server_without_stated_watts_is_one_error() -> None:
    models = {"large": ModelRef(ModelKind.REMOTE, "http://a:8000/net"), "small": ModelRef(ModelKind.PYTHON, "m:f")}
    with pytest.raises(DataError, match="cannot tell the joules of large") as caught:
        mixed_profile(profile(), models)
    assert caught.value.hint is not None and "power: 60 W" in caught.value.hint
