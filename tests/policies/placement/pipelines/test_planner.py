import numpy as np
import pytest

from joulery.domain.errors import ConfigError, DataError, InfeasibleError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.quality import Quality
from joulery.domain.serving.service import Slo
from joulery.domain.trace.operators import OperationCost, OperatorKind
from joulery.perf.catalog.architectures import operations_of
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.sensitivity import emulated_profile
from joulery.policies.placement.pipelines.device_groups import Shape
from joulery.policies.placement.pipelines.partition import PartitionRules, cut_model, merged_phases
from joulery.policies.placement.pipelines.planner import plan_pipelines
from joulery.policies.placement.pipelines.task import DeviceType, PipelineRules, arrivals

GIB = 2.0**30


def model(name: str, *, gemm_s: float = 0.0, stream_s: float = 0.0, gib: float = 1.0, layers: int = 8) -> ClockProfile:
    """Layers of a product (compute-bound) and a stream (memory-bound), together as long as asked for."""
    operations = []
    for layer in range(layers):
        flops = gemm_s / layers * 0.6 * V100.peak_flops
        traffic = stream_s / layers * 0.8 * V100.peak_bandwidth
        weights = gib * GIB / layers
        operations.append(
            OperationCost(f"layer{layer}.dot", flops, 1e3, 1.0, "dot", "forward", weights, 1e4, OperatorKind.DOT)
        )
        operations.append(
            OperationCost(f"layer{layer}.add", 1.0, traffic, 1.0, "add", "forward", 0.0, 1e4, OperatorKind.ELEMENTWISE)
        )
    return emulated_profile(name, operations, V100)


PROFILES = {
    "gemm": model("gemm", gemm_s=0.1, gib=4),
    "stream": model("stream", stream_s=0.1, gib=4),
    "large": model("large", stream_s=0.2, gib=20),
    "huge": model("huge", stream_s=0.2, gib=200),
    "empty-ish": model("empty-ish", gib=0.1),
}


def service(name: str, which: str, rate: float = 2.0, slo_s: float = 1.0, quantile: float = 0.99) -> Workload:
    return Workload(name, which, Slo(slo_s, quantile), rate, Arrivals.poisson())


def planned(policy="muserve", services=None, gpus=4, **rules):
    chosen = services or [service(f"{which}{i}", which) for which in ("gemm", "stream") for i in range(2)]
    device = DeviceType("V100", gpus, 3.0, 13 * GIB)
    return plan_pipelines(policy, chosen, PROFILES, device, PipelineRules(requests=1500, **rules))


@pytest.mark.parametrize("policy", ["muserve", "best"])
def test_what_every_plan_keeps(policy: str) -> None:
    plan = planned(policy)
    assert len(plan.gpus) == 4
    assert not plan.violations
    assert plan.quality is Quality.MODELLED
    for gpu in plan.gpus:
        assert gpu.free_bytes >= 0
        assert gpu.clock_floor_mhz <= gpu.clock_mhz <= gpu.clock_ceiling_mhz <= gpu.clock_max_mhz
        assert gpu.power_w <= gpu.full_power_w + 1e-9
    assert plan.saving_ratio > 1.2
    assert {part.workload for gpu in plan.gpus for part in gpu.parts} == {each.workload for each in plan.services}
    for each in plan.services:
        assert each.attainment_ratio >= each.required_ratio
        assert each.latency_s <= each.slo_s
        parts = [part for gpu in plan.gpus for part in gpu.parts if part.workload == each.workload]
        assert len(parts) == sum(1 for part in parts if part.replica == 0) * each.replicas
        assert sum(part.rate_rps for part in parts if (part.stage, part.shard) == (0, 0)) == pytest.approx(2.0)


def test_best_draws_no_more_than_the_papers_algorithms() -> None:
    assert planned("best").power_w <= planned("muserve").power_w + 1e-6


def test_what_feels_the_clock_alike_shares_a_gpu() -> None:
    plan = planned("muserve", gpus=2, devices_per_model=1)
    assert [{part.model for part in gpu.parts} for gpu in plan.gpus] in ([{"gemm"}, {"stream"}], [{"stream"}, {"gemm"}])
    assert plan.scatter == pytest.approx(0.0, abs=1e-6)


def test_a_model_larger_than_a_gpu_is_cut() -> None:
    plan = planned(services=[service("one", "large")])
    (one,) = plan.services
    assert one.stages * one.shards >= 2
    assert max(part.memory_bytes for gpu in plan.gpus for part in gpu.parts) <= 13 * GIB
    hosts = {index for index, gpu in enumerate(plan.gpus) for part in gpu.parts if part.replica == 0}
    assert len(hosts) <= 4


@pytest.mark.parametrize(
    ("services", "rules", "gpus", "binding", "message"),
    [
        ([service("a", "large")], {"devices_per_model": 1}, 4, "devices per model", "fits nowhere"),
        ([service("a", "large")], {}, 1, "memory of the cluster", "the whole cluster of 1 GPUs has room for 13 GiB"),
        ([service("a", "huge")], {}, 4, "memory of the cluster", "200 GiB of weights"),
        ([service("a", "gemm", slo_s=0.02)], {}, 4, "latency", "cannot answer within 0.02 s"),
    ],
)
def test_what_cannot_be_is_named(services, rules, gpus, binding, message) -> None:
    with pytest.raises(InfeasibleError, match=message) as caught:
        planned(services=services, gpus=gpus, **rules)
    assert caught.value.binding == binding
    assert caught.value.nearest["workload"] == "a"


def test_too_much_demand_is_an_slo_violation() -> None:
    plan = planned(services=[service("a", "gemm", rate=60.0, slo_s=0.5)], gpus=2)
    (violated,) = plan.violations
    assert (violated.workload, violated.what) == ("a", "attainment")
    assert violated.predicted < violated.allowed == 0.99
    assert {gpu.clock_mhz for gpu in plan.gpus} == {1380.0}  # a clock does not make an SLO violation worse


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="nothing to plan"):
        plan_pipelines("muserve", [], PROFILES, DeviceType("V100", 1, 0.0, 1e10), PipelineRules())
    with pytest.raises(ConfigError, match=r"model GPT .*service a .*clock scores") as caught:
        planned(services=[service("a", "GPT")])
    assert "joulery profile GPT --clocks --scores" in caught.value.hint
    with pytest.raises(ConfigError, match="no such preset for pipelines"):
        planned("igniter")
    with pytest.raises(ConfigError, match="a plan needs a device"):
        PipelineRules(devices_per_model=0)


def test_a_profile_without_power_is_refused() -> None:
    known = PROFILES["gemm"]
    blind = ClockProfile(
        "blind", "gpu:0", Quality.MEASURED, "", known.operators, known.clocks_mhz, known.latency_s,
        np.full(len(known.clocks_mhz), np.nan), known.idle_w,
    )  # fmt: skip
    with pytest.raises(DataError, match="profile of blind has no power"):
        plan_pipelines(
            "muserve", [service("a", "blind")], {"blind": blind}, DeviceType("V100", 1, 0.0, 1e10), PipelineRules()
        )


@pytest.mark.parametrize(("name", "phase", "clusters"), [("BERT-base", "forward", 145), ("GPT2-large", "prefill", 576)])
def test_clusters_of_published_models(name: str, phase: str, clusters: int) -> None:
    operations = [each for each in operations_of(name) if each.phase == phase]
    cut = cut_model(emulated_profile(name, operations, V100), PartitionRules())
    assert len(cut.clusters) == clusters
    better = cut_model(emulated_profile(name, operations, V100), PartitionRules(segmentation=True))
    assert len(better.clusters) < clusters


def test_arrivals_keep_their_process_and_do_not_change_with_the_company() -> None:
    steady = Workload("a", "gemm", Slo(1.0, 0.99), 10.0, Arrivals())
    bursty = Workload("b", "gemm", Slo(2.0, 0.99), 10.0, Arrivals.general(9.0))
    workload = arrivals([steady, bursty], 40_000, seed=1)
    assert np.all(np.diff(workload.arrival_s) >= 0)
    assert workload.slo_s.tolist() == [1.0, 2.0]
    gaps = [np.diff(workload.arrival_s[workload.model == index]) for index in (0, 1)]
    assert gaps[0].std() == pytest.approx(0.0, abs=1e-9)
    assert gaps[1].std() / gaps[1].mean() == pytest.approx(3.0, rel=0.1)
    alone = arrivals([steady], 20_000, seed=1)
    assert np.array_equal(alone.arrival_s, workload.arrival_s[workload.model == 0])


def test_phases_that_share_weights_are_one_operator() -> None:
    prefill = OperationCost("dot", 4.0, 8.0, 1.0, "dot", "prefill", 100.0, 10.0, OperatorKind.DOT)
    decode = OperationCost("dot", 1.0, 2.0, 3.0, "dot", "decode", 0.0, 2.0, OperatorKind.DOT)
    profile = emulated_profile("two", [prefill, decode], V100)
    (merged,) = merged_phases(profile.operators)
    assert (merged.cost.count, merged.cost.flops, merged.cost.parameter_bytes) == (4.0, 7 / 4, 100.0)
    assert merged.time_s == pytest.approx(sum(each.time_s for each in profile.operators))
    assert merged.cost.phase == "prefill+decode"


def test_stages_cover_a_model_and_slow_down_with_their_own_score() -> None:
    cut = cut_model(PROFILES["gemm"], PartitionRules())
    stages = cut.stages(Shape(4, 1))
    assert [stage.first for stage in stages] == [0, *(stage.last + 1 for stage in stages[:-1])]
    assert stages[-1].last == len(cut.operators) - 1
    assert sum(stage.memory_bytes for stage in stages) == pytest.approx(4 * GIB, rel=1e-3)
    clocks = np.array([690.0, 1380.0])
    assert cut.slowdown(cut.profile.score, clocks) == pytest.approx([1 + cut.profile.score / 2, 1.0], rel=0.02)
    assert cut.slowdown(0.0, clocks).tolist() == [1.0, 1.0]
    assert cut.stages(Shape(8, 1)) is not None
    assert cut_model(model("short", gemm_s=0.1, layers=1), PartitionRules()).stages(Shape(4, 1)) is None
