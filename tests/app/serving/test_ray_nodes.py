"""Nodes of a Ray cluster in a site file: what runs where, and what is refused."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.engines.ray_serve.plan import apps_of
from joulery.app.serving import service
from joulery.app.serving.ray_nodes import loop
from joulery.app.serving.ray_nodes.slices import profiled_setup, shares_of_nodes
from joulery.app.serving.service import choose, service_setup
from joulery.config import load
from joulery.config.serving import RayEngine, RayNodeConfig
from joulery.domain.errors import CapabilityError, ConfigError, InfeasibleError
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


def several(folder, count, nodes=NODES):
    """The site with so many services, behind two gateways."""
    path = site_file(folder, ray=RAY.replace(NODES, nodes) + "gateways: {count: 2}, ")
    head, _, rest = path.read_text().partition("  - name: sums")
    service, ends, tail = rest.replace("    slo:", "    rate: 20 /s\n    slo:").partition("serving:")
    path.write_text(head + "".join(f"  - name: s{index}{service}" for index in range(count)) + ends + tail)
    return load(path)


def test_services_share_the_cores_of_each_node(tmp_path):
    site = several(tmp_path, 2)
    found = shares_of_nodes(site)
    assert {name: [(node.name, node.cores) for node in nodes] for name, nodes in found.items()} == {
        "s0": [("a", 1), ("b", 1)],
        "s1": [("a", 1)],
    }
    sizes = [service_setup(site, one, tmp_path).partitions for one in site.services]
    assert [{len(cut) for cut in cuts} for cuts in sizes] == [{2}, {1}]
    with pytest.raises(InfeasibleError, match="s3 would have none"):
        shares_of_nodes(several(tmp_path, 4))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_every_core_is_one_services_and_none_has_two_more_than_another(cores, count):
    nodes = [RayNodeConfig(name=f"n{i}", address=f"10.0.0.{i}", cores=one) for i, one in enumerate(cores)]
    site = SimpleNamespace(
        services=[SimpleNamespace(name=f"s{i}") for i in range(count)],
        serving=SimpleNamespace(
            engine=RayEngine(kind="ray", address="auto", dashboard="http://h:8265", nodes=tuple(nodes))
        ),
    )
    if sum(cores) < count:
        with pytest.raises(InfeasibleError):
            shares_of_nodes(site)
        return
    found = shares_of_nodes(site)
    totals = [sum(node.cores for node in mine) for mine in found.values()]
    assert sum(totals) == sum(cores) and max(totals) - min(totals) <= 1
    for index, one in enumerate(cores):
        assert sum(node.cores for mine in found.values() for node in mine if node.name == f"n{index}") == one


def test_the_least_patient_service_says_how_long_a_request_waits_for_a_cleaner_node(tmp_path):
    site, asked = several(tmp_path, 2), []
    services = {}
    for one, latency_s in zip(site.services, (0.5, 0.3), strict=True):
        setup = service_setup(site, one, tmp_path)
        setup = replace(setup, slo=replace(setup.slo, latency_s=latency_s))
        services[one.name] = SimpleNamespace(name=one.name, setup=setup, chosen=choose(site, one, setup, profile()))
    ledger = SimpleNamespace(
        order=lambda _: True, ranks={"a": 0, "b": 1}, intensities=lambda: {"a": 1.0, "b": 2.0}, moves=Counter()
    )
    decisions = []
    session = SimpleNamespace(
        site=site,
        services=services,
        engine=SimpleNamespace(prefer_nodes=lambda ranks, patience_s: asked.append((ranks, patience_s))),
        history=SimpleNamespace(add_decision=decisions.append),
    )
    loop._order(session, ledger)
    assert asked == [({"a": 0, "b": 1}, loop.patience_s(services["s1"]))]
    assert [one.decision.target for one in decisions] == ["s0", "s1"] and ledger.moves == {"s0": 1, "s1": 1}
