"""The four kinds of μ-Serve case files: the published examples pass, and a case that differs fails."""

import copy
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joulery.domain.errors import InfeasibleError
from joulery.policies.placement.pipelines.by_sensitivity import Partition, PlacementLimits, place_partitions, scatter
from tests.data_folder import data_folder
from tests.golden.kinds.placement import violation
from tests.golden.run_cases import main

CLUSTERING = {"scores": [2, 0.1, 0.1, 2], "thres": 0.5, "clusters": [[0], [1, 2], [3]]}
PLACEMENT = {
    "capacity": 3.0,
    "n_devices": 2,
    "CT": 2,
    "tau_empty": 0.2,
    "partitions": [
        {"id": 0, "model": 0, "score": 2.0, "mem": 1.0, "weight": 1.0},
        {"id": 1, "model": 0, "score": 0.1, "mem": 1.0, "weight": 1.0},
        {"id": 2, "model": 1, "score": 1.9, "mem": 1.0, "weight": 3.0},
    ],
    "assignment": {"0": 0, "2": 0, "1": 1},
    "within_device_scatter": 0.0075,
}
CLOCK = {
    "freq_mhz": 860.0,
    "step_mhz": 100,
    "min_mhz": 200,
    "max_mhz": 1380,
    "guard": 0.05,
    "partitions": [
        {"slo_ms": 1224.8, "latency_ms": 1150.6, "weight": 0.747},
        {"slo_ms": 1713.1, "latency_ms": 326.4, "weight": 0.06},
    ],
    "action": "SAME",
    "new_freq_mhz": 860.0,
    "action_paper_literal": "DOWN",
    "new_freq_paper_literal_mhz": 760.0,
}
SSJF = {
    "alpha": 1.0,
    "arrival_s": [0.147, 0.147, 0.228],
    "service_s": [7.2, 2.92, 2.92],
    "predicted_s": [7.2, 2.92, 2.92],
    "dispatch_order": [1, 2, 0],
    "finish_s": {"1": 3.067, "2": 5.987, "0": 13.187},
}


def run(folder, capsys, *cases):
    file = folder / "cases.json"
    file.write_text(json.dumps(list(cases)))
    code = main([str(file)])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("file", "count"),
    [("alg1_clustering", 10), ("alg2_placement", 8), ("alg3_miad_step", 40), ("ssjf_aging", 6)],
)
def test_the_published_examples(capsys, file, count):
    assert main([str(data_folder("muserve") / f"cases_{file}_examples.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{count} passed, 0 failed"


@pytest.mark.parametrize(("case", "count"), [(CLUSTERING, 1), (PLACEMENT, 1), (CLOCK, 2), (SSJF, 1)])
def test_a_case_of_each_kind(tmp_path, capsys, case, count):
    assert run(tmp_path, capsys, case) == (0, [f"{count} passed, 0 failed"])


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        (CLUSTERING, {"clusters": [[0, 1, 2], [3]]}, "expected [[0, 1, 2], [3]]"),
        (PLACEMENT, {"assignment": {"0": 0, "1": 0, "2": 1}}, "expected {0: 0, 1: 0, 2: 1}"),
        (PLACEMENT, {"assignment": None}, "expected a refusal"),
        (PLACEMENT, {"within_device_scatter": 0.5}, "scatter: got 0.0075"),
        (PLACEMENT, {"capacity": 0.9}, "refused: partition 0 of model 0 fits on no device"),
        (CLOCK, {"action": "DOWN", "new_freq_mhz": 760.0}, "got ('SAME', 860.0), expected ('DOWN', 760.0)"),
        (CLOCK, {"new_freq_paper_literal_mhz": 761.0}, "(literal): got ('DOWN', 760.0)"),
        (SSJF, {"dispatch_order": [0, 1, 2]}, "order: got [1, 2, 0]"),
        (SSJF, {"finish_s": {"1": 3.067, "2": 5.987, "0": 13.188}}, "finish of job 0"),
        (SSJF, {"finish_s": {"1": 3.067}}, "the finish of [1] of 3 jobs"),
    ],
)
def test_a_case_that_differs_fails(tmp_path, capsys, case, change, said):
    code, lines = run(tmp_path, capsys, {**copy.deepcopy(case), **change})
    assert code == 1
    assert said in lines[0]
    assert lines[-1].endswith("1 failed")


def test_a_placement_refused_where_none_is_expected_passes(tmp_path, capsys):
    assert run(tmp_path, capsys, {**PLACEMENT, "capacity": 0.9, "assignment": None}) == (0, ["1 passed, 0 failed"])


def test_a_list_without_a_case_is_no_case_file(tmp_path, capsys):
    code, lines = run(tmp_path, capsys)
    assert code == 1
    assert "no kind of case file" in lines[0]


def test_what_breaks_memory_or_devices_is_named():
    tight = {**PLACEMENT, "CT": 1, "capacity": 2.0}
    assert "devices of a model" in violation(tight, {0: 0, 1: 1, 2: 1})
    assert "memory" in violation(tight, {0: 0, 1: 0, 2: 0})
    assert "a device outside" in violation(tight, {0: 0, 1: 0, 2: 2})
    assert violation(tight, {0: 0, 1: 0, 2: 1}) is None


HUNDREDTHS = st.integers(1, 400).map(lambda n: n / 100)
INSTANCES = st.builds(
    lambda parts, capacity, devices, most: {
        "capacity": capacity,
        "n_devices": devices,
        "CT": most,
        "partitions": [
            {"id": i, "model": model, "score": score / 2, "mem": mem, "weight": weight}
            for i, (model, score, mem, weight) in enumerate(parts)
        ],
    },
    st.lists(st.tuples(st.integers(0, 3), HUNDREDTHS, HUNDREDTHS, HUNDREDTHS), min_size=1, max_size=14),
    st.floats(3.0, 20.0),
    st.integers(1, 5),
    st.integers(1, 3),
)


def plain_greedy(case):
    """Alg. 2 again, written as the spec's words say, with lists alone; None where a partition fits nowhere."""
    bins = [[] for _ in range(case["n_devices"])]
    for part in sorted(case["partitions"], key=lambda p: (-p["score"], -p["mem"], str(p["id"]))):
        used = {d for d, held in enumerate(bins) if any(p["model"] == part["model"] for p in held)}
        fits = []
        for d, held in enumerate(bins):
            if sum(p["mem"] for p in held) + part["mem"] > case["capacity"] * (1 + 1e-12) or (
                d not in used and len(used) >= case["CT"]
            ):
                continue
            mean = sum(p["weight"] * p["score"] for p in held) / sum(p["weight"] for p in held) if held else None
            fits.append((round(abs(part["score"] - mean) if held else 0.2, 9), d not in used, d))
        if not fits:
            return None
        bins[min(fits)[2]].append(part)
    return {p["id"]: d for d, held in enumerate(bins) for p in held}


A_TIE = {"capacity": 3.0, "n_devices": 2, "CT": 2} | {
    "partitions": [
        {"id": at, "model": 0, "score": score, "mem": 0.01, "weight": 0.01}
        for at, score in enumerate([0.005, 0.71, 0.91])
    ]
}
"""An empty device costs 0.2, and 0.91 - 0.71 is 0.2 but for the last bit."""


A_FULL_DEVICE = {"capacity": 15.7, "n_devices": 2, "CT": 2} | {
    "partitions": [
        {"id": at, "model": 0, "score": score / 2, "mem": mem, "weight": 0.01}
        for at, (score, mem) in enumerate(
            [
                (0.43, 0.01),
                *((0.02, mem) for mem in (0.1, 2.58, 2.58)),
                *((0.01, m) for m in (1.32, 1.55, 1.7, 2.63, 3.24)),
            ]
        )
    ]
}
"""What has no place beside the first fills the other device, but for the last bit of the sum."""


@settings(max_examples=150, deadline=None)
@example(A_TIE)
@example(A_FULL_DEVICE)
@given(INSTANCES)
def test_placements_are_valid_and_as_good_as_the_plain_greedy(case):
    partitions = [Partition(p["id"], p["model"], p["score"], p["mem"], p["weight"]) for p in case["partitions"]]
    limits = PlacementLimits((case["capacity"],) * case["n_devices"], case["CT"], 0.2)
    right = plain_greedy(case)
    if right is None:
        with pytest.raises(InfeasibleError, match="fits on no device"):
            place_partitions(partitions, limits)
        return
    got = place_partitions(partitions, limits)
    assert violation(case, got) is None
    assert scatter(partitions, got) <= 1.05 * scatter(partitions, right) + 1e-9
