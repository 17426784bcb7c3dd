"""GPU groups of the services of one site: which GPUs, how they are cut, and whose replicas are where."""

from pathlib import Path

import pytest

from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.places import GpuPlaces
from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.app.serving.service import service_setup
from joulery.app.wiring.gpus import LocalGpus, gpu_groups
from joulery.config.parsing.reading import load
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, ConfigError, InfeasibleError
from joulery.domain.gpu.device import WantedPart
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slice, SliceKind
from joulery.runtime.serving.layout_actuator import LayoutActuator
from tests.adapters.engines.embedded.test_engine_gpus import cutting
from tests.adapters.engines.support import ask, toy
from tests.fakes.nvml import NvmlFake, gpu

SITE = """\
joulery: 1
mode: act
fleet: {{devices: [{devices}]}}
plan: {{colocate: {colocate}}}
serving: {{engine: {engine}}}
services:
  - {{name: a, slo: {{latency: 1 s}}, family: {family}{a}}}
  - {{name: b, slo: {{latency: 1 s}}, family: {family}{b}}}
"""
FAMILY = """{variants: [
      {name: small, accuracy: 70 %, accuracy_source: made up, model: {kind: python, target: "toys:gpu"}},
      {name: large, accuracy: 80 %, accuracy_source: made up, model: {kind: python, target: "toys:gpu"}}]}"""
CUTS = "mode: mig, mig_partitions: [[7g.40gb], [3g.20gb, 4g.20gb]]"
TWO = f"{{gpu: 0, {CUTS}}}, {{gpu: 1, {CUTS}}}"


def written(folder: Path, devices: str = TWO, *, colocate: bool = False, a: str = "", b: str = "", **more: str) -> Site:
    engine = more.get("engine", "{kind: embedded}")
    text = SITE.format(
        devices=devices, colocate="true" if colocate else "false", engine=engine, family=FAMILY, a=a, b=b
    )
    (folder / "site.yaml").write_text(text)
    return load(folder / "site.yaml")


def opened(site: Site, nvml: NvmlFake) -> LocalGpus:
    partitions = {f"gpu:{at}": each.as_partitions() for at, each in enumerate(site.fleet.devices)}
    return LocalGpus(cutting(nvml), partitions)


def boards(count: int = 2) -> NvmlFake:
    return NvmlFake(*(gpu(index=index) for index in range(count)))


def test_each_service_has_a_gpu_group_and_its_layouts(tmp_path):
    site = written(tmp_path)
    groups = gpu_groups(site, opened(site, boards()))
    a, b = (service_setup(site, config, tmp_path, groups[config.name]) for config in site.services)
    assert (a.gpus, b.gpus) == (("gpu:0",), ("gpu:1",))
    assert len(a.candidates) == len(b.candidates) == 2 + 4
    assert {device for parts in b.slice_assignment.values() for _, device in parts} == {"gpu:1"}
    named = written(tmp_path, a=", gpus: [1]", b=", gpus: [0]")
    assert {name: group.names for name, group in gpu_groups(named, opened(named, boards())).items()} == {
        "a": ("gpu:1",),
        "b": ("gpu:0",),
    }


def test_a_gpu_group_hands_out_only_its_own_gpus(tmp_path):
    site = written(tmp_path)
    group = gpu_groups(site, opened(site, boards()))["b"]
    assert isinstance(group.places, GpuPlaces) and list(group.places.mig_devices) == ["gpu:1"]
    seven = Slice(SliceKind.MIG, profile="7g.40gb")
    with pytest.raises(CapabilityError, match="no GPU here has room"):
        group.places.vacate([WantedPart(seven), WantedPart(seven)])
    places = GpuPlaces(group.places.turn, shared={"gpu:2": group}, whole={"gpu:3": "GPU-3"})  # type: ignore[dict-item]
    assert list(places.only(["gpu:3"]).whole) == ["gpu:3"] and not places.only(["gpu:3"]).shared


def test_shared_gpus_are_cut_once(tmp_path):
    site = written(tmp_path, f"{{gpu: 0, {CUTS}}}", colocate=True)
    groups = gpu_groups(site, opened(site, boards()))
    a, b = (service_setup(site, config, tmp_path, groups[config.name]) for config in site.services)
    assert a.gpus == b.gpus == ("gpu:0",)
    assert [str(piece) for piece in a.candidates[0].slices] == ["4g.20gb"] and len(a.candidates) == 2
    assert [str(piece) for piece in b.candidates[0].slices] == ["3g.20gb"] and len(b.candidates) == 2


@pytest.mark.parametrize(
    ("keys", "words", "pointer"),
    [
        ({"a": ", gpus: []"}, "one GPU or more", "services.0.gpus"),
        ({"a": ", gpus: [0, 0]"}, "is listed twice", "services.0.gpus.1"),
        (
            {"a": ", gpus: [0, 1]", "b": ", gpus: [1]"},
            "service a has that GPU",
            "services.1.gpus.0",
        ),
        ({"b": ", gpus: [7]"}, "is not listed under fleet.devices", "services.1.gpus.0"),
    ],
)
def test_an_invalid_gpu_group_is_refused_with_its_line(tmp_path, keys, words, pointer):
    with pytest.raises(ConfigError, match=words) as caught:
        written(tmp_path, **keys)
    assert caught.value.pointer == pointer and caught.value.line is not None
    if "overlap" in words:
        assert written(tmp_path, colocate=True, **keys).services[1].gpus == (1,), "unless they may share"


def test_more_services_than_gpus_are_one_clear_error(tmp_path):
    site = written(tmp_path, f"{{gpu: 0, {CUTS}}}")
    with pytest.raises(InfeasibleError, match=r"2 services \(a, b\) .*1 GPUs"):
        gpu_groups(site, opened(site, boards()))
    whole = written(tmp_path, "{gpu: 0}", colocate=True)
    with pytest.raises(InfeasibleError, match="gpu:0, which a, b share"):
        gpu_groups(whole, opened(whole, boards()))


def test_ray_has_no_gpu_groups(tmp_path):
    site = written(tmp_path, engine="{kind: ray}")
    with pytest.raises(ConfigError, match="2 services need the embedded engine"):
        gpu_groups(site, opened(site, boards()))


def uuids(nvml: NvmlFake, index: int) -> set[str]:
    return {part.id for part in NvidiaMig(index, nvml).observe().slices}


async def test_replicas_stay_in_their_gpu_group_and_a_new_cut_leaves_the_others_alone(tmp_path):
    nvml, site = boards(), written(tmp_path, a=", gpus: [1]", b=", gpus: [0]")
    here = opened(site, nvml)
    groups = gpu_groups(site, here)
    engine = LocalEngine(LocalSettings(drain_s=2.0), places=here.places)
    models = dict.fromkeys(("small", "large"), toy("gpu").model)

    def actuator(name: str) -> LayoutActuator:
        config = site.service(name)
        return LayoutActuator(
            engine, name, models, service_setup(site, config, tmp_path, groups[name]).slice_assignment
        )

    def places(name: str) -> dict[str, int]:
        return {view.place: view.pid for view in engine.replicas() if view.spec.service == name}

    try:
        for name in ("a", "b"):
            await actuator(name).run(Layout.parse(["large on 7g.40gb"]))
        assert places("a").keys() <= uuids(nvml, 1) and places("b").keys() <= uuids(nvml, 0)
        before = places("b")
        await actuator("a").run(Layout.parse(["small on 3g.20gb", "large on 4g.20gb"]))
        assert places("a").keys() == uuids(nvml, 1) and len(places("a")) == 2
        assert places("b") == before, "the same process on the same instance"
        kept = places("a")
        await actuator("a").run(Layout.parse(["small on 3g.20gb", "small on 4g.20gb"]))
        assert len(places("a").items() & kept.items()) == 1, "what runs already stays"
        answer = await ask(engine, service="a", variant="small", seconds=0.0)
        assert bytes(answer.outputs["CUDA_VISIBLE_DEVICES"]).decode() in uuids(nvml, 1)
    finally:
        await engine.close()


async def test_running_replicas_stay_on_their_gpu_where_a_group_has_several(tmp_path):
    nvml = boards()
    site = written(tmp_path, a=", gpus: [0, 1]", b=", gpus: [0]", colocate=True)
    here = LocalGpus(cutting(nvml), dict.fromkeys(("gpu:0", "gpu:1"), ((Slice(SliceKind.MIG, profile="7g.40gb"),),)))
    engine = LocalEngine(LocalSettings(drain_s=2.0), places=here.places)
    assignment = service_setup(site, site.services[0], tmp_path, here).slice_assignment
    actuator = LayoutActuator(engine, "a", dict.fromkeys(("small", "large", "tiny"), toy("gpu").model), assignment)
    try:
        await actuator.run(Layout.parse(["large on 7g.40gb", "small on 7g.40gb"]))
        stays = {view.spec.variant: view.place for view in engine.replicas()}["small"]
        await actuator.run(Layout.parse(["small on 7g.40gb", "tiny on 7g.40gb"]))
        assert {view.spec.variant: view.place for view in engine.replicas()}["small"] == stays
    finally:
        await engine.close()
