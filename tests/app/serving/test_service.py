import math
import os

import pytest

from joulery.app.serving.service import choose, cores_of, demand_rps, largest_capacity_rps, model_ref, service_setup
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.parsing.reading import load
from joulery.domain.errors import CapabilityError, ConfigError, InfeasibleError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slo
from joulery.policies.serving.layout_space import cpu_slices
from joulery.runtime.serving.controller import queue_limit
from tests.runtime.site_files import toy_site


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3})


def profile(**factors: float) -> Profile:
    entries = []
    for variant, seconds in (("small", 0.004), ("large", 0.01)):
        for cores in (1, 2):
            timings = Timings([seconds / cores * 1.1], [seconds * (1.2 if cores == 2 else 1)])
            entries.append(SliceProfile(variant, cpu_slices((cores,))[0], timings, timings, 10.0))
    return Profile({}, tuple(entries), 20.0, Quality.MODELLED, "cpu-model")


def opened(tmp_path, changed=None):
    site = load(toy_site(tmp_path, changed=changed))
    return site, site.services[0], service_setup(site, site.services[0], tmp_path)


def test_a_service_on_this_machine(tmp_path):
    _, _, setup = opened(tmp_path)
    assert (setup.name, setup.owner, setup.cores, setup.slo) == ("sums", "tests", (3, 5), Slo(0.5))
    assert setup.partitions == (cpu_slices((2,)), cpu_slices((1, 1)))
    assert len(setup.candidates) == 2 + 3
    assert setup.models["small"] == ModelRef(ModelKind.PYTHON, "tests.runtime.toy_models:Sum", '{"busy_s": 0.002}')


def test_a_cut_in_the_site_file_is_kept(tmp_path):
    _, _, setup = opened(tmp_path, {"cores: 2": "slices: [1]"})
    assert setup.cores == (3,) and setup.partitions == (cpu_slices((1,)),) and len(setup.candidates) == 2


def test_more_cores_than_there_are(tmp_path):
    with pytest.raises(CapabilityError, match="3 CPU cores, 2") as caught:
        opened(tmp_path, {"cores: 2": "cores: 3"})
    assert caught.value.hint == "set fleet.cpu.cores to 2 or less"
    _, _, setup = opened(tmp_path, {"fleet: {cpu: {cores: 2}}\n": ""})
    assert setup.cores == (3, 5), "every core when nothing is said"


def test_kinds_of_models(tmp_path, monkeypatch):
    _, config, _ = opened(tmp_path)
    (tmp_path / "m.onnx").write_bytes(b"x")
    onnx = {
        'kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.002}': "kind: onnx, path: m.onnx",
        'kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.006}': (
            "kind: efficientnet-lite, size: 1"
        ),
    }
    built = []
    monkeypatch.setattr(
        "joulery.app.serving.service.lite_file", lambda name, cache: built.append(name) or cache / "lite.onnx"
    )
    _, _, setup = opened(tmp_path, onnx)
    assert setup.models["small"] == ModelRef(ModelKind.ONNX, str(tmp_path / "m.onnx"))
    assert setup.models["large"] == ModelRef(ModelKind.ONNX, str(tmp_path / "lite.onnx")) and built == ["lite1"]
    plain = config.family.variants[0].model.model_copy(update={"options": {}})
    assert model_ref(plain, tmp_path).options == ""


def test_the_demand_is_the_services_else_the_loads_else_a_share_of_the_capacity(tmp_path):
    site, config, setup = opened(tmp_path)
    assert demand_rps(site, config, setup, profile()) == 30.0
    site, config, setup = opened(tmp_path, {"    slo:": "    rate: 70 /s\n    slo:"})
    assert demand_rps(site, config, setup, profile()) == 70.0
    site, config, setup = opened(tmp_path, {"rate: 30 /s": "utilisation: 50 %"})
    assert largest_capacity_rps(setup, profile()) == pytest.approx(2 / 0.011)
    assert demand_rps(site, config, setup, profile()) == pytest.approx(1 / 0.011)
    (tmp_path / "a.csv").write_text("arrival_s\n" + "\n".join(map(str, range(10))))
    recorded = {"kind: poisson, rate: 30 /s,": "kind: trace, path: a.csv,"}
    site, config, setup = opened(tmp_path, recorded)
    assert demand_rps(site, config, setup, profile()) == 1.0, "three arrivals within the three seconds of the load"
    text = toy_site(tmp_path).read_text()
    (tmp_path / "site.yaml").write_text("".join(line for line in text.splitlines(True) if not line.startswith("load")))
    site = load(tmp_path / "site.yaml")
    with pytest.raises(ConfigError, match="how many requests to expect"):
        demand_rps(site, site.services[0], setup, profile())


def test_the_policy_carries_the_users_numbers(tmp_path):
    site, config, setup = opened(tmp_path, {"name: toys": "name: toys\npue: 1.3"})
    chosen = choose(site, config, setup, profile(), settle_s=2.0)
    objective = chosen.policy.search.objective
    assert (objective.lambda_ratio, objective.base_g_per_kwh, objective.pue, objective.base_pue) == (0.1, 200, 1.3, 1.3)
    assert (chosen.policy.trigger.intensity_ratio, chosen.policy.trigger.settle_s, chosen.rate_rps) == (0.05, 2.0, 30.0)
    assert chosen.base.counts == {"large": 2}, "two slices cost less CPU than one of two cores"
    assert objective.base_energy_j == pytest.approx(0.1) == chosen.base_metrics.energy_j
    assert chosen.policy.search.predictor.quantile == 0.95


def test_the_queue_is_as_long_as_the_leanest_layout_can_answer_within_the_slo(tmp_path):
    limit = queue_limit(choose(*opened(tmp_path), profile()))
    assert limit.capacity_rps == pytest.approx(2 / 0.0044), "two of the small variant"
    assert 454.5 * 0.495 < limit.waiting <= math.ceil(454.6 * 0.498)
    accurate = queue_limit(choose(*opened(tmp_path, {"    slo:": "    minimum_accuracy: 80 %\n    slo:"}), profile()))
    assert accurate.capacity_rps == pytest.approx(2 / 0.011) and accurate.waiting == pytest.approx(
        2 / 0.011 * 0.49, abs=1.5
    )
    tight = opened(tmp_path, {"500 ms": "1 ms"})
    assert queue_limit(choose(*tight, profile())).waiting in (1, 2), "every replica may work"
    executed = opened(tmp_path, {"latency: 500 ms": "latency: 500 ms, scope: service"})
    assert queue_limit(choose(*executed, profile())) is None, "waiting is no part of that SLO"


def test_a_fixed_policy_keeps_its_variant_whatever_the_grid_does(tmp_path):
    fixed = {"policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed, variant: small}"}
    site, config, setup = opened(tmp_path, fixed)
    policy = choose(site, config, setup, profile()).policy
    assert {name for layout in policy.candidates for name in layout.counts} == {"small"}
    assert not policy.trigger.intensity_moved(2000.0, 0.0)
    fixed = {"policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed}"}
    site, config, setup = opened(tmp_path, fixed)
    policy = choose(site, config, setup, profile()).policy
    assert {name for layout in policy.candidates for name in layout.counts} == {"large"}


def test_an_accuracy_that_no_cut_reaches(tmp_path):
    changed = {
        "    slo:": "    minimum_accuracy: 78 %\n    slo:",
        "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed, variant: small}",
    }
    site, config, setup = opened(tmp_path, changed)
    with pytest.raises(InfeasibleError, match="as accurate as"):
        choose(site, config, setup, profile())


def test_meters_of_a_site(tmp_path):
    site, _, _ = opened(tmp_path)
    (spec,) = meter_specs(site.meters)
    assert spec.kind == "cpu-model" and spec.options == {"idle_w": 20.0, "max_w": 60.0, "band_ratio": 0.5}
    line = "meters: {period: 50 ms, use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}}\n"
    site, _, _ = opened(tmp_path, {line: ""})
    assert meter_specs(site.meters) is None, "what this machine has"
    site, _, _ = opened(tmp_path, {"use: [cpu-model]": "use: [nvml, cpu-model]"})
    assert [spec.kind for spec in meter_specs(site.meters)][-1] == "cpu-model"


def test_meters_that_are_not_there(tmp_path, monkeypatch):
    def absent(spec):
        raise CapabilityError(f"no {spec.kind} here")

    monkeypatch.setattr("joulery.app.wiring.site_meters.open_meter", absent)
    site, _, _ = opened(tmp_path, {"use: [cpu-model]": "use: [rapl, nvml]"})
    with pytest.raises(CapabilityError, match="no rapl here; no nvml here") as caught:
        meter_specs(site.meters)
    assert "doctor" in caught.value.hint


def several(tmp_path, *cpus: str, fleet: str = ""):
    line = "  - {{name: s{n}, model: m, rate: {r} /s, slo: {{latency: 1 s}}{cpu}}}"
    services = "\n".join(line.format(n=n, r=n + 1, cpu=f", cpu: {cpu}" if cpu else "") for n, cpu in enumerate(cpus))
    file = tmp_path / "several.yaml"
    file.write_text(f"joulery: 1\n{fleet}services:\n{services}\n")
    return load(file)


def test_several_services_divide_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert cores_of(several(tmp_path, "", "")) == {"s0": (0, 1, 2), "s1": (3, 4)}
    assert cores_of(several(tmp_path, "", "{cores: 3}", "")) == {"s0": (0,), "s1": (1, 2, 3), "s2": (4,)}
    assert cores_of(several(tmp_path, "{slices: [1, 1]}", "")) == {"s0": (0, 1), "s1": (2, 3, 4)}
    assert cores_of(several(tmp_path, "", "", fleet="fleet: {cpu: {cores: 2}}\n")) == {"s0": (0,), "s1": (1,)}


def test_more_services_than_cores_share_them(tmp_path):
    assert cores_of(several(tmp_path, "", "", "")) == {"s0": (3,), "s1": (5,), "s2": (3,)}


def test_more_cores_than_there_are_for_several_services(tmp_path):
    with pytest.raises(CapabilityError, match="3 CPU cores together, 2"):
        cores_of(several(tmp_path, "{cores: 2}", "{cores: 1}"))
    with pytest.raises(ConfigError, match="cuts the cores for one service"):
        cores_of(several(tmp_path, "", "", fleet="fleet: {cpu: {slices: [1, 1]}}\n"))
