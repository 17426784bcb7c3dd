"""A served session's memory against the number of its requests: ten million through the real recorder."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks import Result
from joulery.config.site import Site
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestRecord
from joulery.domain.serving.service import ModelFamily, ModelVariant, Slo
from joulery.runtime.results.finish import write_requests
from joulery.runtime.results.summary import ServedService, Totals
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.running_service import RunningService, ServiceSetup
from joulery.runtime.serving.session import Pace, ServingSession
from joulery.runtime.session.history import SessionHistory
from joulery.runtime.session.requests import RequestWindow
from joulery.store.run.directory import SAMPLES, create_run

REQUESTS = int(os.environ.get("JOULERY_SOAK_REQUESTS", "10_000_000"))
RATE_RPS = 2000
WARM = 200_000
"""Requests before the first reading; imports and buffers are in memory by then."""
KEPT = 200_000
"""Number of records kept in a list, to measure the memory of a record in the earlier implementation."""
FLAT_BYTES = 4.0
"""Most bytes that a request may leave behind in memory."""
FAMILY = ModelFamily("sums", "sums", "right sums", (ModelVariant("small", 0.75), ModelVariant("large", 0.8)))
SLO = Slo(0.1)


def run() -> Result:
    """Feed the requests to a session, then compute the report's figures."""
    with tempfile.TemporaryDirectory(prefix="jb-") as folder:
        return _soak(Path(folder))


def _soak(folder: Path) -> Result:
    before = anonymous_bytes()
    kept = list(records(KEPT, 0))
    a_record = (anonymous_bytes() - before) / KEPT
    del kept
    with create_run(folder / "run", kind="up") as writer:
        (writer.path / SAMPLES).mkdir()
        session = _session(SessionHistory(writer))
        readings: list[tuple[int, int]] = []
        start_s, done = time.monotonic(), 0
        while done < REQUESTS:
            for record in records(RATE_RPS, done):
                session.telemetry(record)
            done += RATE_RPS
            session.tick(session.started_s + done / RATE_RPS)
            if done >= WARM and done % (REQUESTS // 10) == 0:
                readings.append((done, anonymous_bytes()))
        took_s = time.monotonic() - start_s
        (first, low), (last, high) = readings[0], readings[-1]
        growth = (high - low) / max(1, last - first)
        report_s, report_bytes, totals = _report(session)
    rows = [
        ("requests recorded", f"{totals.requests:,}"),
        ("memory left behind a request", f"{growth:.2f} bytes"),
        ("the same with records kept in a list, as before", f"{a_record:.0f} bytes"),
        (f"memory from {first:,} to {last:,} requests", f"{low / 2**20:.0f} to {high / 2**20:.0f} MiB"),
        ("time a request, its share of the tick included", f"{1e6 * took_s / REQUESTS:.1f} µs"),
        ("figures and series at the end", f"{report_s:.1f} s, {report_bytes / REQUESTS:.0f} bytes a request more"),
    ]
    checks = [
        (f"all {REQUESTS:,} requests are in the figures", totals.requests == REQUESTS),
        (f"a request leaves at most {FLAT_BYTES:g} bytes in memory", growth <= FLAT_BYTES),
    ]
    note = (
        f"{REQUESTS:,} records go through Session.telemetry and a tick a second at {RATE_RPS:,} requests a second of "
        "simulated time; memory is RssAnon of the process. The counterfactual is left out: it replays at most two "
        "million requests a service."
    )
    return Result("Soak: a session's memory", ("what", "measured"), rows, (note,), checks)


def _report(session: ServingSession) -> tuple[float, int, Totals]:
    """Seconds and peak memory of the figures and the series, and the totals."""
    before, start_s = anonymous_bytes(), time.monotonic()
    requests = session.history.requests.columns()
    served = ServedService(requests, [], FAMILY, SLO, None, None, None, name="sums")
    totals = served.totals
    peak = anonymous_bytes()
    np.quantile(totals.latency_s, [0.5, 0.95])
    write_requests(session.writer, requests)
    return time.monotonic() - start_s, max(peak, anonymous_bytes()) - before, totals


def _session(history: SessionHistory) -> ServingSession:
    setup = ServiceSetup("sums", "me", FAMILY, {}, SLO, (0,), (), ())
    services = {"sums": RunningService(setup, None, None, RequestWindow("sums", 4.0), planned_rps=RATE_RPS)}
    idle: Any = SimpleNamespace(drivers=(), on_trial=False)
    grid = LiveIntensity(None, lambda section: cast(Any, None), time.time)
    site = Site.model_validate({"joulery": 1, "name": "soak"})
    session = ServingSession(
        site, services, history, idle, idle, start_sampler=lambda: cast(Any, None), grid=grid, pace=Pace()
    )
    session.begin(1_700_000_000.0)
    return session


def records(count: int, first: int) -> Iterator[RequestRecord]:
    """Records of requests that ended one after the other at ``RATE_RPS``."""
    for k in range(first, first + count):
        end_s = 1_700_000_000.0 + k / RATE_RPS
        variant = "large" if k % 3 else "small"
        share = EnergyShare(0.05 + k % 7 / 100, None, Quality.MODELLED)
        outcome = Outcome.OK if k % 1000 else Outcome.OVERLOADED
        start_s = math.nan if outcome is Outcome.OVERLOADED else end_s - 0.01
        yield RequestRecord("sums", variant, "r0", end_s - 0.02, start_s, end_s, outcome, 0.01, 0.009, 1, share)


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon), bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not report RssAnon")
