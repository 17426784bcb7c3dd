"""The carbon feed of a running service: absent, late, of the past, growing, damaged, rewritten. Serving goes on."""

import json
import re
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest

from joulery.store.run.directory import open_run
from tests.e2e.test_up import Up, site  # noqa: F401 - a fixture
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
HOUR_S = 3600
TYPICAL = 'kind: typical, zone: GB, replay: {day: "2020-10-14", duration: 60 s}'
FEED = "kind: file, path: grid.csv, zone: GB"
PATIENT = {"500 ms": "5 s"}
"""While the SLO is threatened, the feed decides nothing: not on a busy machine's account."""
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [2, 3]}]}).encode()


class Service:
    """A running service, asked over HTTP."""

    def __init__(self, up: Up) -> None:
        found = re.search(r"(http://[0-9.:]+)/dashboard", up.until("/dashboard"))
        assert found is not None
        self.url = found[1]

    def headers(self) -> dict[str, str]:
        request = urllib.request.Request(f"{self.url}/v2/models/sums/infer", BODY)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["outputs"][0]["data"] == [5.0]
            return {name.lower(): value for name, value in answer.headers.items()}

    def metric(self, name: str) -> float | None:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return None if found is None else float(found[1])

    def grams(self) -> float | None:
        value = self.headers().get("x-joulery-carbon-g")
        return None if value is None else float(value)

    def warned(self, words: str) -> bool:
        with urllib.request.urlopen(f"{self.url}/api/now", timeout=PATIENCE_S) as answer:
            return any(words in text for text in json.load(answer)["warnings"])


def write(path: Path, *rows: tuple[int, object]) -> None:
    """Rows of so many hours from now on, each with its intensity; replaced in one step, as a fetcher should."""
    hour_s = time.time() // HOUR_S * HOUR_S
    lines = [f"{datetime.fromtimestamp(hour_s + at * HOUR_S, UTC):%Y-%m-%dT%H:%MZ},{value}" for at, value in rows]
    new = path.with_suffix(".new")
    new.write_text("\n".join(("timestamp_utc,ci_lifecycle", *lines)) + "\n")
    new.replace(path)


def test_a_feed_that_is_absent_comes_grows_and_breaks_stops_nothing(tmp_path, site):  # noqa: F811
    out, grid = tmp_path / "summary.json", tmp_path / "grid.csv"
    name = "joulery_carbon_intensity_"
    arguments = ("--stay", "--json-out", str(out))
    with Up(site({TYPICAL: FEED, **PATIENT}, duration="1 s", replay="60 s"), tmp_path, *arguments) as up:
        service = Service(up)
        assert re.search(r"^  carbon +unknown, so joules alone", up.heard, re.MULTILINE), up.heard
        assert "intensity unknown, so accuracy alone decides" in up.heard
        wait_until(lambda: service.metric(f"{name}known_ratio") == 0.0, "the metric of an absent feed")
        assert service.grams() is None and service.metric(f"{name}grams_per_kilowatthour") is None
        assert service.warned("grid.csv")

        write(grid, (-5, 100), (-4, 110))
        wait_until(lambda: service.metric(f"{name}known_ratio") == 1.0, "the file of the past")
        age_s = service.metric(f"{name}age_seconds")
        assert age_s is not None and age_s >= 3 * HOUR_S
        held_g = service.grams()
        assert held_g is not None and held_g > 0
        wait_until(lambda: service.warned("it is held"), "the warning of a held value")
        up.until("it is held")
        # The summary names what is held for half a second or more.
        wait_until(lambda: (service.metric(f"{name}age_seconds") or 0.0) >= age_s + 1.0, "a second of the held value")

        write(grid, (-5, 100), (-4, 110), (-1, 115), (0, 400), (1, 400))
        wait_until(lambda: service.metric(f"{name}grams_per_kilowatthour") == 400.0, "the row of this hour")
        assert service.metric(f"{name}age_seconds") == 0.0

        write(grid, (-1, 115), (0, "many"), (1, 1))
        wait_until(lambda: service.warned("not a number"), "the warning of a damaged file")
        assert service.metric(f"{name}grams_per_kilowatthour") == 400.0 and service.grams() is not None

        write(grid, (-1, 50), (0, 20), (1, 20))
        wait_until(lambda: service.metric(f"{name}grams_per_kilowatthour") == 20.0, "the rewritten file")
        up.process.terminate()
        code, said, complaint = up.end()
        assert code == 0 and "Traceback" not in complaint, complaint
        assert up.survivors() == []
    summary = json.loads(out.read_text())
    assert summary["carbon_g"] == pytest.approx(summary["energy_j"] * 20 / 3.6e6, rel=0.01), "rewritten: 20 g/kWh"
    assert summary["carbon_unknown_s"] == pytest.approx(0.0, abs=0.01) and summary["carbon_held_s"] > 0
    assert summary["failed"] == summary["refused"] and re.search(r"^  carbon +.*held for", said, re.MULTILINE)
    run = open_run(tmp_path / "run")
    grams = run.series("timeline")["g_per_kwh"].tolist()
    assert grams[0] != grams[0], "unknown at first, never zero"
    assert 400.0 in grams and 110.0 in grams


def test_a_feed_that_never_comes_leaves_grams_unknown(tmp_path, site):  # noqa: F811
    out = tmp_path / "summary.json"
    with Up(site({TYPICAL: FEED, **PATIENT}, replay="60 s"), tmp_path, "--json-out", str(out)) as up:
        code, said, complaint = up.end()
        assert code == 0, complaint
    summary = json.loads(out.read_text())
    assert summary["answered"] > 0 and summary["energy_j"] > 0
    assert summary["carbon_g"] is None and "grid.csv" in summary["carbon_reason"]
    assert summary["carbon_unknown_s"] == pytest.approx(summary["duration_s"])
    assert summary["saving_of"] == "joules" and re.search(r"^  carbon +unknown", said, re.MULTILINE)
    assert "intensity unknown" in said
    assert all(entry["carbon_g"] != 0 for entry in open_run(tmp_path / "run").log("tick"))
