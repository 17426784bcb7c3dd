"""The simulator: events, requests and jobs a second of user CPU, beside a bare heap and, where installed, SimPy.

SimPy is not a dependency: ``JOULERY_BENCH_SIMPY=/path/to/python`` names an interpreter that has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from benchmarks import Result
from joulery.domain.gpu.mig import A100_40GB
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.kernel import Kernel, Rank
from joulery.sim.core.streams import Streams
from joulery.sim.placement.batched_serving import Gpu, Neighbours, Service, ServingProcess, Trial, judge
from joulery.sim.placement.gpu import InterferenceTruth
from joulery.sim.queues.batching import BatchRule
from joulery.sim.queues.fifo_pull import Requests, pull
from joulery.sim.queues.pull_fit import instances_of
from joulery.sim.queues.single_server import by_key, fcfs
from joulery.sim.serving.outcome import StudySettings
from joulery.sim.serving.schemes import SCHEMES, run_variants
from joulery.sim.serving.trial_table import bench, exhaustive_table

EVENTS = 400_000
WIDTH = 100
"""Number of events that wait at any time."""
SIMPY = f"""
import time, simpy
env = simpy.Environment()
def tick(env):
    for _ in range({EVENTS} // {WIDTH}):
        yield env.timeout(1.0)
for _ in range({WIDTH}):
    env.process(tick(env))
began = time.process_time()
env.run()
print(simpy.__version__, {EVENTS} / (time.process_time() - began))
"""


def best(count: int, work: Callable[[], object], repeats: int = 3) -> float:
    """Items a second of user CPU, the best of several runs."""
    fastest = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - began)
    return count / fastest


def ticking_kernel() -> None:
    """Run ``WIDTH`` chains of events, each of which schedules its successor."""
    kernel, left = Kernel(), [EVENTS - WIDTH]

    def tick(t_s: float, payload: object) -> None:
        if left[0] > 0:
            left[0] -= 1
            kernel.at(t_s + 1.0, "tick", payload)

    kernel.on("tick", Rank.COMPLETION, tick)
    for number in range(WIDTH):
        kernel.at(number / WIDTH, "tick", number)
    assert kernel.run() == EVENTS


def ticking_heap() -> None:
    """Run the same events on a bare heap with the handler inlined, which no kernel can beat."""
    heap = [(number / WIDTH, 0, number, "tick", number) for number in range(WIDTH)]
    left, seq = EVENTS - WIDTH, WIDTH
    while heap:
        t_s, _, _, _, payload = heappop(heap)
        if left > 0:
            left -= 1
            seq += 1
            heappush(heap, (t_s + 1.0, 0, seq, "tick", payload))


def simpy_rate() -> tuple[str, float] | None:
    """Version of SimPy and its events a second, from an interpreter that has it; None without one."""
    python = os.environ.get("JOULERY_BENCH_SIMPY", sys.executable)
    done = subprocess.run([python, "-c", SIMPY], capture_output=True, text=True)
    if done.returncode != 0:
        return None
    version, rate = done.stdout.split()
    return version, float(rate)


def run() -> Result:
    """Measure all rates and times."""
    kernel, heap, peer = best(EVENTS, ticking_kernel), best(EVENTS, ticking_heap), simpy_rate()
    pulls = {edges: _pull_rate(edges) for edges in ((("yolov5x6", "7g.40gb"),), (("yolov5l", "1g.5gb"),) * 7)}
    order = _single_server_rates()
    judged = {reading: _judge_rate(reading) for reading in Neighbours}
    study_s, searches = _study()
    columns_s = _columns()
    rows = [
        ["kernel, 100 waiting events", _rate(kernel, "events")],
        ["bare heap, handler inlined", _rate(heap, "events")],
        ["SimPy " + (peer[0] if peer else ""), _rate(peer[1], "events") if peer else "not installed here"],
        ["FIFO pull, 2 instances", _rate(pulls[("yolov5x6", "7g.40gb"),], "requests")],
        ["FIFO pull, 14 instances", _rate(pulls[(("yolov5l", "1g.5gb"),) * 7], "requests")],
        ["single server, first come first served", _rate(order[0], "jobs")],
        ["single server, smallest key, 10,000 waiting", _rate(order[1], "jobs")],
        ["batched serving, 6 GPUs, neighbours always on", _rate(judged[Neighbours.ALWAYS], "requests")],
        ["batched serving, 6 GPUs, neighbours as they are busy", _rate(judged[Neighbours.BUSY], "requests")],
        [f"Clover study: 3 services, 6 schemes, {searches} searches, profile included", f"{study_s:.1f} s"],
        ["column optimiser: every best pool of 3 services over one grid", f"{columns_s:.1f} s"],
    ]
    return Result(
        "Simulator",
        ("what", "user CPU, one core"),
        rows,
        notes=(
            "The best of three runs in one process. The kernel's events each run a handler that schedules the next.",
        ),
        checks=(
            ("kernel at least 1 M events/s", kernel >= 1e6),
            ("FIFO pull at least 200,000 requests/s (aim: 1 M)", min(pulls.values()) >= 2e5),
            ("single server at least 100,000 jobs/s at queue length 10,000", order[1] >= 1e5),
            ("Clover study at most 60 s", study_s <= 60),
        ),
    )


def _rate(per_s: float, what: str) -> str:
    return f"{per_s / 1e6:.2f} M {what}/s"


def _pull_rate(edges: Sequence[tuple[str, str]], count: int = 200_000) -> float:
    service = CLOVER_SERVICES["yolo"]
    pool = instances_of(service, edges)
    work = Requests.draw(np.arange(count) * 0.2, Streams(0), size_cv=service.size_cv, jitter_s=service.jitter_s)
    return best(count, lambda: pull(work, pool, contention=service.contention))


def _single_server_rates() -> tuple[float, float]:
    rng = np.random.default_rng(0)
    arrival_s = np.concatenate([np.zeros(10_000), np.arange(200_000) * 1.0])
    service_s = rng.uniform(0.5, 1.5, len(arrival_s))
    key = rng.random(len(arrival_s))
    count = len(arrival_s)
    return best(count, lambda: fcfs(arrival_s, service_s)), best(count, lambda: by_key(arrival_s, service_s, key))


def _judge_rate(neighbours: Neighbours) -> float:
    """Requests a second of batched serving: twelve instances on six GPUs, 100,000 requests."""
    truth = InterferenceTruth(profile("v100-refit"))
    names = [f"s{number}" for number in range(12)]
    services = [Service(name, poisson(400.0), Slo(0.05, 0.99)) for name in names]
    instances = [ServingProcess(name, "resnet50", 0.45, BatchRule(8)) for name in names]
    gpus = [Gpu(truth, tuple(instances[number : number + 2])) for number in range(0, 12, 2)]
    trial = Trial(1.0, 21.0, noise_cv=0.05, neighbours=neighbours)
    count = sum(service.requests for service in judge(services, gpus, trial, Streams(0)).services)
    return best(count, lambda: judge(services, gpus, trial, Streams(0)))


def _columns() -> float:
    """Seconds of user CPU for the best pools of three built-in services at the intensities of one generated grid."""
    grid = (150 + 100 * np.sin(np.arange(49) / 24 * 2 * np.pi)).tolist()
    benches = []
    for costs in CLOVER_SERVICES.values():
        table = exhaustive_table(costs, A100_40GB, Streams(0), (costs.loads_s[0], costs.loads_s[-1]))
        benches.append(bench(table, A100_40GB, costs=costs))
    began = time.process_time()
    for made in benches:
        run_variants("columns", made, "grid", grid, StudySettings(), Streams(0))
    return time.process_time() - began


def _study() -> tuple[float, int]:
    """Seconds of user CPU of the built-in study on three generated grids, 20 seeds a searching scheme; its searches."""
    began, searches = time.process_time(), 0
    hours = np.arange(49)
    grids = [(150 + 100 * np.sin(hours / 24 * 2 * np.pi + phase)).tolist() for phase in range(3)]
    for costs in CLOVER_SERVICES.values():
        loads = (costs.loads_s[0], costs.loads_s[-1])
        made = bench(exhaustive_table(costs, A100_40GB, Streams(0), loads), A100_40GB)
        for number, grid in enumerate(grids):
            for scheme in (name for name in SCHEMES if name != "columns"):
                for seed in range(20 if scheme in ("clover", "blover") else 1):
                    run_variants(scheme, made, f"grid {number}", grid, StudySettings(), Streams(seed))
                    searches += scheme in ("clover", "blover")
    return time.process_time() - began, searches
