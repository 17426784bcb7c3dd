"""Replicas on parts of GPUs: real workers, a driver that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.adapters.devices.places import GpuPlaces
from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.gpu.device import DeviceSpec
from joulery.domain.serving.engine import ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind
from tests.adapters.engines.support import ask, toy
from tests.fakes.mps import daemon, no_daemon_left, on_path
from tests.fakes.nvml import NvmlFake, gpu

A100, V100 = "NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB"


def mig(profile: str, variant: str = "v", service: str = "toy") -> ReplicaSpec:
    return toy("gpu", variant=variant, service=service, slice_=Slice(SliceKind.MIG, profile=profile))


def mps(share: float, device: str = "") -> ReplicaSpec:
    spec = toy("gpu", slice_=Slice(SliceKind.MPS, share_ratio=share))
    return ReplicaSpec(spec.service, spec.variant, spec.slice, spec.model, device=device)


def turn(device: Any, spec: DeviceSpec, wanted: Any, reason: str) -> object:
    return device.apply(wanted)


def cutting(nvml: NvmlFake) -> GpuPlaces:
    cut = {f"gpu:{index}": NvidiaMig(index, nvml) for index in range(len(nvml.boards))}
    return GpuPlaces(turn, mig_devices=cut, specs={name: DeviceSpec("nvidia-mig") for name in cut})


@asynccontextmanager
async def engine_on(places: GpuPlaces, *specs: ReplicaSpec) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(LocalSettings(drain_s=2.0), places=places)
    try:
        await engine.apply(specs)
        yield engine
    finally:
        await engine.close()


async def where(engine: LocalEngine, variant: str = "v") -> str:
    answer = await ask(engine, variant=variant, seconds=0.0)
    return bytes(answer.outputs["CUDA_VISIBLE_DEVICES"]).decode()


async def test_each_replica_sees_its_own_instance() -> None:
    nvml = NvmlFake(gpu(A100))
    async with engine_on(cutting(nvml), mig("3g.20gb", "large"), mig("1g.5gb", "small")) as engine:
        assert sorted(name for name, _, _ in nvml.layout()[1]) == ["1g.5gb", "3g.20gb"]
        places = {view.spec.variant: view.place for view in engine.replicas()}
        assert await where(engine, "large") == places["large"]
        assert await where(engine, "small") == places["small"]
        assert len(set(places.values())) == 2


async def test_another_cut_loses_no_request_and_leaves_what_can_stay() -> None:
    nvml = NvmlFake(gpu(A100))
    async with engine_on(cutting(nvml), mig("2g.10gb", "small"), mig("3g.20gb", "large")) as engine:
        stays = next(view for view in engine.replicas() if view.spec.variant == "small")
        waiting = [asyncio.create_task(ask(engine, seconds=0.02)) for _ in range(60)]
        await asyncio.sleep(0)
        done = await engine.apply([mig("2g.10gb", "small"), mig("2g.10gb", "small"), mig("1g.5gb", "tiny")])
        answers = await asyncio.gather(*waiting)
        assert len(answers) == 60
        assert stays.id in {view.id for view in engine.replicas()}
        assert [str(spec.slice) for spec in done.stopped] == ["3g.20gb"]
        assert sorted(name for name, _, _ in nvml.layout()[1]) == ["1g.5gb", "2g.10gb", "2g.10gb"]


async def test_a_cut_that_fails_leaves_the_old_replicas_serving() -> None:
    nvml = NvmlFake(gpu(A100))
    places = cutting(nvml)
    async with engine_on(places, mig("7g.40gb", "large")) as engine:
        before, waiting = nvml.layout(), []

        def refuse(device: Any, spec: DeviceSpec, wanted: Any, reason: str) -> object:
            waiting.append(asyncio.run_coroutine_threadsafe(ask(engine, seconds=0.0), loop))
            if wanted.profiles != ("7g.40gb",):
                raise ActuationError("the driver refuses")
            return device.apply(wanted)

        loop = asyncio.get_running_loop()
        places.turn = refuse
        with pytest.raises(ActuationError, match="the driver refuses"):
            await engine.apply([mig("3g.20gb", "large"), mig("3g.20gb", "small")])
        assert nvml.layout() == before
        assert await where(engine, "large") == engine.replicas()[0].place
        await asyncio.gather(*(asyncio.wrap_future(one) for one in waiting))


async def test_a_new_replica_that_does_not_start_leaves_the_old_cut_serving() -> None:
    nvml = NvmlFake(gpu(A100))
    async with engine_on(cutting(nvml), mig("7g.40gb", "large")) as engine:
        before = nvml.layout()
        broken = toy("no_such_model", variant="small", slice_=Slice(SliceKind.MIG, profile="3g.20gb"))
        with pytest.raises(Exception, match="no_such_model"):
            await engine.apply([mig("3g.20gb", "large"), broken])
        assert nvml.layout() == before
        assert await where(engine, "large") == engine.replicas()[0].place


async def test_two_gpus_are_cut_each_for_its_part() -> None:
    nvml = NvmlFake(gpu(A100), gpu(A100, 1))
    wanted = [mig("7g.40gb", "large"), mig("3g.20gb", "small"), mig("3g.20gb", "small")]
    async with engine_on(cutting(nvml), *wanted):
        assert [len(nvml.layout(index)[1]) for index in range(2)] == [1, 2]


async def test_more_than_the_gpus_have_is_refused_and_nothing_changes() -> None:
    nvml = NvmlFake(gpu(A100))
    async with engine_on(cutting(nvml), mig("7g.40gb")) as engine:
        with pytest.raises(CapabilityError, match=r"no GPU .*room for 7g\.40gb"):
            await engine.apply([mig("7g.40gb"), mig("7g.40gb")])
        assert len(engine.replicas()) == 1


async def test_without_gpus_their_slices_are_refused() -> None:
    engine = LocalEngine()
    with pytest.raises(CapabilityError, match=r"no 3g\.20gb slice"):
        await engine.apply([mig("3g.20gb")])
    await engine.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", on_path())
    with no_daemon_left(tmp_path):
        yield tmp_path


async def test_shares_of_a_gpu_and_which_gpu(folder: Path) -> None:
    nvml = NvmlFake(gpu(V100), gpu(V100, 1))
    shared = {f"gpu:{index}": NvidiaMps(index, nvml, str(folder)) for index in range(2)}
    places = GpuPlaces(turn, shared=shared, specs={name: DeviceSpec("nvidia-mps") for name in shared})
    async with engine_on(places, mps(0.6, "gpu:1"), mps(0.4), mps(0.6)) as engine:
        assert daemon(folder) is not None
        seen = {view.spec: view.place for view in engine.replicas()}
        assert seen == {mps(0.6, "gpu:1"): "gpu:1", mps(0.6): "gpu:0", mps(0.4): "gpu:0"}
        answers = [await ask(engine, seconds=0.0) for _ in range(6)]
        percents = {bytes(answer.outputs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]).decode() for answer in answers}
        assert percents == {"60", "40"}
        with pytest.raises(CapabilityError, match=r"no GPU .*room for mps:0\.5"):
            await engine.apply([mps(0.6, "gpu:1"), mps(0.4), mps(0.6), mps(0.5)])


async def test_whole_gpus() -> None:
    places = GpuPlaces(turn, whole={"gpu:0": "GPU-a", "gpu:1": "GPU-b"})
    whole = toy("gpu", slice_=Slice(SliceKind.WHOLE))
    async with engine_on(places, whole, whole) as engine:
        assert {view.place for view in engine.replicas()} == {"GPU-a", "GPU-b"}


async def test_a_gpu_in_exclusive_process_mode_takes_a_new_replica_after_the_old_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = GpuPlaces(turn, whole={"gpu:0": "GPU-a", "gpu:1": "GPU-b"}, alone=frozenset({"GPU-a"}))
    old, new = (toy("gpu", variant=name, slice_=Slice(SliceKind.WHOLE)) for name in ("v", "w"))
    other = toy("gpu", service="other", slice_=Slice(SliceKind.WHOLE))
    async with engine_on(places, old, other) as engine:
        present: list[str] = []
        assign = GpuPlaces.assign

        def seen(places: GpuPlaces, *arguments: Any) -> Any:
            present.extend(view.place for view in engine.replicas())
            return assign(places, *arguments)

        monkeypatch.setattr(GpuPlaces, "assign", seen)
        waiting = [asyncio.create_task(ask(engine, variant="", seconds=0.02)) for _ in range(10)]
        await asyncio.sleep(0)
        done = await engine.apply([new, other])
        assert present == ["GPU-b"]  # the other board's replica alone, which stays
        assert [spec.variant for spec in done.stopped] == ["v"]
        assert len(await asyncio.gather(*waiting)) == 10
        assert await where(engine, "w") == "GPU-a"
        with pytest.raises(Exception, match="no_such_model"):
            await engine.apply([toy("no_such_model", variant="x", slice_=Slice(SliceKind.WHOLE)), other])
        assert await where(engine, "w") == "GPU-a"


def on_slice(profile: str, device: str, together: str, processes: int = 1) -> list[ReplicaSpec]:
    """The processes of one instance of a plan."""
    piece = Slice(SliceKind.MIG, profile=profile, share_ratio=1 / processes)
    return [replace(toy("gpu", slice_=piece), device=device, together=together)] * processes


async def test_the_next_plan_keeps_what_runs_on_its_slices_and_cuts_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", on_path())
    nvml = NvmlFake(gpu(A100), gpu(A100, 1))
    places = cutting(nvml)

    def within(name: str, instance: str) -> tuple[NvidiaMps, DeviceSpec]:
        return NvidiaMps(int(name[4:]), nvml, str(tmp_path), instance), DeviceSpec("nvidia-mps")

    places.within = within
    pair, other = on_slice("3g.20gb", "gpu:0", "a/0", 2), on_slice("3g.20gb", "gpu:0", "b/0")
    with no_daemon_left(tmp_path):
        async with engine_on(places, *pair, *other) as engine:
            before = {view.id: view.place for view in engine.replicas()}
            assert len(before) == 3 and len(set(before.values())) == 2
            answering = [asyncio.create_task(ask(engine, seconds=0.01)) for _ in range(30)]
            await asyncio.sleep(0)
            done = await engine.apply([*pair, *on_slice("2g.10gb", "gpu:1", "a/1")])
            assert (len(done.kept), len(done.started), len(done.stopped)) == (2, 1, 1)
            await asyncio.gather(*answering)
            now = {view.id: view.place for view in engine.replicas()}
            assert {name: place for name, place in now.items() if name in before}.items() <= before.items()
            assert [name for name, _, _ in nvml.layout(0)[1]] == ["3g.20gb", "3g.20gb"], "the cut in use stays"
            assert [name for name, _, _ in nvml.layout(1)[1]] == ["2g.10gb"]
