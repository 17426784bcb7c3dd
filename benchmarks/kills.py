"""Requests through several gateways while replicas, gateways, engine server and controller are killed."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import uvloop

from benchmarks import Result
from benchmarks._killed_service import Played, play

REQUESTS, SWITCHES, KILLED, CONNECTIONS, PAUSE_S = 200_000, 200, 24, 16, 0.03
TITLE = "Kills: each request answered once, and counted once"
FOLLOWED = (
    f"{CONNECTIONS} connections of the benchmark's own client, each request with its own id and number. The benchmark "
    "starts a killed controller again, joulery the other processes. Without an engine server, and where a request has "
    "waited for its deadline, gateways answer 503 with Retry-After. A client whose connection breaks with its gateway "
    "opens another and sends its request once more. Recorded are the rows in the run folders of all controllers."
)
NOTE = (
    "`joulery up` with three gateways on one port, two cores, and a search by trials that changes the layout every "
    f"second or two. Replicas, gateways, the engine server and the controller are killed in turn. {FOLLOWED}"
)


def run() -> Result:
    """Run the service until there were enough requests, switches and kills."""
    with (
        tempfile.TemporaryDirectory(prefix="jb-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        asked = play(
            Path(folder),
            requests=REQUESTS,
            switches=SWITCHES,
            kills=KILLED,
            connections=CONNECTIONS,
            pause_s=PAUSE_S,
        )
        return result(loop.run(asked))


def result(found: Played, title: str = TITLE, note: str = NOTE) -> Result:
    """The result table of a run."""
    counts, recorded = found.counts, found.recorded
    kills = ", ".join(f"{what} {number}" for what, number in found.kills.items())
    statuses = ", ".join(f"{count:,} with {status}" for status, count in sorted(counts.statuses.items()))
    return Result(
        title,
        ("what", "figure"),
        [
            ["requests", f"{counts.requests:,} in {found.duration_s:,.0f} s"],
            ["changes of the layout meanwhile", str(found.switches)],
            ["kills (SIGKILL)", kills],
            ["answers by HTTP status", statuses],
            ["requests without an answer", str(counts.lost)],
            ["answers that were another request's, or came twice", str(counts.wrong)],
            ["sent again by the client: the connection broke with its gateway", str(counts.again)],
            ["recorded by the service: answered", f"{recorded['ok']:,}"],
            ["recorded by the service: refused", f"{found.refused_by_record:,}"],
            ["recorded by the service: cut off with their gateway", str(recorded["cancelled"])],
        ],
        notes=(note,),
        checks=(
            (
                f"0 of {REQUESTS:,} requests lost over {SWITCHES} switches: {counts.lost} of {counts.requests:,} over "
                f"{found.switches}",
                counts.lost == 0 and counts.requests >= REQUESTS and found.switches >= SWITCHES,
            ),
            (f"0 answered twice or wrongly: {counts.wrong}", counts.wrong == 0),
            (
                f"the service's records are the clients' counts: {recorded['ok']:,} of {counts.answered:,} answered, "
                f"{found.refused_by_record:,} of {counts.refused:,} refused",
                found.agrees,
            ),
        ),
        figures={
            "requests": counts.requests,
            "sent_again": counts.again,
            "statuses": {str(status): count for status, count in sorted(counts.statuses.items())},
            "recorded": dict(sorted(recorded.items())),
            "switches": found.switches,
            "kills": dict(found.kills),
        },
    )
