"""Runs of a job on several nodes: each node writes one to the job's folder, whose report is the sum of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from joulery.domain.errors import JouleryError
from joulery.store.run.directory import open_run

WAIT_S = 10.0
"""Time that the first node waits at the end for the runs of the others: clocks and writes differ by seconds."""
_POLL_S = 0.2


def runs_in(path: str | Path) -> tuple[Path, ...]:
    """The runs at a path: the path itself if it is a run or contains none, else the runs directly in the folder."""
    folder = Path(path)
    if (folder / "manifest.json").exists() or not folder.is_dir():
        return (folder,)
    found = [one for one in folder.iterdir() if (one / "manifest.json").is_file()]
    return tuple(sorted(found, key=lambda one: (len(one.name), one.name))) or (folder,)


def wait_for_nodes(
    folder: Path,
    nodes: int,
    wait_s: float = WAIT_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until the runs of all nodes of a job are closed, at most ``wait_s``; return the number of closed runs."""
    end_s = now_s() + wait_s
    while (closed := sum(_closed(folder / f"node-{node}") for node in range(nodes))) < nodes and now_s() < end_s:
        sleep(_POLL_S)
    return closed


def _closed(run: Path) -> bool:
    try:
        return open_run(run).closed
    except (JouleryError, OSError):
        return False


def missing_nodes(manifests: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A note for each job with missing nodes."""
    jobs: dict[tuple[str, int], set[int]] = {}
    for manifest in manifests:
        job = manifest.get("job")
        if isinstance(job, Mapping) and isinstance(job.get("nodes"), int) and isinstance(job.get("node"), int):
            jobs.setdefault((str(job.get("name") or ""), job["nodes"]), set()).add(job["node"])
    return tuple(_missing(name, nodes, found) for (name, nodes), found in jobs.items() if len(found) < nodes)


def _missing(name: str, nodes: int, found: set[int]) -> str:
    job = f"the job {name}" if name else "a job"
    if len(found) == 1:
        return f"node {min(found)} of {job} on {nodes} nodes: the figures are of this node"
    return f"{len(found)} of {nodes} nodes of {job} are here: the sum is of these"
