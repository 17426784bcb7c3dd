"""Provisioning: preset ``igniter`` beside the paper's algorithm line by line, and ``best`` with its proof."""

from __future__ import annotations

import random
import resource
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict

from benchmarks import Result
from joulery.domain.gpu.provisioning import ProvisionPlan, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.policies.placement.provisioning import igniter
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.planner import provision
from tests.policies.placement.provisioning import straightforward

V100 = GpuType("V100", profile("v100"), 3.06)
APP12 = (
    *(("alexnet", 10, 1200), ("alexnet", 15, 400), ("alexnet", 20, 800)),
    *(("resnet50", 20, 400), ("resnet50", 30, 600), ("resnet50", 40, 200)),
    *(("vgg19", 20, 300), ("vgg19", 30, 400), ("vgg19", 40, 200)),
    *(("ssd", 25, 150), ("ssd", 40, 50), ("ssd", 55, 300)),
)
"""Table 3 of the paper: model, SLO in ms, requests a second."""
ALLOWED_MS = {12: 0.5, 1000: 60.0}
CURVE_S = {5.0: (12, 20, 40, 48, 49, 50), 30.0: (60, 73, 100, 200, 500), 60.0: (1000,)}
"""Numbers of different services, by the CPU seconds that ``best`` may take for them."""
_JSON_NAMES = {
    "load_bytes": "d_load",
    "feedback_bytes": "d_feedback",
    "kernels": "n_k",
    "launch_ms": "t_sch_solo_total",
    "power_slope": "alpha_power",
    "power_offset_w": "beta_power",
    "cache_slope": "alpha_cacheutil",
    "cache_offset_percent": "beta_cacheutil",
    "cache_sensitivity": "alpha_cache",
}


def rows(n: int, *, varied: bool) -> list[dict[str, object]]:
    """Copies of the twelve, or the twelve with looser SLOs and lower demands, as the specification varies them."""
    rng, result = random.Random(1), []
    for index in range(n):
        model, slo_ms, rate_rps = APP12[index % 12]
        looser, lower = (rng.uniform(1, 1.5), rng.uniform(0.6, 0.95)) if varied else (1.0, 1.0)
        result.append({"id": f"w{index}", "model": model, "slo_ms": slo_ms * looser, "rate_rps": rate_rps * lower})
    return result


def workloads(table: list[dict[str, object]]) -> list[Workload]:
    """The rows as services."""
    return [
        Workload(str(r["id"]), str(r["model"]), Slo(float(r["slo_ms"]) / 1e3, 0.99), float(r["rate_rps"]))  # type: ignore[arg-type]
        for r in table
    ]


def published() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The coefficients under the names of the published JSON."""
    gpu = V100.profile.gpu
    hardware = {
        "P": gpu.power_cap_w,
        "F": gpu.clock_max_mhz,
        "p_idle": gpu.idle_w,
        "B_pcie": gpu.pcie_bytes_per_ms,
        "alpha_f": gpu.clock_mhz_per_w,
        "alpha_sch": gpu.delay_ms_per_neighbour,
        "beta_sch": gpu.delay_offset_ms,
        "r_unit": gpu.unit_percent,
    }
    models = {
        name: {_JSON_NAMES.get(key, key): value for key, value in asdict(model).items()}
        for name, model in V100.profile.models.items()
    }
    return hardware, models


def user_s(work: Callable[[], object], repeats: int) -> float:
    """Median user CPU seconds of one run."""
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        work()
        times.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
    return statistics.median(times)


def per_run_s(work: Callable[[], object], runs: int, repeats: int) -> float:
    """As :func:`user_s`, for work shorter than the clock's tick: times ``runs`` runs at once."""
    return user_s(lambda: [work() for _ in range(runs)], repeats) / runs


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that a run allocates at its peak."""
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def run() -> Result:
    """Compare both ``igniter`` planners, then measure ``best``."""
    table, checks = [], []
    for n, varied, runs, repeats in ((12, False, 200, 7), (100, True, 20, 5), (1000, True, 1, 7), (1000, False, 1, 7)):
        made = rows(n, varied=varied)
        services, coefficients = workloads(made), published()
        ours_s = per_run_s(lambda services=services: igniter.plan(services, V100.profile), runs, repeats)
        theirs_s = per_run_s(
            lambda made=made, coefficients=coefficients: straightforward.igniter(made, *coefficients),
            max(1, runs // 20),
            1 if n == 1000 else 3,
        )
        memory = peak_bytes(lambda services=services: igniter.plan(services, V100.profile))
        gpus = [gpu for gpu in igniter.plan(services, V100.profile) if gpu]
        ours = [[(services[s.part.workload].id, s.share_percent, s.batch) for s in gpu] for gpu in gpus]
        paper = [gpu for gpu in straightforward.igniter(made, *coefficients) if gpu]
        same = ours == [[(w["id"], w["share"], w["batch"]) for w in gpu] for gpu in paper]
        name = f"`igniter`, {n} {'varied' if varied else 'copies' if n > 12 else 'workloads'}"
        checks.append((f"{name}: the same plan, GPU for GPU", same))
        if n in ALLOWED_MS:
            checks.append((f"{name}: at most {ALLOWED_MS[n]:g} ms of user CPU", ours_s * 1e3 <= ALLOWED_MS[n]))
        if n == 1000:
            checks.append((f"{name}: at most 5 MB", memory <= 5e6))
        times = f"{ours_s * 1e3:.3g} ms", f"{theirs_s * 1e3:.3g} ms", f"{theirs_s / ours_s:.0f} ×"
        table.append([name, str(len(gpus)), *times, f"{memory / 1e6:.2f} MB", ""])
    copies = ((12, False, 5.0), (1000, False, 60.0))
    different = tuple((n, True, limit_s) for limit_s, some in CURVE_S.items() for n in some)
    for n, varied, limit_s in (*copies, *different):
        services = workloads(rows(n, varied=varied))
        found: list[ProvisionPlan] = []
        seconds = user_s(
            lambda services=services, found=found: found.append(provision("best", services, [V100], Rules())), 1
        )
        plan = found[0]
        proof = "optimal" if plan.optimal else f"{100 * plan.gap_ratio:.2f} % above the bound"
        name = f"`best`, {n} {'varied' if varied else 'copies' if n > 12 else 'workloads'}"
        table.append([name, str(len(plan.gpus)), f"{seconds:.3g} s", "", "", "", proof])
        checks.append((f"{name}: at most {limit_s:g} s", seconds <= limit_s and not plan.violations))
        checks.append((f"{name}: within 2 % of the bound", plan.gap_ratio <= 0.02))
        if varied and n >= 100:
            paper_gpus = sum(map(bool, igniter.plan(services, V100.profile)))
            checks.append((f"{name}: fewer GPUs than `igniter`'s {paper_gpus}", len(plan.gpus) < paper_gpus))
    return Result(
        "Provisioning GPUs",
        ("planner", "GPUs", "user CPU", "line by line", "faster", "memory at the peak", "proof"),
        table,
        (
            "User CPU of the planning function alone, median; *line by line* is the paper's algorithm as printed "
            "(tests/policies/placement/provisioning/straightforward.py), in the same process on the "
            "same input. Memory is what the planner allocates at its peak.",
        ),
        checks,
    )
