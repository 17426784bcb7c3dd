"""Requests through several gateways on Ray Serve while Ray's workers, the cluster's head and others are killed."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks import Result
from benchmarks._killed_service import Below, play
from benchmarks.gateway import ROOT, ray_python
from benchmarks.kills import CONNECTIONS, FOLLOWED, REQUESTS, SWITCHES, result

KILLED = 12
"""Number of kills: each kind at least once, Ray's workers six times."""
PAUSE_S = 0.04
"""Pause between two requests of a connection; without it the SLO rule keeps the leanest layout and nothing switches."""
ANSWERS = 2000
"""Answers between two kills: some seconds in which layouts are tried."""
TITLE = "Kills on Ray Serve: each request answered once, and counted once"
NOTE = (
    "`joulery up` with three gateways on one port and Ray Serve on a cluster that it starts, two replicas, and a "
    "search by trials that changes the mix. A Ray worker is a replica's process; the head is the cluster's control "
    "process (GCS), without which joulery starts another cluster. A connection pauses between two requests for "
    f"{1e3 * PAUSE_S:g} ms. {FOLLOWED}"
)


def run() -> Result:
    """Run the service until there were enough requests, changes of the layout and kills."""
    here = os.pathsep.join(entry for entry in (str(ROOT / "src"), str(ROOT), *sys.path) if entry)
    with (
        tempfile.TemporaryDirectory(prefix="jb-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        environ = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": here, "JOULERY_CACHE": str(Path(folder) / "cache")}
        asked = play(
            Path(folder),
            requests=int(os.environ.get("JOULERY_KILLS_REQUESTS", REQUESTS)),
            switches=SWITCHES,
            kills=KILLED,
            connections=CONNECTIONS,
            pause_s=PAUSE_S,
            answers_between=ANSWERS,
            below=Below.ray(str(ray_python()), os.environ | environ),
        )
        return result(loop.run(asked), TITLE, NOTE)
