"""Speculative shortest job first with aging on one server (μ-Serve, ATC'24, section 3.3), never interrupted.

A list of ``{"alpha", "arrival_s": […], "service_s": […], "predicted_s": […], "dispatch_order": [job…],
"finish_s": {job: s}}``. Finish times are written with a few decimals and compared to a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from joulery.policies.ordering import Aging
from joulery.sim.queues.ordering_study import PredictedQueue
from joulery.sim.queues.single_server import by_queue
from tests.golden.kinds import Case, Kind, list_of

TOLERANCE_S = 1e-6


def _cases(document: Any) -> Iterable[Case]:
    for index, each in enumerate(document):
        yield Case(f"queue {index} (alpha {each['alpha']})", partial(_check, each))


def _check(case: Any) -> str | None:
    served = by_queue(case["arrival_s"], case["service_s"], PredictedQueue(Aging(case["alpha"]), case["predicted_s"]))
    order, finish_s = served.order.tolist(), {int(job): at for job, at in case["finish_s"].items()}
    if order != case["dispatch_order"]:
        return f"order: got {order}, expected {case['dispatch_order']}"
    if finish_s.keys() != set(order):
        return f"the finish of {sorted(finish_s)} of {len(order)} jobs is stated"
    for job, right in finish_s.items():
        if abs(served.finish_s[job] - right) > TOLERANCE_S:
            return f"finish of job {job}: got {served.finish_s[job]}, expected {right}"
    return None


KIND = Kind("ssjf", list_of("alpha", "arrival_s", "service_s", "predicted_s", "dispatch_order", "finish_s"), _cases)
