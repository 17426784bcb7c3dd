"""Nodes of a Ray cluster in a site file: what runs where, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from joulery.adapters.engines.ray_serve.plan import apps_of
from joulery.app.serving import service
from joulery.app.serving.ray_nodes import loop
from joulery.app.serving.ray_nodes.slices import profiled_setup
from joulery.app.serving.service import choose, service_setup
from joulery.config import load
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.policies.serving.layout_space import cpu_slices
from joulery.runtime.serving.controller import LayoutActuator
from tests.app.serving.test_service import profile
from tests.runtime.site_files import toy_site

NODES = "nodes: [{name: a, address: 10.0.0.1, cores: 2}, {name: b, address: 10.0.0.2, cores: 1}]"
RAY = f"serving: {{engine: {{kind: ray, address: auto, dashboard: 'http://h:8265', {NODES}}}, "
FLEET = {"fleet: {cpu: {cores: 2}}\n": ""}


def site_file(folder, changed=None, ray=RAY, fleet=FLEET):
    return toy_site(folder, changed={**fleet, "serving: {": ray, **(changed or {})})


@pytest.fixture(autouse=True)
def two_cores_here(monkeypatch):
    monkeypatch.setattr(service.os, "sched_getaffinity", lambda _: {0, 1})


class Engine:
    def replicas(self):
        return ()


def test_layouts_cut_each_node_by_itself_and_replicas_are_pinned(tmp_path):
    site = load(site_file(tmp_path))
    setup = service_setup(site, site.services[0], tmp_path)
    assert {tuple(piece.cores for piece in cut) for cut in setup.partitions} == {(1, 2), (1, 1, 1)}
    chosen = choose(site, site.services[0], setup, profile())
    actuator = LayoutActuator(Engine(), "sums", setup.models, setup.slice_assignment)
    for layout in chosen.policy.candidates:
        specs = actuator.specs(layout)
        cores = {name: sum(s.slice.cores for s in specs if s.device == f"node:{name}") for name in "ab"}
        assert cores == {"a": 2, "b": 1}
        apps = apps_of(specs, {})
        assert {app.node for app in apps.values()} == {"a", "b"}
        nodes = {node.name: node.address for node in site.serving.engine.nodes}
        for app in apps.values():
            claims = app.config({}, 0.5, nodes)["deployments"][0]["ray_actor_options"]
            assert claims["resources"] == {f"node:{nodes[app.node]}": 0.001}
            assert claims["num_cpus"] == app.slice.cores * 0.5


def test_a_service_on_nodes_is_profiled_with_the_slices_of_one_node(tmp_path):
    site = load(site_file(tmp_path))
    setup = profiled_setup(site, service_setup(site, site.services[0], tmp_path))
    assert set(setup.partitions) == {cpu_slices((2,)), cpu_slices((1, 1)), cpu_slices((1,))}
    with pytest.raises(CapabilityError, match="node a has 2 cores") as caught:
        profiled_setup(site, replace(setup, cores=(0,)))
    assert "joulery profile" in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "ray", "fleet", "fault"),
    [
        ({}, RAY.replace("name: b", "name: a"), FLEET, "stands twice"),
        ({}, RAY.replace("0.0.2", "0.0.1"), FLEET, "stands twice"),
        ({}, RAY.replace("cores: 1", "cores: 0"), FLEET, "at least 1"),
        ({}, RAY, {}, "have the cores"),
        ({"lambda: 10 %": "lambda: 10 %, consolidate: true"}, RAY, FLEET, "keep their replicas"),
        ({}, RAY + "gateways: {count: 2}, ", FLEET, "one gateway"),
        (
            {"serving: {": "  - {name: two, slo: {latency: 1 s}, model: m}\n" + RAY},
            RAY,
            FLEET,
            "serve one service",
        ),
    ],
)
def test_nodes_that_cannot_be_used_are_one_clear_error(tmp_path, changed, ray, fleet, fault):
    with pytest.raises(ConfigError, match=fault):
        load(site_file(tmp_path, changed, ray, fleet))


def test_nodes_are_metered_beyond_this_machine_only(tmp_path):
    session = SimpleNamespace(engine=None, warn=None)

    def ledger(text: str):
        return loop.ledger_of(load(site_file(tmp_path, ray=text)), session, lambda section: None)

    assert ledger("serving: {") is None and ledger("serving: {engine: {kind: ray}, ") is None
    assert ledger("serving: {engine: {kind: ray, address: auto, dashboard: 'http://h:8265'}, ") is not None
    found = ledger(RAY)
    assert [one["node"] for one in found.report()["nodes"]] == ["a", "b"]


def test_a_request_waits_for_a_cleaner_node_within_the_slo_only(tmp_path):
    site = load(site_file(tmp_path))
    setup = service_setup(site, site.services[0], tmp_path)
    one = SimpleNamespace(setup=setup, chosen=choose(site, site.services[0], setup, profile()))
    slowest_s = max(entry.loaded.quantile_s(0.95) for entry in profile().entries)
    assert loop.patience_s(one) == pytest.approx((0.5 - slowest_s) / 4)
    tight = replace(setup, slo=replace(setup.slo, latency_s=slowest_s / 2))
    assert loop.patience_s(SimpleNamespace(setup=tight, chosen=one.chosen)) == 0.0
