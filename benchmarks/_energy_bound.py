"""Lower bound on the energy with which any scheduler can complete a workload at a mean completion time.

The bound leaves out everything that costs a real schedule energy or time beyond the work itself: no job waits or
restarts, every length is known, every GPU is available at once, each job changes its number of GPUs and its power limit
freely, and a node sleeps in every second in which it runs no job. A completion time is at least the time of the work,
so no schedule saves more at a mean completion time than this linear program. Its Lagrange dual, at any price of a
second, is a lower bound.
"""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.perf.power.training_power import POWER_LIMITS, limited, power_table, widened
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import Setting

_STEPS = 200


def least_energy_j(setting: Setting, jobs: Jobs, mean_jct_s: float) -> float:
    """The bound on the cluster's energy until its last job ends, J; infinite where no schedule is that fast.

    Args:
        setting: The cluster, of one type of node.
        jobs: The workload.
        mean_jct_s: Mean completion time that a schedule may have at most; infinity for any.
    """
    widest = int(jobs.max_gpus.max(initial=1))
    work_s = np.bincount(jobs.kind, jobs.work_s, len(setting.classes))
    choices = [_choices(setting, kind, widest) for kind in range(len(setting.classes))]
    asleep_j = setting.nodes * setting.node.asleep_w * float(jobs.submit_s[-1])
    least_s = sum(float(work * times.min()) for work, (times, _) in zip(work_s, choices, strict=True))
    allowed_s = mean_jct_s * len(jobs)
    if least_s > allowed_s:
        return float("inf")

    def dual_j(price_w: float) -> float:
        """The bound at a price of a second of completion time, W."""
        pairs = zip(work_s, choices, strict=True)
        paid = sum(float(work * np.min(joules + price_w * times)) for work, (times, joules) in pairs)
        return paid - (price_w * allowed_s if price_w else 0.0)

    if mean_jct_s == float("inf"):
        return dual_j(0.0) + asleep_j
    low, high = 0.0, 1e5
    for _ in range(_STEPS):  # concave in the price; every price gives a bound
        third = (high - low) / 3.0
        if dual_j(low + third) < dual_j(high - third):
            low += third
        else:
            high -= third
    return max(dual_j(0.0), dual_j(low)) + asleep_j


def _choices(setting: Setting, kind: int, widest: int) -> tuple[FloatArray, FloatArray]:
    """Seconds, and joules above sleep, of one second of one-GPU work, for each GPU count and power limit."""
    asleep_w = setting.node.asleep_w / setting.node.gpus
    gpus = np.arange(1, widest + 1)
    times, joules = [], []
    for ratio in (1.0, *POWER_LIMITS):
        table = power_table(limited(widened((setting.classes[kind],), widest), ratio), setting.node)
        times.append(1.0 / table.speedup[0, 1 : widest + 1])
        joules.append((table.job_w[0, 1 : widest + 1] - asleep_w * gpus) * times[-1])
    return np.concatenate(times), np.concatenate(joules)
