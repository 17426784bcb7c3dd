"""Replicas that die, hang or cannot be loaded, with real processes."""

import asyncio
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.domain.errors import ActuationError, ConfigError, DataError, JouleryError
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaSpec, ReplicaState, RequestError
from tests.adapters.engines.support import CORE, alive, ask, children, running, toy, until
from tests.waiting import wait_until


def flag(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    return np.array([str(path).encode()], object)


async def test_the_request_of_a_killed_replica_is_tried_again_once(tmp_path: Path) -> None:
    async with running(toy("dies_once")) as engine:
        (before,) = engine.replicas()
        answer = await ask(engine, flag=flag(tmp_path / "died"))
        assert answer.attempts == 2
        (after,) = engine.replicas()
        assert after.id == before.id
        assert after.pid != before.pid
        assert (after.restarts, after.last_error) == (1, "")


async def test_a_request_that_kills_twice_is_given_up_and_the_next_is_served(tmp_path: Path) -> None:
    async with running(toy("dies"), toy("echo", service="other")) as engine:
        with pytest.raises(RequestError, match=r"two replicas died .* SIGKILL") as caught:
            await ask(engine)
        assert caught.value.outcome is Outcome.CRASHED
        await ask(engine, service="other", x=[1])
        await until(lambda: engine.replicas()[0].state is ReplicaState.READY)


async def test_killing_workers_under_load_loses_no_accepted_request() -> None:
    async with running(toy("slow"), toy("slow")) as engine:
        work = [asyncio.ensure_future(ask(engine, seconds=[0.005])) for _ in range(400)]
        for _ in range(3):
            await asyncio.sleep(0.1)
            await until(lambda: all(view.state is ReplicaState.READY for view in engine.replicas()))
            os.kill(engine.replicas()[0].pid, signal.SIGKILL)
        answers = await asyncio.gather(*work)
        assert len(answers) == 400
        assert 1 <= sum(answer.attempts == 2 for answer in answers) <= 3
        assert sum(view.restarts for view in engine.replicas()) == 3


def gated(gate: Path) -> tuple[ReplicaSpec, ReplicaSpec]:
    """A replica and its standby; neither restarts while ``gate`` is locked."""
    gate.touch()
    original = toy("Gated", options=json.dumps({"gate": str(gate)}))
    return original, replace(original, standby=True, threads=2)


@contextmanager
def shut(gate: Path) -> Iterator[None]:
    """Nothing that waits for the gate is loaded meanwhile."""
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def killed(engine: LocalEngine) -> int:
    """Kill the replica that answers; the process of its standby."""
    views = {view.spec.standby: view for view in engine.replicas()}
    os.kill(views[False].pid, signal.SIGKILL)
    await until(lambda: any(view.state is ReplicaState.RESTARTING for view in engine.replicas()), "the death")
    return views[True].pid


async def answering(engine: LocalEngine, requests: int) -> set[int]:
    answers = await asyncio.gather(*(ask(engine) for _ in range(requests)))
    return {int(answer.outputs["pid"][0]) for answer in answers}


async def test_a_warm_standby_answers_while_its_replica_restarts(tmp_path: Path) -> None:
    """Seen: a dead instance waited 1.5 s for its restart beside its warm standby."""
    gate = tmp_path / "gate"
    async with running(*gated(gate)) as engine:
        for _ in range(2):  # it stands by again afterwards, and takes over again
            with shut(gate):
                standby = await killed(engine)
                assert await answering(engine, 20) == {standby}
            await until(lambda: all(v.state is ReplicaState.READY for v in engine.replicas()), "the restart")
            original = next(view for view in engine.replicas() if not view.spec.standby)
            assert await answering(engine, 6) == {original.pid}
        assert [view.spec.standby for view in engine.replicas()].count(True) == 1


async def test_a_standby_that_dies_while_it_answers_for_another_loses_no_request(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with running(*gated(gate)) as engine:
        with shut(gate):
            os.kill(await killed(engine), signal.SIGKILL)
            await until(lambda: all(v.state is ReplicaState.RESTARTING for v in engine.replicas()), "both deaths")
            asked = asyncio.ensure_future(answering(engine, 5))
        assert len(await asked) == 1
        await until(lambda: all(v.state is ReplicaState.READY for v in engine.replicas()), "the restarts")
        original = next(view for view in engine.replicas() if not view.spec.standby)
        assert await answering(engine, 5) == {original.pid}


async def test_a_standby_that_answers_for_a_dead_replica_can_be_promoted(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    original, standby = gated(gate)
    async with running(original, standby) as engine:
        with shut(gate):
            process = await killed(engine)
            change = await engine.apply([replace(standby, standby=False)])
            assert change.started == ()
            assert await answering(engine, 8) == {process}


async def test_a_replica_that_hangs_is_ended_and_its_request_is_not_tried_again() -> None:
    async with running(toy("slow"), hang_s=0.3, deadline_s=20.0) as engine:
        (before,) = engine.replicas()
        hung = asyncio.ensure_future(ask(engine, seconds=[60]))
        waiting = asyncio.ensure_future(ask(engine, seconds=[0]))
        with pytest.raises(RequestError, match="busy with one request for") as caught:
            await hung
        assert caught.value.outcome is Outcome.DEADLINE
        assert (await waiting).attempts == 1
        (after,) = engine.replicas()
        assert after.restarts == 1
        assert not alive(before.pid)


async def test_a_replica_that_died_at_work_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    async with running(toy("dies_once"), hang_s=0.4) as engine:
        await ask(engine, flag=flag(tmp_path / "died"))
        await asyncio.sleep(0.6)
        await ask(engine, flag=flag(tmp_path / "died"))
        await asyncio.sleep(0.6)
        (view,) = engine.replicas()
        assert (view.restarts, view.state) == (1, ReplicaState.READY)


def test_hanging_is_judged_by_the_deadline_but_not_too_soon() -> None:
    assert LocalSettings(deadline_s=60.0).longest_s == 60.0
    assert LocalSettings(deadline_s=0.5).longest_s == 5.0
    assert LocalSettings(deadline_s=60.0, hang_s=2.0).longest_s == 2.0


async def test_an_idle_replica_that_dies_comes_back() -> None:
    async with running(toy("who")) as engine:
        (before,) = engine.replicas()
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: engine.replicas()[0].state is ReplicaState.RESTARTING)
        assert engine.replicas()[0].last_error == "it was ended by SIGKILL"
        assert (await ask(engine)).attempts == 1


async def test_a_replica_that_cannot_come_back_is_tried_ever_more_slowly(tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text("def model(inputs):\n    return {}\n")
    spec = ReplicaSpec("toy", "v", CORE, ModelRef.parse("fragile:model"))
    os.environ["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    try:
        async with running(spec) as engine:
            await ask(engine)
            (tmp_path / "fragile.py").write_text("import nothing_like_this\n")
            os.kill(engine.replicas()[0].pid, signal.SIGKILL)
            await until(lambda: engine.replicas()[0].restarts >= 2)
            (view,) = engine.replicas()
            assert view.state is ReplicaState.RESTARTING
            assert "nothing_like_this" in view.last_error
            waiting = asyncio.ensure_future(ask(engine))
            (tmp_path / "fragile.py").write_text("def model(inputs):\n    return {}\n")
            assert (await waiting).attempts == 1
            (tmp_path / "fragile.py").write_text("import nothing_like_this\n")
            os.kill(engine.replicas()[0].pid, signal.SIGKILL)
            await until(lambda: engine.replicas()[0].restarts >= 4)
        assert engine.replicas() == ()
    finally:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(f"{tmp_path}:")


@pytest.mark.parametrize(
    ("model", "kind", "complaint"),
    [
        ("nothing.onnx", ConfigError, "nothing.onnx: the model of toy/v does not exist"),
        ("{tmp}/secret.onnx", ConfigError, "may not be read"),
        ("{tmp}", ConfigError, "not a model"),
        ("{tmp}/corrupt.onnx", DataError, "corrupt.onnx: not an ONNX model that can be run"),
        ("{tmp}/folder.onnx", ConfigError, "cannot be read: Is a directory"),
        ("nothing_here:model", ConfigError, "cannot be imported: ModuleNotFoundError: No module named 'nothing_here'"),
        ("tests.adapters.engines.toys:nothing", ConfigError, "has no callable 'nothing'"),
        ("tests.adapters.engines.toys:not_callable", ConfigError, "has no callable 'not_callable'"),
        ("tests.adapters.engines.toys:undeclared", ConfigError, "unknown datatype"),
        ("tests.adapters.engines.toys:CannotBeMade", ConfigError, "cannot be made: RuntimeError: no weights"),
        ("pathlib:PurePath", ConfigError, "makes objects that cannot be called"),
        ("tests.adapters.engines.toys:echo?{", ConfigError, "options are not JSON"),
        ("tests.adapters.engines.toys:echo?[1]", ConfigError, "options are a JSON object"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_one_clear_error_and_the_old_replicas_serve_on(
    tmp_path: Path, model: str, kind: type[JouleryError], complaint: str
) -> None:
    (tmp_path / "corrupt.onnx").write_bytes(b"\x00garbage")
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "secret.onnx").touch(mode=0)
    if "secret" in model and os.access(tmp_path / "secret.onnx", os.R_OK):
        pytest.skip("this user may read everything")
    others = children()
    async with running(toy("who")) as engine:
        before = engine.replicas()
        with pytest.raises(kind, match=complaint):
            where, _, options = model.partition("?")
            reference = replace(ModelRef.parse(where.format(tmp=tmp_path)), options=options)
            spec = ReplicaSpec("toy", "v", CORE, reference)
            await engine.apply([spec, toy("echo")])
        await ask(engine)
        (after,) = engine.replicas()
        assert after.pid == before[0].pid
        assert children() - others == {after.pid}


@pytest.mark.parametrize(
    ("body", "launch_s", "complaint"),
    [
        ("import os\nos._exit(3)\n", 30.0, "did not start: it exited with status 3"),
        ("import os\nos.kill(os.getpid(), 11)\n", 30.0, "did not start: it was ended by SIGSEGV"),
        ("import time\ntime.sleep(60)\n", 0.5, "did not start: it was not ready after 0.5 s"),
    ],
)
async def test_a_replica_that_dies_or_stalls_while_loading(
    tmp_path: Path, body: str, launch_s: float, complaint: str
) -> None:
    (tmp_path / "dying.py").write_text(body)
    os.environ["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    try:
        async with running(launch_s=launch_s) as engine:
            with pytest.raises(ActuationError, match=complaint):
                await engine.apply([ReplicaSpec("toy", "v", CORE, ModelRef.parse("dying:model"))])
            with pytest.raises(RequestError):
                await ask(engine)
    finally:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(f"{tmp_path}:")


async def test_what_a_dead_worker_forked_does_not_hold_the_engine_up() -> None:
    async with running(toy("leaves_a_child")) as engine:
        child = int((await ask(engine, die=[False])).outputs["child"][0])
        with pytest.raises(RequestError, match="two replicas died"):
            await ask(engine, die=[True])
        await until(lambda: not alive(child), "the child of a worker ends with it")


async def test_replicas_that_started_beside_one_that_cannot_are_stopped_without_a_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = children()
    (tmp_path / "late.py").write_text("import time\ntime.sleep(1)\nraise RuntimeError('no')\n")
    os.environ["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    try:
        async with running() as engine:
            with pytest.raises(ConfigError, match="RuntimeError: no"):
                late = ReplicaSpec("toy", "v", CORE, ModelRef.parse("late:model"))
                await engine.apply([late, toy("echo"), toy("echo", service="other")])
            assert engine.replicas() == ()
    finally:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(f"{tmp_path}:")
    gc.collect()
    assert caplog.records == []
    assert children() - others == set()


CONTROLLER = """
import asyncio, sys
from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from tests.adapters.engines.support import ask, toy

async def main():
    engine = LocalEngine()
    await engine.apply([toy("slow"), toy("slow"), toy("slow", service="b")])
    for view in engine.replicas():
        print(view.pid)
    print("ready", flush=True)
    await asyncio.gather(*(ask(engine, seconds=[30]) for _ in range(2)))

asyncio.run(main())
"""


def test_killing_the_controller_leaves_no_child_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(line) for line in iter(controller.stdout.readline, "ready\n")]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        controller.kill()
    assert wait_until(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}")


def test_a_worker_whose_parent_is_not_the_one_named_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "joulery.adapters.engines.embedded.worker", "0", "1", "0", "1"], stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0


async def test_an_engine_that_never_started_anything_can_be_closed() -> None:
    engine = LocalEngine()
    await engine.close()
    with pytest.raises(RequestError) as caught:
        await ask(engine)
    assert caught.value.outcome is Outcome.UNAVAILABLE
