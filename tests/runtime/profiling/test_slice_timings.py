import asyncio
import json
from collections import Counter, deque

import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import (
    InferResponse,
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaState,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.domain.serving.profile import Profile
from joulery.perf.power.power_line import PowerLine
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.runtime.profiling.slice_timings import Plan, assemble, digest, machine, measure

MODELS = {name: ModelRef(ModelKind.PYTHON, f"toys:{name}") for name in ("small", "large")}
MS = {"small": 4.0, "large": 9.0}
INPUTS = [{"x": np.array([k])} for k in range(3)]
PARTITIONS = [cpu_slices((2,)), cpu_slices((1, 1)), cpu_slices((2, 1))]


class ToyEngine:
    """Replicas that take as long as their variant does, half as long on two cores, longer beside busy neighbours."""

    def __init__(self, broken: str = "") -> None:
        self.views: list[ReplicaView] = []
        self.idle: deque[ReplicaView] = deque()
        self.asked: list[tuple[str, int]] = []
        self.applied: list[Counter[str]] = []
        self.under_way = 0
        self.broken = broken

    def replicas(self):
        return tuple(self.views)

    async def apply(self, target):
        self.views = [ReplicaView(f"r{k}", spec, ReplicaState.READY) for k, spec in enumerate(target)]
        self.idle = deque(self.views)
        self.applied.append(Counter(str(spec) for spec in target))
        return Transition(tuple(target), (), (), 0.0, 0.3, 0.3, 0.2)

    async def infer(self, service, request):
        view = self.idle.popleft()
        if view.spec.variant == self.broken:
            raise RequestError("wrong shape", Outcome.INVALID, variant=self.broken)
        self.asked.append((view.spec.variant, int(np.ravel(request.inputs["x"])[0])))
        self.under_way += 1
        busy = self.under_way
        await asyncio.sleep(0)
        self.under_way -= 1
        self.idle.append(view)
        cpu_s = MS[view.spec.variant] / 1e3 * (1 + 0.1 * (busy - 1))
        wall_s = cpu_s / view.spec.slice.cores
        return InferResponse({}, view.spec.variant, view.id, 0.0, 5.0, 5.0 + wall_s, wall_s * 0.9, cpu_s)


async def run(engine=None, **options):
    return await measure(engine or ToyEngine(), "toy", MODELS, PARTITIONS, INPUTS, Plan(2, 6, 5), **options)


async def test_every_variant_is_timed_on_every_kind_of_slice_alone_and_beside_busy_neighbours():
    engine = ToyEngine()
    found = {(m.variant, str(m.slice)): m for m in await run(engine)}
    assert sorted(found) == [("large", "cpu:1"), ("large", "cpu:2"), ("small", "cpu:1"), ("small", "cpu:2")]
    one, two = found["large", "cpu:1"], found["large", "cpu:2"]
    assert one.alone.mean_s == pytest.approx(0.009) and one.alone.mean_cpu_s == pytest.approx(0.009)
    assert one.loaded.mean_cpu_s == pytest.approx(0.0099, rel=0.03), "from 1 + 1: two under way"
    assert two.alone.mean_s == pytest.approx(0.0045) and two.loaded is two.alone, "from 2: no neighbour"
    assert (len(one.alone), len(two.alone)) == (12, 6)
    assert (one.startup_s, one.startup_cpu_s) == (0.3, 0.2)
    assert engine.applied[-1] == Counter(), "nothing is left running"


async def test_real_inputs_go_round_and_progress_is_reported():
    engine, progress = ToyEngine(), []
    await run(engine, progress=lambda done, of, what: progress.append((done, of, what)))
    assert {value for _, value in engine.asked} == {0, 1, 2}
    assert progress[0] == (0, 6, "small on cpu:2") and progress[3] == (3, 6, "large on cpu:1 + cpu:1")
    assert progress[-1] == (6, 6, "")


async def test_a_model_that_refuses_its_inputs_is_one_clear_error():
    with pytest.raises(DataError, match=r"large .*: wrong shape"):
        await run(ToyEngine(broken="large"))


async def test_a_profile_says_what_it_was_measured_on():
    profile = assemble(
        await run(),
        PowerLine(20.0, 8.0, 0.01, 12),
        MODELS,
        cores=2,
        quality=Quality.MODELLED,
        meter="cpu-model",
        band_ratio=0.5,
        warmup=2,
        others_cores=float("nan"),
    )
    written = json.loads(json.dumps(profile.as_dict()))
    assert Profile.from_dict(written).as_dict() == written
    large = profile.entry("large", cpu_slices((1,))[0])
    assert large.energy_j == pytest.approx(large.loaded.mean_cpu_s * 8.0) and profile.idle_w == 20.0
    assert written["machine"]["others_busy_cores"] is None and written["machine"]["cores_used"] == 2
    assert written["machine"]["logical_cpus"] >= 1 and written["machine"]["processor"]
    assert written["models"] == {"small": "toys:small", "large": "toys:large"}
    assert written["created_s"] > 1.7e9 and written["warmup"] == 2


def test_machine_is_json_ready():
    assert json.loads(json.dumps(machine())) == machine()


def test_a_model_file_is_known_by_its_content(tmp_path):
    file = tmp_path / "m.onnx"
    file.write_bytes(b"abc")
    assert digest(ModelRef(ModelKind.ONNX, str(file))).startswith("ba7816bf")
    with pytest.raises(DataError, match="model cannot be read: No such"):
        digest(ModelRef(ModelKind.ONNX, str(tmp_path / "none.onnx")))
