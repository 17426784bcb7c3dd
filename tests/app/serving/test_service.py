import os

import pytest

from joulery.app.serving.gateway_handle import has_upstreams
from joulery.app.serving.service import (
    choose,
    cores_beside_upstreams,
    cores_of,
    demand_rps,
    kept_loaded,
    largest_capacity_rps,
    service_setup,
    shared_cores,
)
from joulery.app.wiring.model_refs import model_ref
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.fleet import CpuConfig, FleetConfig
from joulery.config.parsing.reading import load
from joulery.config.serving import ServingConfig
from joulery.domain.errors import CapabilityError, ConfigError, InfeasibleError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slo
from joulery.policies.serving.search.layout_space import cpu_slices
from tests.policies.serving.test_predictive_policy import seen
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
        "joulery.app.wiring.model_refs.lite_file", lambda name, cache: built.append(name) or cache / "lite.onnx"
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


def waiting(chosen, rate_rps: float) -> int | None:
    """The limit of the queue while so many requests a second arrive and one layout runs."""
    policy = chosen.policy
    running = policy.step(policy.initial(), seen(0.0, g=100.0)).state
    limit = policy.queue_limit(running, seen(1.0, running=running.layout, arrival_rps=rate_rps))
    return None if limit is None else limit.waiting


def test_the_queue_is_as_long_as_the_leanest_layout_can_answer_within_the_slo(tmp_path):
    """Two of the small variant serve 454.5 requests/s; two of an accurate enough one 181.8 /s."""
    chosen = choose(*opened(tmp_path), profile())
    assert waiting(chosen, 450.0) is None, "without loaded variants, no limit below the capacity"
    assert waiting(chosen, 600.0) == pytest.approx(2 / 0.0044 * 0.9 * 0.5, rel=0.03)
    accurate = choose(*opened(tmp_path, {"    slo:": "    minimum_accuracy: 80 %\n    slo:"}), profile())
    assert waiting(accurate, 600.0) == pytest.approx(2 / 0.011 * 0.9 * 0.5, rel=0.05)
    over = {"    slo:": "    minimum_accuracy: 80 %\n    threatened_accuracy: 50 %\n    slo:"}
    assert waiting(choose(*opened(tmp_path, over), profile()), 600.0) == waiting(chosen, 600.0)
    assert waiting(choose(*opened(tmp_path, {"500 ms": "1 ms"}), profile()), 600.0) is None, "no answer keeps that SLO"
    executed = opened(tmp_path, {"latency: 500 ms": "latency: 500 ms, scope: service"})
    assert waiting(choose(*executed, profile()), 600.0) is None, "waiting is no part of that SLO"


def test_other_variants_stay_loaded_where_memory_and_the_site_allow(tmp_path):
    def kept(changes=None, free_bytes=8_000_000_000):
        site, config, setup = opened(tmp_path, changes)
        return kept_loaded(site, config, setup, profile(), lambda: free_bytes)

    loaded, replica_bytes = kept()
    assert loaded[0] == "small" and set(loaded) == {variant.name for variant in opened(tmp_path)[2].family.variants}
    assert replica_bytes == 2_000_000_000, "half of what is free, for two replicas"
    assert kept({"    slo:": "    warm_memory: 600 MB\n    slo:"})[1] == 300_000_000
    assert kept({"    slo:": "    warm_memory: 0 B\n    slo:"}) == ((), 0)
    assert kept({"mode: act": "mode: advise"}) == ((), 0)
    assert kept({"latency: 500 ms": "latency: 500 ms, scope: service"}) == ((), 0)
    fixed = {"policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed, variant: small}"}
    assert kept(fixed) == ((), 0)


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
    cores = cores_of(several(tmp_path, "", "", ""))
    assert cores == {"s0": (3,), "s1": (5,), "s2": (3,)}
    (remark,) = shared_cores(cores)
    assert "s0 and s2 share core 3" in remark
    assert shared_cores(cores_of(several(tmp_path, "", ""))) == []


def test_more_cores_than_there_are_for_several_services(tmp_path):
    with pytest.raises(CapabilityError, match="3 CPU cores together, 2"):
        cores_of(several(tmp_path, "{cores: 2}", "{cores: 1}"))
    with pytest.raises(ConfigError, match="partitions the cores for one service"):
        cores_of(several(tmp_path, "", "", fleet="fleet: {cpu: {slices: [1, 1]}}\n"))


UPSTREAMS = """\
joulery: 1
mode: act
services:
  - name: net
    slo: {{latency: 1 s}}
    rate: 5 /s
    concurrency: 3
    family:
      variants:
        - {{name: large, accuracy: 90 %, accuracy_source: s, model: {large}}}
        - {{name: small, accuracy: 80 %, accuracy_source: s, model: {small}}}
"""
THERE = "{{kind: open_inference, url: 'http://{host}:8000/net'{power}}}"


LARGE, SMALL = (THERE.format(host=host, power="") for host in ("a", "b"))


def upstream_site(tmp_path, large=LARGE, small=SMALL):
    models = {"large": large, "small": small}
    (tmp_path / "site.yaml").write_text(UPSTREAMS.format(**models))
    return load(tmp_path / "site.yaml")


def test_upstreams_get_slots_and_no_cores(tmp_path):
    large, small = (THERE.format(host=host, power=f", power: {watts} W") for host, watts in (("a", 60), ("b", 15)))
    site = upstream_site(tmp_path, large, small)
    setup = service_setup(site, site.services[0], tmp_path)
    assert setup.cores == () and cores_of(site) == {}
    assert [len(partition) for partition in setup.partitions] == [3]
    assert len(setup.candidates) == 4, "three slots, two variants"
    assert setup.models["small"] == ModelRef(ModelKind.REMOTE, "http://b:8000/net", '{"power_w": 15.0}')
    assert has_upstreams(site)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"small": "{kind: python, target: 'm:f'}"}, "meters cannot tell this server"),
        ({"small": THERE.format(host="b", power=", power: 10 W")}, "power of every upstream"),
        ({"small": "{kind: open_inference, url: 'b:8000/net'}"}, "url"),
        (
            {"large": "{kind: python, target: 'm:f'}", "small": "{kind: python, target: 'm:f'}"},
            "models on other servers",
        ),
    ],
)
def test_upstreams_that_cannot_be(tmp_path, fields, words):
    with pytest.raises(ConfigError, match=words):
        upstream_site(tmp_path, **fields)


MIXED = "{kind: python, target: 'm:f'}"
POWERED = THERE.format(host="a", power=", power: 60 W")


def test_a_mixed_family_gets_slots_and_a_replica_on_each_of_its_cores(tmp_path):
    site = upstream_site(tmp_path, POWERED, MIXED)
    setup = service_setup(site, site.services[0], tmp_path)
    assert has_upstreams(site)
    assert setup.cores == cores_of(site)["net"] and setup.cores
    assert setup.beside_upstreams == {"net": tuple((core,) for core in setup.cores)}
    assert [len(partition) for partition in setup.partitions] == [3], "slots, of whichever variant"
    pair = site.services[0].model_copy(update={"cpu": CpuConfig(slices=(1,))})
    one = site.model_copy(update={"services": (pair,)})
    assert cores_beside_upstreams(one) == {"net": ((setup.cores[0],),)}
    assert cores_beside_upstreams(upstream_site(tmp_path)) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"serving": ServingConfig.model_validate({"engine": {"kind": "ray"}})},
        {"fleet": FleetConfig.model_validate({"devices": ({"gpu": 0},)})},
    ],
)
def test_a_mixed_family_runs_on_cpu_cores_of_this_machine_alone(tmp_path, changed):
    site = upstream_site(tmp_path, POWERED, MIXED).model_copy(update=changed)
    with pytest.raises(ConfigError, match="CPU cores of this machine alone") as caught:
        has_upstreams(site)
    assert caught.value.pointer in ("serving.engine", "fleet.devices") and caught.value.hint


def test_services_here_and_elsewhere_do_not_share_a_gateway(tmp_path):
    site = upstream_site(tmp_path)
    _, config, _ = opened(tmp_path)
    mixed = site.model_copy(update={"services": (*site.services, config)})
    with pytest.raises(ConfigError, match="cannot share a gateway"):
        has_upstreams(mixed)
