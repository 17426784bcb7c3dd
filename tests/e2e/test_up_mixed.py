"""A large model on a server and a small one on this machine in one family: clean grid, dirty grid, lost server."""

import json
import math
import signal
from pathlib import Path

import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind
from tests.e2e.test_up import Up
from tests.e2e.test_up_upstreams import Client, Upstream

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
SITE = """\
joulery: 1
name: mixed
mode: act
carbon: {{kind: file, path: day.csv, column: g, replay: {{day: "2026-06-10", duration: 40 s}}}}
meters: {{period: 50 ms, use: [cpu-model], cpu_model: {{idle: 20 W, max: 60 W}}}}
services:
  - name: net
    slo: {{latency: 2 s}}
    rate: 20 /s
    concurrency: 4
    profile: profile.json
    cpu: {{cores: 1}}
    policy: {{kind: clover, lambda: 15 %, base_intensity: 250 g/kWh}}
    audit: {{share: 0 %}}
    family:
      accuracy_metric: share of right answers
      variants:
        - {{name: large, accuracy: 90 %, accuracy_source: made up,
            model: {{kind: open_inference, url: "http://127.0.0.1:{port}/net", power: 40 W}}}}
        - {{name: small, accuracy: 85 %, accuracy_source: made up,
            model: {{kind: python, target: "tests.runtime.toy_models:Double", options: {{busy_s: 0.004}}}}}}
serving: {{listen: "127.0.0.1:0", drain: 2 s{gateways}}}
"""
WATTS = 40.0
WHOLE = Slice(SliceKind.WHOLE)


def profiled(folder: Path) -> None:
    """A profile as a quiet machine gives it; what is measured is tested in tests/app/profiling/test_mixed.py."""
    large, small = Timings([0.024] * 20, [0.024] * 20), Timings([0.017] * 20, [0.0042] * 20)
    entries = (
        SliceProfile("large", WHOLE, large, large, WATTS, quality=Quality.ASSUMED),
        SliceProfile("small", WHOLE, small, small, 20.0, quality=Quality.MODELLED),
    )
    write_profile(folder / "profile.json", Profile({}, entries, 20.0, Quality.ASSUMED, "made up"))


@pytest.mark.parametrize("gateways", ["", "{count: 2, state: state}"])
def test_the_policy_steers_between_a_server_and_this_machine(tmp_path: Path, gateways: str) -> None:
    rows = (f"2026-06-10T{hour:02}:00Z,{50 if hour < 12 else 800}" for hour in range(24))
    profiled(tmp_path)
    (tmp_path / "day.csv").write_text("\n".join(("timestamp_utc,g", *rows, "")))
    large = Upstream("large", tmp_path)
    try:
        serving = f", gateways: {gateways}" if gateways else ""
        (tmp_path / "site.yaml").write_text(SITE.format(port=large.port, gateways=serving))
        with Up(tmp_path / "site.yaml", tmp_path, "--json", verb="serve") as gateway:
            url = json.loads(gateway.until("\n").splitlines()[0])["url"]
            with Client(url) as client:
                client.until("large")
                client.until("small")
                large.kill()
                client.until("small", 1.0)
                answers = dict(client.answers)
            assert client.lost == []
            assert {answer.status_code for answer in answers.values()} == {200}, (
                "the small one answers for the lost one"
            )
            check_charges(answers.values())
            gateway.process.send_signal(signal.SIGTERM)
            code, _, complaint = gateway.end()
            assert code == 0, complaint
        assert gateway.survivors() == []
    finally:
        if large.process.poll() is None:
            large.kill()
    check_report(json.loads((tmp_path / "run" / "report.json").read_text()))


def check_charges(answers) -> None:
    """An upstream is charged what is stated, this machine what is modelled from its meters; no answer has the other."""
    quality = {"large": "assumed", "small": "modelled"}
    for answer in answers:
        assert answer.headers["x-joulery-quality"] == quality[answer.headers["x-joulery-variant"]]
        assert answer.json()["outputs"][0]["data"][0] > 0
    joules = [
        float(one.headers["x-joulery-energy-j"]) for one in answers if one.headers["x-joulery-variant"] == "large"
    ]
    assert min(joules) >= 0.02 * WATTS, "the server takes 20 ms"


def check_report(report) -> None:
    (service,) = report["services"]
    assert service["variants"].keys() == {"large", "small"} and min(service["variants"].values()) > 0
    assert service["upstream_quality"] == "assumed" and service["upstream_j"] > 0
    parts = ("requests_j", "serving_j", "load_generator_j", "idle_j", "unattributed_j")
    assert math.isclose(math.fsum(report[name] for name in parts), report["energy_j"], rel_tol=1e-9)
    # The CPU seconds of requests are those of the small model: 4 ms each and what surrounds it.
    here = service["variants"]["small"] * service["answered"]
    assert 0.004 * here * 0.9 <= service["requests_cpu_s"] <= 0.012 * here + 0.1
