"""The scheduler's screen: hostile names, nothing known, a cluster that does not answer, served and in a browser."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from joulery.app import scheduler_view as module
from joulery.app.scheduler_view import scheduler_view, serve_page
from joulery.config import load
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.gateway.exporter.scheduler import SchedulerMetrics
from joulery.ui.cli import main
from joulery.ui.dashboard.scheduler import scheduler_page
from tests.browser import Browser
from tests.waiting import PATIENCE_S

SITE = """\
joulery: 1
name: two
clusters:
- {name: east, jobs: {state: east}}
- {name: west, jobs: {state: west}}
"""


def job(number: int, **more: Any) -> dict[str, Any]:
    row = {
        "job": number, "name": f"job {number}", "owner": "ada", "state": "waiting", "slots": 0, "min_slots": 2,
        "progress_ratio": None, "submit_s": 1.7e9, "energy_j": None, "carbon_g": None, "quality": None,
        "power_w": None, "rank": number, "waits_because": "waits for 2 free slots", "expected_start_s": None,
    }  # fmt: skip
    return row | more


def view(*jobs: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {
        "site": "desk", "mode": "act", "policy": "green", "now_s": 1.7e9 + 7260.0, "rounds": {},
        "g_per_kwh": None, "hour": "", "jobs": list(jobs), "problems": [], "clusters": {"desk": True},
    }  # fmt: skip
    return base | more


RUNS = {"state": "running", "slots": 4, "rank": None, "waits_because": None, "quality": "measured"}


def test_it_shows_who_waits_why_and_what_the_cluster_draws() -> None:
    page = scheduler_page(
        view(
            job(2), job(1, expected_start_s=1.7e9 + 9000.0), job(3, **RUNS, power_w=800.0, carbon_g=12.0),
            job(4, **RUNS, power_w=None), g_per_kwh=250.0, hour="green hour, last round",
        )
    )  # fmt: skip
    for words in ("waits for 2 free slots", "2 h 01 min", "800 W", "1 of 2 running jobs", "250 g/kWh", "200 g/h"):
        assert words in page, words
    assert page.index("job 1") < page.index("job 2"), "by rank"
    assert "refresh" not in page and 'http-equiv="refresh"' in scheduler_page(view(), live=True)


def test_nothing_known_is_said_and_no_name_is_html() -> None:
    page = scheduler_page(view())
    assert "No job waits." in page and "No job runs." in page and "No round yet." in page and "0 W" not in page
    hostile = scheduler_page(view(job(1, name="<script>", waits_because="<b>"), problems=["east: <i>"]))
    assert "<script" not in hostile and "<b>" not in hostile and "east: &lt;i&gt;" in hostile


def test_a_cluster_that_does_not_answer_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    log = tmp_path / "west/runs/a/log.jsonl"
    log.parent.mkdir(parents=True)
    seen = {"g_per_kwh": 90.0, "mean_g_per_kwh": 100.0}
    rounds = [{"kind": "round", "t_s": 5.0, "text": "one"}, {"kind": "round", "t_s": 9.0, "text": "two", "view": seen}]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in rounds) + '{"torn')

    def rows(site: Any) -> list[dict[str, Any]]:
        if site.jobs.state.name == "east":
            raise CapabilityError("the controller does not answer")
        return [job(1)]

    monkeypatch.setattr(module, "list_jobs", rows)
    found = scheduler_view(load(tmp_path / "site.yaml"))
    assert [(row["cluster"], row["job"]) for row in found["jobs"]] == [("west", 1)]
    overdue, unreachable = found["problems"][::-1]
    assert unreachable == "east: the controller does not answer"
    assert overdue.startswith("west: no round for ") and "does joulery schedule run?" in overdue
    assert found["clusters"] == {"east": False, "west": True}
    assert found["rounds"] == {"west": {"t_s": 9.0, "text": "two"}}
    assert (found["g_per_kwh"], found["hour"]) == (90.0, "green hour, last round")
    log.write_text(json.dumps({"kind": "round", "t_s": time.time() - 60.0, "text": "now"}) + "\n")
    log.with_name("manifest.json").write_text('{"mode": "shadow"}')
    west = scheduler_view(load(tmp_path / "site.yaml"), "west")
    assert west["problems"] == [] and west["mode"] == "shadow", "the mode of the daemon, not of the file"
    east = tmp_path / "east/runs/a/log.jsonl"
    east.parent.mkdir(parents=True)
    east.write_text(log.read_text())
    east.with_name("manifest.json").write_text('{"mode": "act"}')
    assert scheduler_view(load(tmp_path / "site.yaml"))["mode"] == "act (east), shadow (west)"


def test_a_site_file_that_is_wrong_for_one_cluster_hides_no_other(tmp_path: Path) -> None:
    wrong = "- {name: south, jobs: {backend: slurm, slurm: {conf: nowhere/slurm.conf}}}\n"
    (tmp_path / "site.yaml").write_text(SITE + wrong)
    found = scheduler_view(load(tmp_path / "site.yaml"))
    assert found["clusters"] == {"east": True, "west": True, "south": False}
    assert [text.partition(":")[0] for text in found["problems"]] == ["south"]
    with pytest.raises(ConfigError, match="nowhere"):
        scheduler_view(load(tmp_path / "site.yaml"), "south")
    assert "Last round of east" in scheduler_page(view(clusters={"east": True, "west": True},
                                                      rounds={"east": {"t_s": 1.7e9, "text": "x"}}))  # fmt: skip


def samples(shown: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """The exposition: value by name and labels."""
    text = SchedulerMetrics(lambda: shown).render()[0].decode()
    return {
        (one.name.removeprefix("joulery_scheduler_"), *one.labels.values()): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_its_metrics_count_every_job_once_and_leave_out_what_is_unknown() -> None:
    rounds = {"east": {"t_s": 1.7e9, "text": ""}, "west": {"t_s": 1.6e9, "text": ""}}
    two = {"clusters": {"east": True, "west": False}, "rounds": rounds, "g_per_kwh": 250.0}
    rows = (job(1, cluster="east"), job(2, **RUNS, cluster="east"), job(3, **RUNS, cluster="east", power_w=800.0))
    found = samples(view(*rows, **two))
    assert {key: value for key, value in found.items() if key[0] == "jobs"} == {
        ("jobs", "east", "waiting"): 1, ("jobs", "east", "running"): 2, ("jobs", "east", "stopping"): 0,
        ("jobs", "east", "done"): 0, ("jobs", "east", "failed"): 0,
    }  # fmt: skip
    assert (found["up", "east"], found["up", "west"]) == (1, 0)
    assert (found["busy_slots", "east"], found["longest_wait_seconds", "east"]) == (8, 7260)
    assert (found["power_watts", "east"], found["jobs_without_power", "east"]) == (800, 1)
    assert [found["last_round_timestamp_seconds", name] for name in ("east", "west")] == [1.7e9, 1.6e9]
    assert found[("carbon_intensity_grams_per_kilowatthour",)] == 250
    assert not [
        key for key in found if key[1:2] == ("west",) and key[0] not in ("up", "last_round_timestamp_seconds")
    ], "it did not tell its jobs"

    nothing = samples(view(job(1, **RUNS)))
    absent = {"power_watts", "last_round_timestamp_seconds", "carbon_intensity_grams_per_kilowatthour"}
    assert not absent & {key[0] for key in nothing}
    assert nothing["longest_wait_seconds", "desk"] == 0


def test_it_is_served_with_the_pages_own_policy_and_fits_a_phone(tmp_path: Path) -> None:
    shown = view(job(1), job(2, **RUNS, power_w=300.0), rounds={"desk": {"t_s": 1.7e9, "text": "dirty hour; 1 run"}})
    with serve_page("127.0.0.1", 0, lambda: scheduler_page(shown, live=True), lambda: shown) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}"
            with urllib.request.urlopen(f"{address}/dashboard", timeout=PATIENCE_S) as answer:
                assert answer.headers["Content-Type"] == "text/html; charset=utf-8" and b"job 2" in answer.read()
            with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as answer:
                assert b'joulery_scheduler_power_watts{cluster="desk"} 300.0' in answer.read()
            with Browser() as browser:
                browser.open(address, width=420)
                assert browser.complaints() == [] and "Waiting" in browser.text("main")
                assert browser.evaluate("document.documentElement.scrollWidth") <= 420
                browser.screenshot(tmp_path / "phone.png")
        finally:
            server.shutdown()
            thread.join()


def test_the_command_writes_a_page_and_refuses_what_is_no_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text("joulery: 1\nname: desk\njobs: {slots: {count: 1}}\n")
    flags = ["jobs", "--site", str(tmp_path / "site.yaml")]
    assert main([*flags, "--html", str(tmp_path / "jobs.html")]) == 0
    assert "No job waits." in (tmp_path / "jobs.html").read_text()
    assert main([*flags, "--listen", "everywhere"]) == 2
    assert "127.0.0.1:8090" in capsys.readouterr().err
