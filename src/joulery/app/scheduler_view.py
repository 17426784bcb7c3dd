"""Data of the scheduler's dashboard: jobs, the last round and the grid, read from the cluster and the state folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from joulery.app.schedule import list_jobs
from joulery.app.wiring.cluster import green_policy, jobs_of, one_cluster
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, JouleryError
from joulery.domain.format import duration
from joulery.gateway.exporter.http import MetricsServer, Render
from joulery.runtime.schedule.usage import lines_backwards

_OVERDUE_QUANTA, _OVERDUE_S = 2.0, 60.0
"""A round runs every quantum; after this many quanta plus seconds without one, the scheduler counts as stopped."""


def scheduler_view(site: Site, cluster: str | None = None) -> dict[str, Any]:
    """Data of the dashboard as a JSON-ready dictionary; unknown values are None.

    ``problems`` names each cluster that does not answer and each scheduler that runs no rounds; the other clusters
    are shown.

    Args:
        site: The site.
        cluster: One of its clusters; all when None.

    Raises:
        ConfigError: There is no such cluster, the site has no jobs, or its only cluster is configured wrongly.
    """
    now_s = time.time()
    names: list[str | None] = [one.name for one in site.clusters] if cluster is None and site.clusters else [cluster]
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    clusters: dict[str, bool] = {}
    rounds: dict[str, dict[str, Any]] = {}
    policies: dict[str, None] = {}
    for name in names:
        one, called = one_cluster(site, name), name or site.name
        policies[green_policy(jobs_of(one)).name] = None
        if found := last_round(jobs_of(one).state.absolute()):
            rounds[called] = found
            problems += _overdue(called, now_s - float(found["t_s"]), jobs_of(one).quantum_s)
        try:
            listed = list_jobs(one)
        except JouleryError as error:
            if isinstance(error, ConfigError) and len(names) == 1:
                raise
            problems.append(f"{called}: {error}")
            clusters[called] = False
            continue
        clusters[called] = True
        rows += [{"cluster": name, **row} if len(names) > 1 else row for row in listed]
    last = max(rounds.values(), key=lambda entry: float(entry["t_s"]), default={})
    seen = last.get("view") or {}
    g_per_kwh, mean = float(seen.get("g_per_kwh") or 0.0), float(seen.get("mean_g_per_kwh") or 0.0)
    known = mean > 0  # the policy is shown 0 where nothing is known
    return {
        "site": site.name if cluster is None else f"{site.name}: {cluster}",
        "mode": _modes({called: entry["mode"] or str(site.mode) for called, entry in rounds.items()}) or str(site.mode),
        "policy": ", ".join(policies),
        "now_s": now_s,
        "rounds": {called: {"t_s": entry["t_s"], "text": entry.get("text", "")} for called, entry in rounds.items()},
        "g_per_kwh": g_per_kwh if known else None,
        "hour": ("green hour" if g_per_kwh < mean else "dirty hour") + ", last round" if known else "",
        "jobs": rows,
        "problems": problems,
        "clusters": clusters,
    }


def _modes(by_cluster: Mapping[str, str]) -> str:
    """The mode of the schedulers, by cluster where they differ."""
    if len(modes := set(by_cluster.values())) == 1:
        return modes.pop()
    return ", ".join(f"{mode} ({called})" for called, mode in by_cluster.items())


def _overdue(cluster: str, since_s: float, quantum_s: float) -> list[str]:
    """Message about a scheduler whose last round is too long ago; empty otherwise."""
    if since_s <= _OVERDUE_QUANTA * quantum_s + _OVERDUE_S:
        return []
    return [f"{cluster}: no round for {duration(since_s)}: does joulery schedule run?"]


def last_round(folder: Path) -> dict[str, Any]:
    """The last round in the logs of a state folder, with the ``mode`` it was made in; empty where there is none."""
    logs = sorted((folder / "runs").glob("*/log.jsonl"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in logs[:3]:
        made = next((entry for entry in lines_backwards(log) if entry["kind"] == "round"), None)
        if made is not None:
            return {**made, "mode": _mode_of(log.with_name("manifest.json"))}
    return {}


def _mode_of(manifest: Path) -> str:
    """Mode of a scheduler's run; empty where its manifest has none."""
    with suppress(OSError, ValueError):
        document = orjson.loads(manifest.read_bytes())
        return str(document.get("mode") or "") if isinstance(document, dict) else ""
    return ""


def serve_page(
    host: str, port: int, page: Callable[[], str], view: Callable[[], Mapping[str, Any]] | None = None
) -> MetricsServer:
    """Create a server that answers ``/`` and ``/dashboard`` with a page; the caller runs and closes it.

    Args:
        host, port: Address to listen on; port 0 for a free one.
        page: Returns the page; called at each request.
        view: Returns the data of ``/metrics``, as :func:`scheduler_view` does; None for no metrics.

    Raises:
        ConfigError: The address is not available.
        ModuleNotFoundError: The extra ``export`` is not installed, and there is a view.
    """
    render: Render = lambda _: (b"", "text/plain")  # noqa: E731
    if view is not None:
        from joulery.gateway.exporter.scheduler import SchedulerMetrics

        render = SchedulerMetrics(view).render
    return MetricsServer(host, port, render, lambda: "", page=lambda: page().encode(), pointer="--listen")
