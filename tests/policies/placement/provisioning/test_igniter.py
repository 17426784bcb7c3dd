"""Preset ``igniter``: the published plans, and the paper's algorithm written down line by line, GPU for GPU."""

import json
import random

import pytest

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.provisioning import Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.policies.placement.provisioning.igniter import plan
from tests.data_folder import data_folder
from tests.policies.placement.provisioning import straightforward

V100 = profile("v100")


def workload(name, model, slo_ms, rate_rps):
    return Workload(name, model, Slo(slo_ms / 1e3, 0.99), rate_rps)


def published(name="app12"):
    return json.loads((data_folder("igniter") / "workloads.json").read_text())[name]


def coefficients():
    document = json.loads((data_folder("igniter") / "coefficients_v100.json").read_text())
    return document["hardware"], document["models"]


def ours(rows):
    workloads = [workload(row["id"], row["model"], row["slo_ms"], row["rate_rps"]) for row in rows]
    return [
        [(workloads[each.part.workload].id, each.share_percent, each.batch) for each in gpu]
        for gpu in plan(workloads, V100)
    ]


def theirs(rows):
    return [
        [(each["id"], each["share"], each["batch"]) for each in gpu]
        for gpu in straightforward.igniter(rows, *coefficients())
    ]


@pytest.mark.parametrize("name", ["app12", "example3"])
def test_the_published_plans(name):
    truth = json.loads((data_folder("igniter") / "ground_truth_v100.json").read_text())[name]
    names = {w["id"]: w["id"] for w in published(name)}
    if name == "example3":
        names = {"A": "W1", "R": "W2", "V": "W3"}
    got = [[(names[who], share, batch) for who, share, batch in gpu] for gpu in ours(published(name))]
    assert got == [[tuple(each) for each in gpu] for gpu in truth["gpus"]]


def varied(n, seed):
    """Workloads as the specification varies them: published ones with looser SLOs and lower rates."""
    rng = random.Random(seed)
    return [
        {
            **base,
            "id": f"w{i}",
            "slo_ms": base["slo_ms"] * rng.uniform(1, 1.5),
            "rate_rps": base["rate_rps"] * rng.uniform(0.6, 0.95),
        }
        for i, base in ((i, published()[i % 12]) for i in range(n))
    ]


def wild(n, seed):
    """Any model with any SLO that is feasible on a whole GPU."""
    rng, (hardware, models), rows = random.Random(seed), coefficients(), []
    while len(rows) < n:
        row = {
            "id": f"w{len(rows)}",
            "model": rng.choice(sorted(models)),
            "slo_ms": round(rng.uniform(8, 120), 2),
            "rate_rps": rng.randint(5, 900),
        }
        batch, lower = straightforward.theorem_1(row, hardware, models)
        if 0 < lower <= 100 and batch <= 64:
            rows.append(row)
    return rows


@pytest.mark.parametrize("n", [5, 6, 7, 9, 12, 17, 25, 40, 60, 100])
@pytest.mark.parametrize("make", [varied, wild])
def test_random_sets_equal_the_paper_line_by_line(make, n):
    for seed in range(6 if n <= 25 else 2):
        rows = make(n, 1000 * n + seed)
        assert ours(rows) == theirs(rows)


def test_a_hundred_copies_equal_the_paper_line_by_line():
    rows = [{**published()[i % 12], "id": f"w{i}"} for i in range(100)]
    assert ours(rows) == theirs(rows)


@pytest.mark.parametrize("make", [varied, wild])
def test_three_hundred_workloads_equal_the_paper_line_by_line(make):
    rows = make(300, 7)
    assert ours(rows) == theirs(rows)


def test_a_thousand_copies_take_426_gpus():
    rows = [{**published()[i % 12], "id": f"w{i}"} for i in range(1000)]
    assert len(ours(rows)) == 426


def test_equal_needs_keep_the_order_of_the_input():
    rows = [{"id": f"w{i}", "model": "alexnet", "slo_ms": 20, "rate_rps": 800} for i in range(9)]
    assert [who for gpu in ours(rows) for who, _, _ in gpu] == [f"w{i}" for i in range(9)]


def test_the_first_gpu_exists_before_anything_is_placed():
    """vgg19:40:550 does not fit the empty first GPU because it throttles the clock; it goes to a second, unchecked."""
    rows = [{"id": "big", "model": "vgg19", "slo_ms": 40, "rate_rps": 550}]
    assert ours(rows) == theirs(rows)
    assert [len(gpu) for gpu in ours(rows)] == [0, 1]


def test_an_infeasible_slo_names_the_service_and_its_best_latency():
    with pytest.raises(InfeasibleError, match=r"slow: ssd takes .*single request") as caught:
        plan([workload("slow", "ssd", 7, 50)], V100)
    assert caught.value.nearest["workload"] == "slow"
    assert caught.value.nearest["best_latency_s"] == pytest.approx(6.1549e-3, rel=1e-4)


@pytest.mark.parametrize(("model", "slo_ms", "rate"), [("vgg19", 60, 900), ("resnet50", 40, 3000), ("ssd", 55, 330)])
def test_a_demand_beyond_one_gpu_is_split_into_replicas_that_add_up(model, slo_ms, rate):
    parts = [each.part for gpu in plan([workload("big", model, slo_ms, rate)], V100) for each in gpu]
    assert len(parts) > 1
    assert sum(part.rate_rps for part in parts) == pytest.approx(rate)
    assert {part.replicas for part in parts} == {len(parts)}
    assert sorted(part.replica for part in parts) == list(range(len(parts)))


def test_an_unknown_model_is_a_configuration_error():
    with pytest.raises(ConfigError, match="no coefficients for model 'yolo'"):
        plan([workload("w", "yolo", 50, 10)], V100)


def test_no_workloads_need_no_gpus():
    assert [gpu for gpu in plan([], V100) if gpu] == []
