"""Placement of pipelines: AlpaServe's anchor, the search on 32 GPUs, the recursion, its error against real V100s."""

from __future__ import annotations

import time

import numpy as np

from benchmarks import NotRun, Result, data_folder
from joulery.perf.queues.pipeline_queue import PipelineWorkload, Routes, serve_pipelines
from joulery.policies.placement.pipelines.device_groups import Shape, groupings
from joulery.policies.placement.pipelines.search import PlacementSearch
from tests.policies.placement.pipelines.test_search import GIB, ONE_S, bursts, tables

REQUESTS = 30_000
TRACES = {
    "8to2_30Hz_60s_interop_trace": (0.0100, 0.0100),
    "8to2_50Hz_60s_interop_trace": (0.0100, 0.0100),
    "8to2_6.667Hz_20s_interop_trace": (0.0730, 0.0734),
}
"""Two-stage runs on real V100s and the stage latencies that were measured for their models."""


def _search(gpus: int, models: int, rate_rps: float) -> tuple[list[str], float, float, float]:
    """A table row; the goodput found, that of replication, and the CPU seconds of the search."""
    search = PlacementSearch(tables(models, gpus), bursts(models, rate_rps, REQUESTS), 13 * GIB)
    start = time.process_time()
    ranked = search.ranked(groupings(gpus))
    took_s = time.process_time() - start
    found = search.evaluate(ranked[0].hosting)[0]
    single = next(each for each in ranked if each.hosting.grouping.shapes[0] == Shape(1, 1))
    replication = search.evaluate(single.hosting)[0].goodput_ratio
    simulated = sum(each.simulated_requests for each in ranked)
    what = f"search, {models} models on {gpus} GPUs, {rate_rps:g} requests a second"
    text = f"goodput {found.goodput_ratio:.3f} with {found.hosting.grouping}; replication {replication:.3f}"
    row = [what, text, f"{took_s:.1f} s, {simulated / took_s / 1e6:.1f} M requests/s"]
    return row, found.goodput_ratio, replication, took_s


def _speed(candidates: int, groups: int, stages: int) -> tuple[list[str], float]:
    """A table row; the requests simulated in a second of CPU."""
    random = np.random.default_rng(0)
    workload = bursts(16, 10.0 * groups, REQUESTS)
    device = np.full((candidates, 16, groups, stages), -1)
    hosted = random.random((candidates, 16, groups)) < 0.5
    for candidate, model in np.ndindex(candidates, 16):
        for slot, group in enumerate(np.flatnonzero(hosted[candidate, model])):
            device[candidate, model, slot] = group * stages + np.arange(stages)
    routes = Routes(np.where(device < 0, 0.0, ONE_S / stages), device, groups * stages)
    start = time.process_time()
    serve_pipelines(workload, routes, passes=1)
    rate = candidates * len(workload) / (time.process_time() - start)
    what = f"recursion, {candidates} placement{'s' * (candidates > 1)} at once, {groups} groups of {stages}"
    return [what, f"{candidates * len(workload):,} requests", f"{rate / 1e6:.1f} M requests/s"], rate


def _traces() -> tuple[list[list[str]], bool | None]:
    """Mean latency of real two-stage runs beside the recursion's; whether all are within 15 %, None without traces."""
    import pyarrow.parquet

    try:
        root = data_folder("muserve")
    except NotRun as reason:
        return [["real V100 traces", f"not run: {reason}", ""]], None
    table = pyarrow.parquet.read_table(root / "alpaserve_v100_cluster_traces.parquet").to_pydict()
    names = np.array(table["trace"])
    rows, errors = [], []
    for name, stages in TRACES.items():
        mine = names == name
        arrival_s = np.sort(np.array(table["arrive_s"])[mine])
        real_s = float(np.mean(np.array(table["e2e_latency_s"])[mine]))
        workload = PipelineWorkload(arrival_s, np.zeros(len(arrival_s), np.int64), np.array([np.inf]))
        routes = Routes(np.array(stages)[None, None, None, :], np.arange(2)[None, None, None, :], 2)
        ours_s = float(serve_pipelines(workload, routes, 0.011).latency_s.mean())
        error = ours_s / real_s - 1
        errors.append(abs(error))
        rows.append(
            [f"real V100s, {name}", f"{1e3 * real_s:.1f} ms measured", f"{1e3 * ours_s:.1f} ms ({100 * error:+.1f} %)"]
        )
    return rows, bool(np.max(errors) <= 0.15)


def run() -> Result:
    """Measure the search, the simulation's speed, and its error against real runs."""
    anchor, goodput, replication, anchor_s = _search(8, 16, 20.0)
    large, _, _, large_s = _search(32, 16, 40.0)
    heavy, _, _, heavy_s = _search(32, 16, 120.0)
    speeds = [_speed(*case) for case in ((1, 8, 1), (1, 4, 8), (64, 4, 4), (64, 8, 1), (256, 1, 1))]
    traces, close = _traces()
    return Result(
        "Placement of pipelines",
        ("what", "result", "figure"),
        [anchor, large, heavy, *(row for row, _ in speeds), *traces],
        notes=[
            "AlpaServe's anchor: models of 5.2 GB and 145 ms, bursts (Gamma, cv 4), SLO five times the latency, 13 GiB "
            "a GPU, 30,000 requests a simulation, greedy over every grouping; CPU time of one thread. Traces: mean "
            "latency of AlpaServe's own runs, stage latencies as measured, 11 ms outside the devices.",
        ],
        checks=[
            (
                "8 GPUs / 16 models: goodput of the search >= 0.97, of replication <= 0.70",
                goodput >= 0.97 and replication <= 0.70,
            ),
            ("8 GPUs / 16 models: search in at most 5 s", anchor_s <= 5.0),
            ("32 GPUs / 16 models: search in at most 20 s", max(large_s, heavy_s) <= 20.0),
            ("at least 1 M requests simulated a second", min(rate for _, rate in speeds) >= 1e6),
            (
                "at least 20 M requests simulated a second in the widest case (stretch)",
                max(rate for _, rate in speeds) >= 20e6,
            ),
            ("two-stage traces of real V100s: mean latency within 15 %", close),
        ],
    )
