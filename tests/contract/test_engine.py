"""The contract of every engine: the embedded one, and Ray Serve where it is installed (a local cluster is started)."""

import asyncio
import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.app.runs.replay import decide_again
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.layout import Layout
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import Outcome, ReplicaSpec, ReplicaState, RequestError
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.policies.serving.objective import ReplanTrigger, ServiceObjectives
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import cpu_slices, slice_menu
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.search.trials import TrialBudget
from joulery.runtime.session.driver import APPLIED
from tests.adapters.engines.support import alive, ask, toy, until
from tests.runtime.serving.live_trials import Live

TWO = Slice(SliceKind.CPU, cores=2)
ONES = np.ones((1, 2), np.float32)
NO_RAY = "Ray Serve is not installed here: pip install 'joulery[ray]'"

# What Ray leaves open or deprecates in this process is Ray's affair.
pytestmark = [
    pytest.mark.xdist_group("engines"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class House:
    """One engine and the event loop it lives on, for all tests of this file."""

    def __init__(self, runner: asyncio.Runner, engine: Engine, name: str) -> None:
        self.runner, self.engine, self.name = runner, engine, name

    def run(self, work: Callable[[Any], Awaitable[None]], *specs: ReplicaSpec) -> None:
        """A test, beginning with these replicas."""

        async def whole() -> None:
            await self.engine.apply(specs)
            await work(self.engine)

        self.runner.run(whole())


def made(name: str, folder: str) -> Engine:
    if name == "embedded":
        return LocalEngine(LocalSettings(deadline_s=20.0))
    from joulery.adapters.engines.ray_serve.cluster import RayPlace
    from joulery.adapters.engines.ray_serve.engine import RayServeEngine
    from joulery.adapters.engines.ray_serve.settings import RaySettings

    return RayServeEngine(RaySettings(place=RayPlace(cpus=2, temp_dir=folder), deadline_s=20.0))


@pytest.fixture(
    scope="module",
    params=[
        "embedded",
        pytest.param(
            "ray",
            marks=[pytest.mark.ray, pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY)],
        ),
    ],
)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    # Ray's sockets have paths of at most 107 characters: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder, asyncio.Runner() as runner:
        engine = made(request.param, folder)
        try:
            yield House(runner, engine, request.param)
        finally:
            runner.run(engine.close())
            with pytest.raises(RequestError) as caught:
                runner.run(ask(engine, x=ONES))
            assert caught.value.outcome is Outcome.UNAVAILABLE
            assert engine.replicas() == ()
            runner.run(engine.close())


def test_a_request_is_answered_and_its_cost_is_known(house: House) -> None:
    async def work(engine: Engine) -> None:
        answer = await ask(engine, seconds=[0.02])
        assert (answer.variant, answer.attempts) == ("v", 1)
        assert 0.02 <= answer.cpu_s <= answer.service_s + 0.011, "one thread, clock ticks of 10 ms"
        assert answer.arrival_s <= answer.start_s <= answer.end_s
        (view,) = engine.replicas()
        assert view.state is ReplicaState.READY and view.id == answer.replica and view.served >= 1
        assert int(answer.outputs["pid"][0]) == view.pid

    house.run(work, toy("busy"))


def test_tensors_of_every_kind_pass_through_unchanged(house: House) -> None:
    arrays = {
        "photo": np.arange(30_000, dtype=np.uint8).reshape(1, 100, 100, 3),
        "half": np.array([[1.5, -2.0]], np.float16),
        "words": np.array([b"a", b"", b"\xff\x00"], object),
        "empty": np.zeros((0, 3), np.int64),
    }

    async def work(engine: Engine) -> None:
        answer = await ask(engine, **arrays)
        for name, array in arrays.items():
            assert answer.outputs[name].dtype == array.dtype
            assert answer.outputs[name].tolist() == array.tolist()

    house.run(work, toy("echo"))


def test_a_variant_that_is_named_answers_alone(house: House) -> None:
    async def work(engine: Engine) -> None:
        for variant in ("a", "b") * 3:
            assert (await ask(engine, x=ONES, variant=variant)).variant == variant
        with pytest.raises(RequestError, match="no variant 'c'") as caught:
            await ask(engine, x=ONES, variant="c")
        assert caught.value.outcome is Outcome.UNKNOWN
        with pytest.raises(RequestError) as caught:
            await ask(engine, service="unknown", x=ONES)
        assert caught.value.outcome is Outcome.UNKNOWN

    house.run(work, toy("who", variant="a"), toy("who", variant="b"))


def test_what_a_model_declares_is_checked_and_what_it_raises_is_the_client_s(house: House) -> None:
    async def refused(engine: Engine, outcome: Outcome, words: str, **inputs: Any) -> None:
        with pytest.raises(RequestError, match=words) as caught:
            await ask(engine, **inputs)
        assert caught.value.outcome is outcome

    async def declared(engine: Engine) -> None:
        assert (await ask(engine, x=ONES)).outputs["y"].tolist() == [[2.0, 2.0]]
        assert engine.replicas()[0].inputs[0].name == "x"
        await refused(engine, Outcome.INVALID, "is missing", z=ONES)
        await refused(engine, Outcome.INVALID, "shape", x=np.ones((1, 3), np.float32))

    async def raising(engine: Engine) -> None:
        await refused(engine, Outcome.FAILED, "no luck", service="unlucky", x=ONES)
        await refused(engine, Outcome.INVALID, "too small", service="picky", x=ONES)

    house.run(declared, toy("double"))
    house.run(raising, toy("fails", service="unlucky"), toy("picky", service="picky"))


def test_a_transition_says_what_changed_and_equal_replicas_stay(house: House) -> None:
    async def work(engine: Engine) -> None:
        pid = {view.spec.variant: view.pid for view in engine.replicas()}
        change = await engine.apply([toy("who", variant="b"), toy("who", variant="c")])
        assert [spec.variant for spec in change.started] == ["c"]
        assert [spec.variant for spec in change.stopped] == ["a"]
        assert [spec.variant for spec in change.kept] == ["b"]
        assert 0 < change.ready_s <= change.duration_s and change.startup_cpu_s > 0
        assert {view.spec.variant for view in engine.replicas()} == {"b", "c"}
        assert next(view.pid for view in engine.replicas() if view.spec.variant == "b") == pid["b"]
        again = await engine.apply([toy("who", variant="c"), toy("who", variant="b")])
        assert (again.started, again.stopped, len(again.kept)) == ((), (), 2)

    house.run(work, toy("who", variant="a"), toy("who", variant="b"))


def test_switching_partitions_and_variants_under_load_loses_nothing(house: House) -> None:
    async def work(engine: Engine) -> None:
        answered, stop = [], asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                answered.append(await ask(engine, x=ONES))

        clients = [asyncio.ensure_future(client()) for _ in range(8)]
        targets = (
            [toy("who", variant="b"), toy("who", variant="c")],
            [toy("who", variant="d", slice_=TWO)],
            [toy("who", variant="a"), toy("who", variant="b")],
            [toy("who", variant="c")],
        )
        for target in targets:
            await engine.apply(target)
            count = len(answered)
            await until(lambda count=count: len(answered) >= count + 20)
        stop.set()
        await asyncio.gather(*clients)
        assert {answer.variant for answer in answered} == {"a", "b", "c", "d"}
        assert all(answer.attempts == 1 for answer in answered)
        assert len(engine.replicas()) == 1

    house.run(work, toy("who", variant="a"), toy("who", variant="b"))


def test_a_target_that_cannot_be_leaves_the_old_set_serving(house: House) -> None:
    async def work(engine: Engine) -> None:
        pid = engine.replicas()[0].pid
        with pytest.raises(ConfigError, match="no callable 'nosuch'"):
            await engine.apply([toy("nosuch", variant="z")])
        assert (await ask(engine, x=ONES)).variant == "a"
        assert [(view.spec.variant, view.pid) for view in engine.replicas()] == [("a", pid)]
        if house.name == "ray":
            with pytest.raises(CapabilityError, match="bound to no core"):
                await engine.apply([ReplicaSpec("toy", "v", TWO, toy("who").model, standby=True)])

    house.run(work, toy("who", variant="a"))


def test_requests_that_wait_are_answered_together(house: House) -> None:
    async def work(engine: Engine) -> None:
        asked = [
            asyncio.ensure_future(ask(engine, x=np.full((1, 2), float(number), np.float32))) for number in range(9)
        ]
        answers = await asyncio.gather(*asked)
        assert [answer.outputs["y"].tolist() for answer in answers] == [[[2.0 * n, 2.0 * n]] for n in range(9)]
        assert sorted(answer.batch for answer in answers) == [1, *[4] * 8]

    house.run(work, replace(toy("double"), batch=4))


def test_a_replica_that_is_killed_comes_back_and_its_request_is_tried_again(house: House) -> None:
    async def work(engine: Engine) -> None:
        killed = next(view for view in engine.replicas() if view.spec.variant == "b")
        slow = [asyncio.ensure_future(ask(engine, seconds=[0.5])) for _ in range(2)]
        await until(lambda: any(view.busy for view in engine.replicas() if view.id == killed.id))
        os.kill(killed.pid, signal.SIGKILL)
        answers = await asyncio.gather(*slow)
        attempts = sorted(answer.attempts for answer in answers)
        # Ray may not have handed the request over yet: then no replica had tried it.
        assert attempts == [1, 2] or (house.name == "ray" and attempts == [1, 1])

        def again() -> bool:
            view = {view.id: view for view in engine.replicas()}[killed.id]
            return view.state is ReplicaState.READY and view.pid not in (0, killed.pid)

        await until(again, "the killed replica")
        views = {view.id: view for view in engine.replicas()}
        assert views[killed.id].restarts == 1 and not alive(killed.pid)
        assert (await ask(engine, seconds=[0.0], variant="b")).variant == "b"

    house.run(work, toy("slow", variant="a"), toy("slow", variant="b"))


def test_a_request_past_its_deadline_fails(house: House) -> None:
    async def work(engine: Engine) -> None:
        with pytest.raises(RequestError) as caught:
            await ask(engine, seconds=[1.5], timeout_s=0.3)
        assert caught.value.outcome is Outcome.DEADLINE
        assert (await ask(engine, seconds=[0.0])).variant == "v", "the replica finished for nothing and goes on"

    house.run(work, toy("slow"))


def test_a_replica_killed_under_a_trial_is_survived(house: House) -> None:
    partitions = [cpu_slices((2,)), cpu_slices((1, 1))]
    base = Layout.parse(["large on cpu:1", "large on cpu:1"])
    budget = TrialBudget(count=3, longest_s=30.0, clock_s=120.0, min_requests=400)
    trigger = ReplanTrigger(200.0, settle_s=0.2)
    problem = TrialSearch({"small": 0.7, "large": 0.8}, slice_menu(partitions), 1, base, 200.0, budget=budget)
    policy = ServicePolicy("toy", problem, ServiceObjectives(0.9, Slo(2.0, 0.5)), 50.0, trigger)

    async def work(engine: Engine) -> None:
        async with Live(policy, engine, toy("double").model) as live:
            await live.until(lambda: len(live.records) == 1 and "sample" in live.log[-1]["observation"])
            assert len(engine.replicas()) == 2
            killed = engine.replicas()[0]
            os.kill(killed.pid, signal.SIGKILL)
            live.asking.clear()  # the trial is not to end before the engine knows
            await until(lambda: any(view.restarts for view in engine.replicas()), "a replica that is started again")
            live.asking.set()
            await live.until(live.settled)
            assert live.failed == 0
            assert all(record.outcome == APPLIED for record, _ in live.records)
            assert set(live.driver.state.layout.counts) == {"small"}
            deaths = [entry["observation"]["sample"]["deaths"] for entry in live.log[2:]]
            assert max(deaths) == 1, "it was noticed"
            assert decide_again(json.loads(json.dumps(live.log))).differences == ()

    house.run(work)
