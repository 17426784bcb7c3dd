"""Nodes of a Ray cluster in a site file: what runs where, and what is refused."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.engines.ray_serve.applications import apps_of
from joulery.app.serving import service
from joulery.app.serving.ray_nodes import loop
from joulery.app.serving.ray_nodes.node_slices import profiled_setup, shares_of_nodes
from joulery.app.serving.service import choose, service_setup
from joulery.config import load
from joulery.config.serving import RayEngine, RayNodeConfig
from joulery.config.site import Mode
from joulery.domain.decisions import Decision
from joulery.domain.errors import CapabilityError, ConfigError, InfeasibleError
from joulery.domain.gpu.device import DeviceSpec, Knob
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.engine import ReplicaState, ReplicaView, Transition
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.serving.consolidation import Consolidation
from joulery.policies.serving.observation import SET_LAYOUT
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.runtime.serving.controller import PolicyControl
from joulery.runtime.serving.layout_actuator import LayoutActuator
from joulery.runtime.serving.nodes.places import NodePlaces
from joulery.runtime.serving.nodes.sleep import SleepingNodes, SleepRule, SleepWorld
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.session.requests import RequestWindow
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


ONE = cpu_slices((1,))[0]
CONSOLIDATE = {"lambda: 10 %": "lambda: 10 %, consolidate: true"}
RAY_SLEEP = RAY.replace("cores: 1}", "cores: 2, sleep: [echo, s], wake: [echo, w], wakes_in: 50 s}")


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
        ({}, RAY.replace("name: b", "name: a"), FLEET, "is listed twice"),
        ({}, RAY.replace("0.0.2", "0.0.1"), FLEET, "is listed twice"),
        ({}, RAY.replace("cores: 1", "cores: 0"), FLEET, "at least 1"),
        ({}, RAY, {}, "have the cores"),
        ({}, RAY.replace("cores: 1}", "cores: 1, gpus: 1}"), FLEET, "either cores or gpus"),
        ({}, RAY.replace(", cores: 1}", "}"), FLEET, "either cores or gpus"),
        ({}, RAY.replace("cores: 1}", "gpus: 1}"), FLEET, "all of them GPUs"),
        ({}, RAY.replace("cores:", "gpus:"), FLEET, "not measured here"),
        ({}, RAY.replace("cores: 1}", "cores: 1, sleep: [s]}"), FLEET, "needs wake too"),
        ({}, RAY.replace("cores: 1}", "cores: 1, sleep: [], wake: [w]}"), FLEET, "word by word"),
        ({}, RAY.replace("cores: 1}", "cores: 1, wakes_in: 1 min}"), FLEET, "of a node that sleeps"),
        ({}, RAY.replace("cores: 1}", "cores: 1, sleep: [s], wake: [w]}"), FLEET, "never left empty"),
        (CONSOLIDATE, RAY_SLEEP.replace("address: auto", "address: 10.0.0.2:6379"), FLEET, "is of Ray's head"),
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
    totals = [sum(node.units for node in mine) for mine in found.values()]
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


def sleeping_world(site, running=()):
    """The places of a site's nodes, of which ``b`` may sleep."""
    rule = SleepRule("b", "10.0.0.2", 300.0, 50.0, SimpleNamespace(), DeviceSpec("node-commands"))

    async def present():
        return ("10.0.0.1", "10.0.0.2")

    def specs():
        return running

    world = SleepWorld(specs, present, lambda _: None, lambda: 0.0)
    return NodePlaces(["a", "b"], SleepingNodes([rule], None, world), specs)


def test_whole_nodes_are_left_empty_and_the_room_grows_with_the_time_a_node_wakes_in(tmp_path):
    site = load(site_file(tmp_path, CONSOLIDATE, RAY_SLEEP))
    setup = service_setup(site, site.services[0], tmp_path)
    assert all(sum(piece.cores for piece in cut) == 4 for cut in setup.partitions), "no search leaves a node empty"
    chosen = choose(site, site.services[0], setup, profile())
    rule = chosen.policy.consolidation
    assert Consolidation.from_dict(rule.as_dict()) == rule and rule.wakes_s == 50.0
    whole = next(layout for layout in chosen.policy.candidates if len(layout.instances) == 4)
    without = replace(rule, wakes_s=0.0).reserve(whole, chosen.predictor)
    assert rule.reserve(whole, chosen.predictor) == pytest.approx(without + 0.5)
    part = rule.part(whole, 0.5, chosen.predictor, chosen.policy.objectives)
    assert len(part.instances) == 2, "one node of two"
    mixed = Layout([Instance("large", ONE), Instance("small", ONE)] * 2)
    large = Layout([Instance("large", ONE)] * 2)
    found = replace(rule, sleepers=0).part(mixed, 0.5, chosen.predictor, chosen.policy.objectives)
    assert found == mixed, "of the accurate variant alone each request takes more joules"
    assert rule.part(mixed, 0.5, chosen.predictor, chosen.policy.objectives) == large, (
        "a machine that sleeps saves more"
    )
    actuator = LayoutActuator(Engine(), "sums", setup.models, setup.slice_assignment)
    assert {spec.device for spec in actuator.specs(part)} == {"node:a"}
    places = sleeping_world(site)
    actuator = replace(actuator, places=places)
    places.ranks = {"a": 1, "b": 0}
    assert {spec.device for spec in actuator.specs(part)} == {"node:a"}, "a takes its power anyway"
    places = NodePlaces(["a", "b"], SleepingNodes([], None, places.sleep._world), list)
    places.ranks = {"a": 1, "b": 0}
    assert {spec.device for spec in replace(actuator, places=places).specs(part)} == {"node:b"}, "the cleaner grid"
    assert Counter(spec.device for spec in actuator.specs(whole)) == {"node:a": 2, "node:b": 2}


def test_a_service_on_one_node_cannot_leave_nodes_empty(tmp_path):
    one = RAY.replace(", {name: b, address: 10.0.0.2, cores: 1}", "")
    site = load(site_file(tmp_path, CONSOLIDATE, one))
    setup = service_setup(site, site.services[0], tmp_path)
    with pytest.raises(ConfigError, match="sums has one"):
        choose(site, site.services[0], setup, profile())


def test_gpus_of_nodes_are_whole_slices_of_rays_own_gpus(tmp_path):
    gpus = RAY.replace("cores:", "gpus:")
    (tmp_path / "p.json").touch()
    site = load(site_file(tmp_path, {"    slo:": "    profile: p.json\n    slo:"}, gpus))
    setup = service_setup(site, site.services[0], tmp_path)
    assert setup.partitions == ((Slice(SliceKind.WHOLE),) * 3,)
    actuator = LayoutActuator(Engine(), "sums", setup.models, setup.slice_assignment)
    specs = actuator.specs(setup.candidates[0])
    assert Counter(spec.device for spec in specs) == {"node:a": 2, "node:b": 1}
    nodes = {node.name: node.address for node in site.serving.engine.nodes}
    for app in apps_of(specs, {}).values():
        made = app.config({}, 0.5, nodes)
        claims = made["deployments"][0]["ray_actor_options"]
        assert claims == {"num_cpus": 0, "num_gpus": 1.0, "resources": {f"node:{nodes[app.node]}": 0.001}}
        assert made["runtime_env"]["env_vars"] == {"JOULERY_DEVICE": "cuda"}, "its model runs on the GPU"


class Cluster:
    """Runs every target, and writes down the nodes of each change."""

    def __init__(self):
        self.views, self.changes = [], []

    def replicas(self):
        return tuple(self.views)

    async def apply(self, target):
        self.views = [ReplicaView(f"r{k}", spec, ReplicaState.READY) for k, spec in enumerate(target)]
        self.changes.append(sorted(spec.device for spec in target))
        return Transition((), (), (), 0.0, 0.1, 0.1, 0.1)


def control_of(folder, engine):
    """The control of a service on two nodes, and its layouts: the whole, and half of it."""
    site = load(site_file(folder, CONSOLIDATE, RAY_SLEEP))
    assert site.mode is Mode.ACT
    setup = service_setup(site, site.services[0], folder)
    chosen = choose(site, site.services[0], setup, profile())
    window = RequestWindow("sums", 10.0)
    one = RunningService(setup, chosen, chosen.predictor.profile, window, None, "measured", None)
    history = SimpleNamespace(add_decision=lambda _: None, latest=None)
    control = PolicyControl({"sums": one}, engine, history, SimpleNamespace(at=lambda _: 100.0), site.mode, 1.0)
    whole = next(layout for layout in chosen.policy.candidates if len(layout.instances) == 4)
    return site, control, one, whole, Layout(whole.instances[:2])


async def test_a_layout_that_needs_a_sleeping_node_runs_on_the_others_until_it_is_there(tmp_path):
    engine = Cluster()
    site, control, one, whole, half = control_of(tmp_path, engine)
    control.places = places = sleeping_world(site)
    woken = []

    async def wake(names):
        woken.append((set(names), engine.changes[-1], places.sleep._needed["b"]))
        places.sleep.asleep -= names

    places.sleep.wake = wake
    await control._act(one, Decision(SET_LAYOUT, "sums", half.names(), "p", "r"))
    assert engine.changes == [["node:a"] * 2] and woken == []
    places.sleep.asleep.add("b")
    await control._act(one, Decision(SET_LAYOUT, "sums", whole.names(), "p", "r"))
    assert woken == [({"b"}, ["node:a"] * 2, 1)], "its part on a first; b is not sent to sleep meanwhile"
    assert engine.changes[-1] == ["node:a"] * 2 + ["node:b"] * 2 and places.sleep._needed["b"] == 0


async def test_replicas_move_to_the_node_that_comes_first_now_and_only_then(tmp_path):
    engine = Cluster()
    site, control, one, whole, half = control_of(tmp_path, engine)
    control.places = places = NodePlaces(
        ["a", "b"], SleepingNodes([], None, sleeping_world(site).sleep._world), lambda: [v.spec for v in engine.views]
    )
    await control._act(one, Decision(SET_LAYOUT, "sums", half.names(), "p", "r"))
    await control.settle()
    assert engine.changes == [["node:a"] * 2]
    places.ranks = {"a": 1, "b": 0}
    await control.settle()
    await control.settle()
    assert engine.changes == [["node:a"] * 2, ["node:b"] * 2]
    places.ranks = {"a": 0, "b": 0}
    await control.settle()
    assert len(engine.changes) == 2, "equal grids are no reason to move"
    await control._act(one, Decision(SET_LAYOUT, "sums", whole.names(), "p", "r"))
    places.ranks = {"a": 0, "b": 1}
    await control.settle()
    assert len(engine.changes) == 3, "both nodes have replicas: nothing moves"
    engine.views = engine.views[:3]
    await control.settle()
    assert len(engine.changes) == 3, "three of four: the rest is still to come"


async def test_a_node_that_sleeps_is_another_machine_with_its_commands_there(tmp_path, monkeypatch):
    node = load(site_file(tmp_path, CONSOLIDATE, RAY_SLEEP)).serving.engine.nodes[1]
    rule = loop._sleep_rule(node)
    assert (rule.name, rule.after_s, rule.wakes_s, rule.spec.knob) == ("b", 300.0, 50.0, Knob.SLEEP)
    with pytest.raises(ConfigError, match="the machine that joulery runs on"):
        loop._sleep_rule(node.model_copy(update={"address": "127.0.0.1"}))
    with pytest.raises(CapabilityError, match="no such program: not-here"):
        loop._sleep_rule(node.model_copy(update={"wake": ("not-here",)}))
