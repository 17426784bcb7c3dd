"""What the scheduler's screen shows: jobs, the last round and the grid, read from the cluster and the state folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from joulery.app.schedule import list_jobs
from joulery.app.wiring.cluster import green_policy, jobs_of, one_cluster
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, DataError
from joulery.gateway.exporter.http import MetricsServer, Render
from joulery.runtime.schedule.usage import lines


def scheduler_view(site: Site, cluster: str | None = None) -> dict[str, Any]:
    """Everything of the screen, JSON-ready; unknown values are None.

    A cluster that does not answer is named in ``problems``; the other clusters are shown.

    Args:
        site: The site.
        cluster: One of its clusters; all when None.

    Raises:
        ConfigError: There is no such cluster, or the site has no jobs.
    """
    names: list[str | None] = [one.name for one in site.clusters] if cluster is None and site.clusters else [cluster]
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    clusters: dict[str, bool] = {}
    last: dict[str, Any] = {}
    policies: dict[str, None] = {}
    for name in names:
        one = one_cluster(site, name)
        policies[green_policy(jobs_of(one)).name] = None
        last = max(last, last_round(jobs_of(one).state.absolute()), key=lambda entry: entry.get("t_s", -math.inf))
        try:
            found = list_jobs(one)
        except (CapabilityError, DataError) as error:
            problems.append(f"{name or site.name}: {error}")
            clusters[name or site.name] = False
            continue
        clusters[name or site.name] = True
        rows += [{"cluster": name, **row} if len(names) > 1 else row for row in found]
    seen = last.get("view") or {}
    g_per_kwh, mean = float(seen.get("g_per_kwh") or 0.0), float(seen.get("mean_g_per_kwh") or 0.0)
    known = mean > 0  # the policy is shown 0 where nothing is known
    return {
        "site": site.name if cluster is None else f"{site.name}: {cluster}",
        "mode": str(site.mode),
        "policy": ", ".join(policies),
        "now_s": time.time(),
        "round_text": last.get("text", ""),
        "round_s": last.get("t_s"),
        "g_per_kwh": g_per_kwh if known else None,
        "hour": ("green hour" if g_per_kwh < mean else "dirty hour") + ", last round" if known else "",
        "jobs": rows,
        "problems": problems,
        "clusters": clusters,
    }


def last_round(folder: Path) -> dict[str, Any]:
    """The last round in the logs of a state folder; empty where there is none."""
    logs = sorted((folder / "runs").glob("*/log.jsonl"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in logs[:3]:
        rounds = [entry for entry in lines(log) if entry["kind"] == "round"]
        if rounds:
            return rounds[-1]
    return {}


def serve_page(
    host: str, port: int, page: Callable[[], str], view: Callable[[], Mapping[str, Any]] | None = None
) -> MetricsServer:
    """A server that answers ``/`` and ``/dashboard`` with a page; the caller runs and closes it.

    Args:
        host, port: Where it listens; port 0 for a free one.
        page: Makes the page, at each request.
        view: What ``/metrics`` exports, as :func:`scheduler_view` gives it; None for nothing.

    Raises:
        ConfigError: It cannot listen there.
        ModuleNotFoundError: The extra ``export`` is not installed, and there is a view.
    """
    render: Render = lambda _: (b"", "text/plain")  # noqa: E731
    if view is not None:
        from joulery.gateway.exporter.scheduler import SchedulerMetrics

        render = SchedulerMetrics(view).render
    return MetricsServer(host, port, render, lambda: "", page=lambda: page().encode(), pointer="--listen")
