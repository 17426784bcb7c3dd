"""Replicas as Ray Serve applications; nothing here needs Ray."""

import asyncio
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import httpx
import pytest

from joulery.adapters.engines.embedded.wire import pack_error, unpack_error
from joulery.adapters.engines.ray_serve.applications import aligned, apps_of, drifted, entry_of
from joulery.adapters.engines.ray_serve.cluster import OURS, RayCluster, RayPlace, ReplicaGoneError
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import InferRequest, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind
from tests.adapters.engines.support import toy

TWO = Slice(SliceKind.CPU, cores=2)
A, B, C = (toy("who", variant=name) for name in "abc")


def test_one_application_a_service_and_slice_size():
    apps = apps_of([A, B, toy("who", variant="a", slice_=TWO), toy("who", service="other")], {})
    assert {name: [spec.variant for spec in app.plan] for name, app in apps.items()} == {
        "joulery.toy.cpu-1": ["a", "b"],
        "joulery.toy.cpu-2": ["a"],
        "joulery.other.cpu-1": ["v"],
    }
    config = apps["joulery.toy.cpu-2"].config({"X": "1"}, 0.5)
    (deployment,) = config["deployments"]
    assert deployment["num_replicas"] == 1 and deployment["ray_actor_options"] == {"num_cpus": 1.0}
    assert deployment["user_config"]["plan"][0]["threads"] == 2 and config["runtime_env"] == {"env_vars": {"X": "1"}}
    assert (
        apps["joulery.toy.cpu-2"].spec(json.loads(json.dumps(entry_of(apps["joulery.toy.cpu-2"].plan[0]))), 0)
        == (apps["joulery.toy.cpu-2"].plan[0])
    )
    assert apps["joulery.toy.cpu-2"].spec({}, 0) is None


def test_ray_nodes_import_modules_that_exist():
    (app,) = apps_of([A], {}).values()
    config = app.config({}, 0.5)
    router = config["deployments"][0]["request_router_config"]["request_router_class"]
    for path in (config["import_path"], router):
        assert importlib.util.find_spec(path.partition(":")[0]) is not None, path


@pytest.mark.parametrize(
    ("piece", "claims"),
    [
        (Slice(SliceKind.WHOLE), {"num_cpus": 0, "num_gpus": 1.0}),
        (Slice(SliceKind.MPS, share_ratio=0.25), {"num_cpus": 0, "num_gpus": 0.25}),
        (Slice(SliceKind.MIG, profile="3g.20gb"), {"num_cpus": 0, "resources": {"mig-3g.20gb": 1}}),
    ],
)
def test_what_a_replica_asks_of_a_node(piece, claims):
    (app,) = apps_of([toy("who", slice_=piece)], {}).values()
    assert app.config({}, 0.5)["deployments"][0]["ray_actor_options"] == claims


@pytest.mark.parametrize(
    ("old", "wanted", "plan"),
    [
        ((), (B, A), (A, B)),
        ((A, B), (B, C), (C, B)),
        ((A, B, C), (C, A), (A, C)),
        ((A, A), (A, A, B), (A, A, B)),
        ((B,), (A, B), (B, A)),
        ((A, B), (C,), (C,)),
    ],
)
def test_ranks_keep_what_they_run_where_that_is_still_wanted(old, wanted, plan):
    assert aligned(old, wanted) == plan


@pytest.mark.parametrize("changes", [{"standby": True}, {"cores": (0,)}])
def test_what_this_engine_does_not_do_is_refused(changes):
    spec = ReplicaSpec("toy", "v", A.slice, A.model, **changes)
    with pytest.raises(CapabilityError, match="bound to no core"):
        apps_of([spec], {})


def test_counts_that_ray_is_to_keep_are_compared_with_the_plan():
    apps = apps_of([A, B, toy("who", service="other")], {})
    state = {"deployments": {"Instances": {"target_num_replicas": 2}}}
    assert drifted(apps, {"joulery.toy.cpu-1": state, "joulery.other.cpu-1": state}) == {"joulery.other.cpu-1": 2}
    assert drifted(apps, {}) == drifted(apps, {"joulery.toy.cpu-1": {"deployments": {}}}) == {}


def test_an_error_crosses_processes_as_it_was():
    for error in (ConfigError("no", pointer="x", got="1"), DataError("bad"), CapabilityError("may not", grant="do")):
        again = unpack_error(json.loads(json.dumps(pack_error(error))))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


class Rest:
    """A dashboard that knows a foreign application and remembers what is declared."""

    def __init__(self, proxies: str | None = "HeadOnly") -> None:
        self.declared: list[dict] = []
        self.status = 200
        self.proxies = proxies

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            self.declared.append(json.loads(request.content))
        theirs = {"deployed_app_config": {"name": "theirs", "import_path": "x:y"}}
        ours = {"deployed_app_config": {"name": f"{OURS}old"}}
        found = {"theirs": theirs, f"{OURS}old": ours}
        return httpx.Response(self.status, json={"proxy_location": self.proxies, "applications": found})


def joined(rest: Rest) -> RayCluster:
    cluster = RayCluster(RayPlace("auto", "http://ray:8265"))
    cluster._client = httpx.AsyncClient(transport=httpx.MockTransport(rest), base_url="http://ray:8265")
    return cluster


async def test_applications_of_others_are_declared_again_as_they_were():
    rest = Rest()
    cluster = joined(rest)
    await cluster.declare([{"name": f"{OURS}new"}])
    assert [app["name"] for app in rest.declared[0]["applications"]] == ["theirs", f"{OURS}new"]
    assert rest.declared[0]["proxy_location"] == "HeadOnly", "a cluster's own proxies stay as they are"
    rest.status = 500
    with pytest.raises(ActuationError, match="answers 500"):
        await cluster.declare([])
    assert cluster._client is not None
    await cluster._client.aclose()


async def test_joining_a_cluster_without_serve_starts_no_proxy():
    """Ray's own default is a proxy on every node, listening at 0.0.0.0."""
    rest = Rest(proxies=None)
    cluster = joined(rest)
    await cluster.declare([{"name": f"{OURS}new"}])
    assert rest.declared[0]["proxy_location"] == "Disabled"
    assert cluster._client is not None
    await cluster._client.aclose()


async def test_a_cluster_elsewhere_needs_its_dashboard_and_one_that_was_left_says_so():
    with pytest.raises(ConfigError, match="URL of its dashboard"):
        await RayCluster(RayPlace("auto")).open()
    with pytest.raises(ActuationError, match="was left"):
        await RayCluster(RayPlace()).applications()
    await asyncio.wait_for(RayCluster(RayPlace()).close(), 5)


class GoneError(Exception):
    """What Ray raises when a replica has ended."""


class Handle:
    """An application of one replica, as Ray hands it out."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.error: Exception | None = None
        self.infer = SimpleNamespace(remote=self._infer)

    async def _infer(self, *arguments, **named):
        self.asked.append((*arguments, named))
        if self.error is not None:
            raise self.error
        return {"variant": "a"}

    def broadcast(self, method):
        async def results(timeout_s):
            if self.error is not None:
                raise self.error
            return [{"id": method}]

        return SimpleNamespace(results_async=results)


@pytest.fixture
def handed_out(monkeypatch):
    """The handles that were asked for, by application; a Ray that has no more than them."""
    for name, exception in (("ray.exceptions", "RayError"), ("ray.serve.exceptions", "RayServeException")):
        module = ModuleType(name)
        setattr(module, exception, GoneError)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return []


def talking(handed_out, rest: Rest) -> RayCluster:
    def handle(application):
        handed_out.append((application, Handle()))
        return handed_out[-1][1]

    cluster = joined(rest)
    cluster._serve = SimpleNamespace(get_app_handle=handle)
    return cluster


async def test_a_replica_is_asked_by_name_and_distinguished_from_one_that_is_gone(handed_out):
    cluster = talking(handed_out, Rest())
    request = InferRequest({}, outputs=("y",), variant="a")
    assert await cluster.infer("app", "r7", request, "c/1") == {"variant": "a"}
    assert await cluster.describe("app") == [{"id": "describe"}]
    ((_, handle),) = handed_out
    assert handle.asked == [({}, ("y",), "a", {"replica": "r7", "call": "c/1"})]
    handle.error = GoneError("some of Ray's words")
    with pytest.raises(ReplicaGoneError, match=r"^GoneError$"):
        await cluster.infer("app", "r7", request)
    assert await cluster.describe("app") is None
    handle.error = TimeoutError()
    assert await cluster.describe("app") is None
    await cluster._client.aclose()


async def test_an_application_that_was_taken_out_is_looked_up_anew(handed_out):
    cluster = talking(handed_out, Rest())
    for names in (["a", "b"], ["b"], ["a", "b"]):
        await cluster.declare([{"name": name} for name in names])
        for name in names:
            await cluster.describe(name)
    assert [name for name, _ in handed_out] == ["a", "b", "a"]
    await cluster._client.aclose()
