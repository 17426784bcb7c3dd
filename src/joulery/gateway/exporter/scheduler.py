"""The scheduler's jobs as Prometheus metrics, read at the moment of the scrape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from joulery.gateway.families import Family, Registry, family_metric

SCHEDULER_METRICS = (
    Family("joulery_scheduler_up", "gauge", ("cluster",), "1 while a cluster lists its jobs, else 0."),
    Family("joulery_scheduler_jobs", "gauge", ("cluster", "state"), "Jobs by state."),
    Family("joulery_scheduler_busy_slots", "gauge", ("cluster",), "Slots of the jobs that have some."),
    Family("joulery_scheduler_longest_wait_seconds", "gauge", ("cluster",), "Time since the oldest waiting job came."),
    Family(
        "joulery_scheduler_power_watts",
        "gauge",
        ("cluster",),
        "Power of the running jobs whose power is known; absent where none is.",
    ),
    Family("joulery_scheduler_jobs_without_power", "gauge", ("cluster",), "Running jobs whose power is not known."),
    Family(
        "joulery_scheduler_last_round_timestamp_seconds",
        "gauge",
        ("cluster",),
        "When the last round was, Unix time; absent before the first.",
    ),
    Family(
        "joulery_scheduler_carbon_intensity_grams_per_kilowatthour",
        "gauge",
        (),
        "Carbon intensity of the last round; absent while unknown.",
    ),
)
_STATES = ("waiting", "running", "stopping", "done", "failed")


class SchedulerMetrics:
    """The metrics of a scheduler.

    Args:
        view: Returns the data of the scheduler's dashboard, at each scrape.
    """

    def __init__(self, view: Callable[[], Mapping[str, Any]]) -> None:
        self._registry = Registry(SCHEDULER_METRICS)
        self._registry.register(_JobsCollector(view))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Render the exposition, with its content type, in the format of the scraper's ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _JobsCollector(Collector):
    def __init__(self, view: Callable[[], Mapping[str, Any]]) -> None:
        self._view = view

    def describe(self) -> Iterator[Metric]:
        """The families without their values."""
        return (family_metric(family) for family in SCHEDULER_METRICS)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values."""
        view, families = self._view(), {family.name: family_metric(family) for family in SCHEDULER_METRICS}

        def add(name: str, labels: tuple[str, ...], value: float) -> None:
            families[f"joulery_scheduler_{name}"].add_metric(labels, value)

        for name, up in view["clusters"].items():
            add("up", (name,), float(up))
            if not up:
                continue
            jobs = [job for job in view["jobs"] if job.get("cluster", name) == name]
            counts = Counter(job["state"] for job in jobs)
            for state in dict.fromkeys((*_STATES, *counts)):
                add("jobs", (name, state), counts[state])
            running = [job for job in jobs if job["slots"]]
            powers = [job["power_w"] for job in running if job["power_w"] is not None]
            waited_s = [view["now_s"] - job["submit_s"] for job in jobs if job["state"] == "waiting"]
            add("busy_slots", (name,), sum(job["slots"] for job in running))
            add("longest_wait_seconds", (name,), max(0.0, max(waited_s, default=0.0)))
            add("jobs_without_power", (name,), len(running) - len(powers))
            if powers:
                add("power_watts", (name,), math.fsum(powers))
        for name, made in view["rounds"].items():
            add("last_round_timestamp_seconds", (name,), made["t_s"])
        if view["g_per_kwh"] is not None:
            add("carbon_intensity_grams_per_kilowatthour", (), view["g_per_kwh"])
        return iter(families.values())
