"""``joulery up`` for real: processes, HTTP, signals."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.gateway.certificates import made
from tests.runtime.site_files import toy_site
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


class Up:
    """A running ``joulery up``, everything it starts marked in its environment."""

    def __init__(
        self,
        site: Path,
        folder: Path,
        *arguments: str,
        limit_bytes: int = -1,
        verb: str = "up",
        cache: Path | None = None,
    ) -> None:
        self.marker = uuid.uuid4().hex
        self.folder = folder
        environment = os.environ | {"JOULERY_CACHE": str(cache or folder / "cache"), "JOULERY_TEST_MARK": self.marker}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "joulery", verb, str(site), "--out", str(folder / "run"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
        )
        self.heard = ""

    def until(self, words: str, times: int = 1) -> str:
        """Read until some words were printed so many times."""
        assert self.process.stdout is not None
        while self.heard.count(words) < times:
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"{words!r} was never said, but: {self.heard}"
            self.heard += chunk.decode()
        return self.heard

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code and all it said."""
        out, err = self.process.communicate()
        return self.process.returncode, self.heard + out.decode(), err.decode()

    def survivors(self) -> list[str]:
        """What it started and still lives, after it had time to end."""
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self._marked(), "the end of every process")
        return self._marked()

    def _marked(self) -> list[str]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self.marker.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except (OSError, ProcessLookupError):
                continue
        return found

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            error.add_note(f"it said: {self.heard[-4000:]}")
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def site(tmp_path):
    """The toy site with a profile at hand, so that it serves at once."""

    def make(changed: dict[str, str] | None = None, **options: str) -> Path:
        write_profile(tmp_path / "profile.json", toy_profile())
        with_profile = {"    slo:": "    profile: profile.json\n    slo:"}
        return toy_site(tmp_path, changed={**with_profile, **(changed or {})}, **options)

    return make


NOT_LOST = {"ok", "cancelled", "overloaded"}
"""What may become of a request: a busy machine may refuse it."""


def check_contract(summary: dict, *, ended_by_itself: bool = True, replayed_within: float = 1.0) -> None:
    """What scripts rely on, and what must be true of any run; ``replayed_within`` is how far off its replay may be."""
    assert summary["schema"] == "joulery.up/1"
    assert summary["answered"] > 0 and summary["failed"] == summary["refused"], "a busy machine may refuse, never fail"
    assert summary["p95_s"] > 0 and summary["slo_s"] > 0
    assert abs(sum(summary["variants"].values()) - 1) < 1e-9
    assert 0 < summary["accuracy_ratio"] < 1 and summary["accuracy_source"]
    assert summary["energy_j"] > 0 and summary["carbon_g"] > 0
    parts = ("requests_j", "serving_j", "load_generator_j", "idle_j", "unattributed_j")
    assert sum(summary[name] for name in parts) == pytest.approx(summary["energy_j"], rel=1e-9)
    assert all(summary[name] >= 0 for name in parts)
    charged = sum(part["energy_j"] for part in summary["parts"])
    assert charged + summary["idle_j"] + summary["unattributed_j"] == pytest.approx(summary["energy_j"], rel=1e-9)
    assert summary["saving_low_ratio"] <= summary["saving_ratio"] <= summary["saving_high_ratio"] < 1
    off = summary["calibration"]["cpu_error_ratio"]
    assert (off is None) == (summary["calibration"]["steered_ratio"] > 0.02) and -1 < (off or 0.0) < replayed_within
    assert (
        summary["saving_machine_ratio"] == summary["saving_with_idle_ratio"] and 0 <= summary["attainment_ratio"] <= 1
    )
    assert summary["baseline_basis"] == "modelled", "the baseline is replayed, never observed"
    assert summary["planned"] == summary["sent"] + summary["unsent"] and summary["sent"] >= summary["client"]["ok"]
    assert summary["quality"] in ("measured", "modelled", "assumed")
    if ended_by_itself:
        client = summary["client"]
        assert client["ok"] + client["refused"] == summary["requests"] == client["requests"] == summary["planned"]
    page = Path(summary["html"]).read_text()
    assert page.startswith("<!doctype html>") and "http://" not in page.replace("http://www.w3.org", "")


def test_the_quickstart_with_real_classifiers(tmp_path):
    """The main job over twelve seconds: a day of the grid in them, three published models, photographs over HTTP."""
    out = tmp_path / "summary.json"
    with Up(
        QUICKSTART, tmp_path, "--duration", "12", "--listen", "127.0.0.1:0", "--json-out", str(out), "--json"
    ) as up:
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    summary = json.loads(said)
    assert json.loads(out.read_text()) == summary
    check_contract(summary)
    assert set(summary["variants"]) == {"lite0", "lite1", "lite2"}
    assert 0.751 <= summary["accuracy_ratio"] <= 0.776
    assert summary["carbon_quality"] == "assumed" and summary["carbon_source"].startswith("assumed typical day")
    run = open_run(tmp_path / "run")
    assert run.closed and run.manifest["kind"] == "up"
    answers = run.series("requests")
    assert len(answers["cpu_s"]) == summary["requests"]
    assert answers["outcome"].tolist().count("ok") == summary["answered"]
    assert run.series("timeline")["energy_j"][-1] == pytest.approx(summary["energy_j"], rel=0.05)
    assert run.series("timeline")["baseline_g"][-1] > 0


def test_a_person_sees_what_was_found_what_happens_and_what_it_came_to(tmp_path, site):
    with Up(site(), tmp_path) as up:
        address = re.search(r"dashboard +(http://[0-9.:]+)/dashboard", up.until("/dashboard"))
        assert address is not None
        up.until("/3 s ")
        with urllib.request.urlopen(f"{address[1]}/api/now", timeout=PATIENCE_S) as answer:
            now = json.load(answer)
        with urllib.request.urlopen(f"{address[1]}/metrics", timeout=PATIENCE_S) as answer:
            metrics = answer.read().decode()
        with urllib.request.urlopen(f"{address[1]}/dashboard", timeout=PATIENCE_S) as answer:
            assert b"<!doctype html>" in answer.read().lower()
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    assert now["site"]["carbon"]["basis"] == "assumed" and now["ticks"][-1]["power_w"] > 0
    assert "joulery_power_watts{" in metrics and "joulery_requests_total" in metrics
    for name in ("machine", "service", "slices", "profile", "power", "carbon", "demand", "plan", "dashboard"):
        assert re.search(rf"^  {name} +\S", said, re.MULTILINE), f"{name} is missing in {said}"
    for name in ("requests", "latency", "accuracy", "variants", "energy", "carbon", "saving", "model", "plans", "html"):
        assert re.search(rf"^  {name} +\S", said, re.MULTILINE), f"{name} is missing in {said}"
    assert "modelled" in said and "not measured here" in said
    assert "none failed" in said or re.search(r"(\S+) failed \(\1 refused\)", said), (
        "a busy machine may refuse, never fail"
    )
    replayed = subprocess.run(
        [sys.executable, "-m", "joulery", "replay", str(tmp_path / "run"), "--json"], capture_output=True, check=True
    )
    assert json.loads(replayed.stdout)["differences"] == [] and json.loads(replayed.stdout)["decisions"] >= 1


def test_ctrl_c_while_serving_ends_it_with_the_summary_so_far(tmp_path, site):
    out = tmp_path / "summary.json"
    with Up(site(duration="600 s", replay="600 s"), tmp_path, "--json-out", str(out)) as up:
        up.until("/600 s ", times=2)
        os.killpg(up.process.pid, signal.SIGINT)
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    summary = json.loads(out.read_text())
    check_contract(summary, ended_by_itself=False)
    assert 0 < summary["duration_s"] < 600 and "Traceback" not in complaint
    assert re.search(r"^  saving +\S", said, re.MULTILINE)


def test_ctrl_c_while_profiling_leaves_nothing(tmp_path):
    with Up(toy_site(tmp_path), tmp_path) as up:
        up.until("profiling 1/4")
        os.killpg(up.process.pid, signal.SIGINT)
        code, _, complaint = up.end()
        assert code == 130 and "interrupted before anything was served" in complaint
        assert "Traceback" not in complaint
        assert up.survivors() == []
    assert open_run(tmp_path / "run").closed


def test_kill_9_leaves_no_child_and_a_readable_run(tmp_path, site):
    with Up(site(duration="600 s", replay="600 s"), tmp_path) as up:
        up.until("/600 s ", times=2)
        up.process.kill()
        up.process.wait()
        assert up.survivors() == []
    report = subprocess.run(
        [sys.executable, "-m", "joulery", "report", str(tmp_path / "run"), "--json"], capture_output=True, check=False
    )
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["energy_j"] > 0


def test_it_stays_when_asked_to(tmp_path, site):
    out = tmp_path / "summary.json"
    with Up(site(duration="1 s", replay="2 s"), tmp_path, "--stay", "--json-out", str(out)) as up:
        text = up.until("/dashboard")
        address = re.search(r"(http://[0-9.:]+)/dashboard", text)
        assert address is not None
        wait_until(lambda: any("joulery.runtime.load" in line for line in up._marked()), "the load generator")
        wait_until(lambda: not any("joulery.runtime.load" in line for line in up._marked()), "its end")
        assert up.process.poll() is None, "the load has ended, the service has not"
        body = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [2, 3]}]}).encode()
        request = urllib.request.Request(f"{address[1]}/v2/models/sums/infer", body)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["outputs"][0]["data"] == [5.0]
            assert float(answer.headers["x-joulery-energy-j"]) > 0
            assert float(answer.headers["x-joulery-carbon-g"]) > 0
            assert answer.headers["x-joulery-variant"] in ("small", "large")
        up.process.terminate()
        code, _, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    assert json.loads(out.read_text())["requests"] > 5


def test_a_canary_joins_a_running_service_and_no_request_is_lost(tmp_path, site):
    """The site file changes twice while requests come: shares first, then a variant more, another one less."""
    split = "policy: {kind: split, shares: {large: 90 %, small: 10 %}}"
    # An SLO that a busy machine keeps, too: while it is threatened, the shares of the file wait.
    changed = {"policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": split, "500 ms": "20 s"}
    path, out = site(changed, duration="600 s", replay="600 s"), tmp_path / "summary.json"
    with Up(path, tmp_path, "--json-out", str(out)) as up:
        up.until("/600 s ")
        path.write_text(path.read_text().replace("large: 90 %, small: 10 %", "large: 50 %, small: 50 %"))
        up.until("large answers 50 %")
        third = """        - {name: third, accuracy: 85 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.004}}}
"""
        text = path.read_text().replace("large: 50 %, small: 50 %", "large: 60 %, third: 40 %")
        path.write_text(text.replace("    profile:", f"{third}    profile:"))
        up.until("third answers 40 %")
        up.until("% third ")  # it answers; on a busy machine the SLO rule may load it, in words of its own
        up.until("/600 s ", times=2 + up.heard.count("/600 s "))
        shown = [line for line in up.heard.splitlines() if "/600 s " in line and " % " in line]
        assert "small" not in shown[-1]
        os.killpg(up.process.pid, signal.SIGINT)
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    summary = json.loads(out.read_text())
    assert summary["answered"] > 0 and summary["failed"] == summary["refused"], "a busy machine may refuse, never fail"
    assert all(summary["variants"][name] > 0 for name in ("small", "large", "third"))
    assert summary["baseline_basis"] == "modelled" and "joined without a profile" in said
    log = open_run(tmp_path / "run").log()
    assert decide_again(log).differences == ()


def test_variants_of_a_clover_policy_join_and_leave_and_no_request_is_lost(tmp_path, site):
    """Under load, with trials: one that cannot be loaded stays out, one joins, one leaves, the baseline may not."""
    fields = {
        "lambda: 10 %": "lambda: 40 %, search: learning, trials: {min_requests: 20, longest: 4 s, clock: 30 s}",
        "500 ms": "20 s",  # while the SLO is threatened, searches wait: not on a busy machine's account
    }
    path, out = site(fields, duration="600 s", replay="90 s"), tmp_path / "summary.json"
    third = """        - {name: third, accuracy: 79 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.0025}}}
"""
    with Up(path, tmp_path, "--json-out", str(out)) as up:
        up.until("/600 s ")
        started = path.read_text()
        path.write_text(started.replace("    profile:", third.replace(":Sum", ":Missing") + "    profile:"))
        up.until("no callable 'Missing'")
        path.write_text(started.replace("    profile:", f"{third}    profile:"))
        up.until("ms of CPU time a request")
        up.until("third joined")  # its first share waits while the SLO is threatened, as on a busy machine
        text = path.read_text()
        path.write_text(re.sub(r" +- {name: large,.*\n.*\n", "", text))
        up.until("large is the baseline that savings of this run are compared with")
        path.write_text(re.sub(r" +- {name: small,.*\n.*\n", "", text))
        up.until("small left")
        up.until("/600 s ", times=3 + up.heard.count("/600 s "))
        os.killpg(up.process.pid, signal.SIGINT)
        code, _, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    summary = json.loads(out.read_text())
    assert summary["answered"] > 0 and summary["failed"] == summary["refused"], "a busy machine may refuse, never fail"
    assert summary["variants"]["large"] > 0
    log = list(open_run(tmp_path / "run").log())
    assert decide_again(log).differences == ()
    left = next(at for at, entry in enumerate(log) if "small left" in str(entry.get("decisions")))
    later = [one for entry in log[left:] if entry["kind"] == "step" for one in entry["decisions"]]
    assert not [one for one in later if one["kind"] != "set_weights" and "small" in str(one["value"])]


def test_requests_are_answered_in_batches_under_the_policy(tmp_path, site):
    """More requests arrive than replicas could answer one by one; the model takes as long for eight as for one."""
    measured = toy_profile()
    entries = [replace(one, batches=dict.fromkeys((2, 4, 8), one.loaded)) for one in measured.entries]
    fields = {"    slo:": "    max_batch: 8\n    profile: profile.json\n    slo:", "rate: 30 /s": "rate: 400 /s"}
    path, out = toy_site(tmp_path, changed=fields, duration="6 s", replay="6 s"), tmp_path / "summary.json"
    write_profile(tmp_path / "profile.json", replace(measured, entries=tuple(entries), machine={"max_batch": 8}))
    with Up(path, tmp_path, "--json-out", str(out)) as up:
        code, _, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    # The made-up profile charges a batch of one as a batch of eight: the larger they are, the further off.
    check_contract(json.loads(out.read_text()), replayed_within=8.0)
    log = list(open_run(tmp_path / "run").log())
    assert decide_again(log).differences == ()
    sizes = [
        size for entry in log if entry["kind"] == "step" for size in entry["observation"].get("batched", {}).values()
    ]
    assert max(sizes, default=1.0) > 1.0, "some were answered together"


def test_advice_changes_nothing(tmp_path, site):
    """In mode advise the baseline runs, and what would be done is said and logged."""
    out = tmp_path / "summary.json"
    changed = {"mode: act": "mode: advise", "lambda: 10 %": "lambda: 90 %, search: learning"}
    with Up(site(changed), tmp_path, "--json-out", str(out)) as up:
        code, said, complaint = up.end()
        assert code == 0, complaint
    summary = json.loads(out.read_text())
    assert summary["variants"] == {"small": 0.0, "large": 1.0} and summary["layout_changes"] == 0
    assert "mode advise: the baseline runs instead" in said
    left_aside = "sums: search: learning needs mode: act"
    assert left_aside in said
    warned = [entry["text"] for entry in open_run(tmp_path / "run").log("warning")]
    assert [text.startswith(left_aside) for text in warned].count(True) == 1
    assert summary["saving_ratio"] == pytest.approx(0.0, abs=0.1)
    decisions = list(open_run(tmp_path / "run").log("decision"))
    assert {entry["outcome"] for entry in decisions} == {"advised"}
    assert decisions[0]["decision"]["value"] == ["small on cpu:1", "small on cpu:1"]


def refused(tmp_path: Path, site: Path, *arguments: str) -> tuple[int, str]:
    with Up(site, tmp_path, *arguments) as up:
        code, _, complaint = up.end()
        assert up.survivors() == []
    assert "Traceback" not in complaint
    assert len([line for line in complaint.splitlines() if line.startswith("joulery:")]) == 1, complaint
    return code, complaint


def test_a_port_in_use_is_known_before_anything_takes_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, complaint = refused(tmp_path, toy_site(tmp_path), "--listen", listen)
    assert code == 2 and f"cannot listen on {listen}: the port is in use" in complaint and "--listen" in complaint


ONNX = {'kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.006}': "kind: onnx, path: big.onnx"}
BROKEN = [
    ({"lambda: 10 %": "lambda: 10 W"}, (), "is a power, not a ratio"),
    ({"rate: 30 /s": "rate: -3 /s"}, (), "must be above 0"),
    ({"zone: GB": "zone: XX"}, (), "carbon.zone"),
    ({"kind: typical, zone: GB,": "kind: file, path: gap.csv,"}, (), "no intensity of"),
    ({"cores: 2": "cores: 4000"}, (), "CPU cores"),
    ({"toy_models:Sum": "toy_models:Nothing"}, (), "Nothing"),
    ({}, ("--duration", "-3"), "--duration: must be above 0 s"),
    ({}, ("--duration", "3 W"), "--duration"),
    ({}, ("--listen", "nowhere"), "--listen"),
    ({"duration: 3 s, seed": "duration: 3 s, inputs: ., seed"}, (), "photographs cannot be sent"),
    ({"load: {kind: poisson, rate: 30 /s,": "load: {kind: trace, path: site.yaml,"}, (), "no column arrival_s"),
]


@pytest.mark.parametrize(("changed", "arguments", "words"), BROKEN, ids=lambda value: str(value)[:30])
def test_what_is_wrong_is_one_clear_error(tmp_path, site, changed, arguments, words):
    hours = "".join(f"2020-10-14T{hour:02d}:00Z,{'' if hour == 5 else 200}\n" for hour in range(24))
    (tmp_path / "gap.csv").write_text("timestamp_utc,ci_lifecycle\n" + hours)
    code, complaint = refused(tmp_path, site(changed), *arguments)
    assert code == 2 and words in complaint


def test_an_unreadable_model_is_one_clear_error(tmp_path, site):
    (tmp_path / "big.onnx").write_bytes(b"this is no model")
    code, complaint = refused(tmp_path, toy_site(tmp_path, changed=ONNX))
    assert code == 2 and "big.onnx" in complaint, "found while it is profiled"
    (tmp_path / "again").mkdir()
    code, complaint = refused(tmp_path / "again", site({**ONNX, "lambda: 10 %": "lambda: 0 %"}))
    assert code == 2 and "big.onnx" in complaint, "found when it starts to serve"


def test_a_full_disk_is_one_clear_error(tmp_path, site):
    """A limit on file size stands for a full disk: the log of the run cannot grow."""
    with Up(site(), tmp_path, limit_bytes=30_000) as up:
        code, _, complaint = up.end()
        assert up.survivors() == []
    assert code == 2 and "cannot write" in complaint and "Traceback" not in complaint


def test_a_folder_that_holds_a_run_is_not_touched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    code, complaint = refused(tmp_path, toy_site(tmp_path))
    assert code == 2 and "already holds a run" in complaint
    assert (tmp_path / "run" / "manifest.json").read_text() == "{}"


def test_a_site_without_a_service(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("joulery: 1\n")
    code, complaint = refused(tmp_path, site)
    assert code == 2 and "the site has no service to run" in complaint


SECOND = """\
  - name: more
    owner: others
    family:
      task: sums
      accuracy_metric: share of right sums
      variants:
        - {name: only, accuracy: 90 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.004}}}
    profile: only.json
    slo: {latency: 400 ms, quantile: 99 %}
    load: {kind: constant, rate: 10 /s, duration: 2 s}
serving:"""


@pytest.fixture
def two(tmp_path, site):
    """A site with two services, each on one core, with its own load."""
    known = toy_profile()
    entries = tuple(replace(entry, variant="only") for entry in known.entries if entry.variant == "small")
    write_profile(tmp_path / "only.json", replace(known, entries=entries))
    return site({"serving:": SECOND})


def test_two_services_each_with_its_queue_its_slo_and_its_load(tmp_path, two):
    with Up(two, tmp_path, "--json") as up:
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    summary = json.loads(said)
    sums, more = summary["services"]
    assert (sums["service"], more["service"]) == ("sums", "more") and (sums["owner"], more["owner"]) == (
        "tests",
        "others",
    )
    assert set(more["variants"]) == {"only"} and set(sums["variants"]) == {"small", "large"}
    assert more["client"]["ok"] == more["requests"] == 20 and more["slo_quantile"] == 0.99
    ended = sums["answered"] + sums["failed"] + sums["abandoned"]
    assert sums["client"]["sent"] == sums["requests"] == ended and sums["client"]["ok"] == sums["answered"] > 20
    for name in ("requests", "failed", "requests_cpu_s", "requests_j", "layout_changes"):
        assert summary[name] == pytest.approx(sums[name] + more[name]), name
    assert summary["client"]["requests"] == summary["requests"] and summary["p95_s"] is None
    assert summary["slo_met"] == (sums["slo_met"] and more["slo_met"])
    assert sums["charged_j"] + more["charged_j"] == pytest.approx(summary["energy_j"], rel=1e-9)
    assert sums["charged_g"] + more["charged_g"] == pytest.approx(summary["carbon_g"], rel=1e-9)
    parts = ("requests_j", "serving_j", "load_generator_j", "idle_j", "unattributed_j")
    assert sum(summary[name] for name in parts) == pytest.approx(summary["energy_j"], rel=1e-9)
    assert [charge["workload"] for charge in summary["charges"]] == ["sums", "more"]
    served = open_run(tmp_path / "run").series("requests")["service"].tolist()
    assert (served.count("sums"), served.count("more")) == (sums["requests"], more["requests"])
    replayed = subprocess.run(
        [sys.executable, "-m", "joulery", "replay", str(tmp_path / "run"), "--json"], capture_output=True, check=True
    )
    assert json.loads(replayed.stdout)["differences"] == []


def test_serve_takes_a_site_file_and_sends_nothing_itself(tmp_path, two):
    with Up(two, tmp_path, "--json", "--listen", "127.0.0.1:0", verb="serve") as up:
        url = json.loads(up.until("\n").splitlines()[0])["url"]
        body = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [2, 3]}]}).encode()
        for name in ("sums", "more"):
            with urllib.request.urlopen(f"{url}/v2/models/{name}/infer", body, timeout=PATIENCE_S) as answer:
                assert json.load(answer)["outputs"][0]["data"] == [5.0]
        up.process.terminate()
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    assert [entry["requests"] for entry in json.loads(said.splitlines()[-1])["services"]] == [1, 1]


def test_trials_on_the_running_service_survive_a_kill_and_a_changed_slo(site, tmp_path):
    """Configurations are tried live; the SLO is tightened and a replica killed meanwhile; the log decides the same."""
    trials = "{count: 3, longest: 2 s, clock: 60 s, warm_up: 100 ms, min_requests: 75}"
    policy = f"base_intensity: 200 g/kWh, search: clover, trials: {trials}"
    # An SLO that a busy machine keeps, too: a threat would end the trials.
    changed = {"base_intensity: 200 g/kWh": policy, "rate: 30 /s": "rate: 60 /s", "latency: 500 ms": "latency: 20 s"}
    path = site(changed, duration="600 s", replay="600 s")
    with Up(path, tmp_path) as up:
        up.until("trial 2 of at most 3")
        children = psutil.Process(up.process.pid).children()
        workers = [child for child in children if "joulery.adapters.engines.embedded.worker" in child.cmdline()]
        workers[0].kill()
        text = path.read_text()
        path.write_text(text.replace("latency: 20 s", "latency: 1 ms"))
        up.until("SLO tightened from p95 20.0 s to p95 1 ms")
        up.until("keeps the SLO of 1 ms")
        up.process.send_signal(signal.SIGINT)
        code, _, err = up.end()
        assert code == 0, err
    log = list(open_run(tmp_path / "run").log())
    decisions = [entry for entry in log if entry["kind"] == "decision"]
    assert {entry["outcome"] for entry in decisions} == {"applied"}
    kinds = [entry["decision"]["kind"] for entry in decisions]
    # On a busy machine requests come late: a search may begin anew for the demand, after a layout that is kept.
    assert next(kind for kind in kinds if kind != "set_weights") == "try_layout" and kinds.count("try_layout") >= 2
    assert "the baseline" in decisions[0]["decision"]["reason"]
    outcomes = open_run(tmp_path / "run").series("requests")["outcome"].tolist()
    # The client goes away with the run: what it no longer waits for is cancelled.
    assert outcomes.count("ok") > 100 and set(outcomes) <= NOT_LOST, "neither a switch nor a death loses any"
    replay = subprocess.run(
        [sys.executable, "-m", "joulery", "replay", str(tmp_path / "run"), "--json"], capture_output=True, text=True
    )
    assert replay.returncode == 0 and json.loads(replay.stdout)["differences"] == []
    assert json.loads(replay.stdout)["decisions"] == len(decisions)


_LONG = "{kind: constant, rate: 20 /s, duration: 300 s}"


def test_two_services_are_never_on_trial_at_once(tmp_path, two):
    """The second waits, names the first, and has its turn; what it decided can be decided again from the log."""
    search = "search: learning, trials: {count: 2, longest: 2 s, clock: 60 s, warm_up: 100 ms, min_requests: 20}"
    text = two.read_text().replace("base_intensity: 200 g/kWh", f"base_intensity: 200 g/kWh, {search}")
    policy = f"    policy: {{kind: clover, lambda: 10 %, base_intensity: 200 g/kWh, {search}}}\n"
    text = text.replace("    load: {kind: constant, rate: 10 /s, duration: 2 s}", policy + "    load: " + _LONG)
    text = text.replace("load: {kind: poisson, rate: 30 /s, duration: 3 s, seed: 3}", f"load: {_LONG}")
    text = text.replace('14", duration: 3 s', '14", duration: 3000 s').replace("quantile: 99 %", "quantile: 95 %")
    # SLOs that a busy machine keeps, too: a threat would end the trials.
    two.write_text(text.replace("latency: 500 ms", "latency: 20 s").replace("latency: 400 ms", "latency: 20 s"))
    with Up(two, tmp_path) as up:
        up.until("more: start, after waiting: trial 1")
        up.heard = ""
        up.until("more: start, after waiting: ")  # whatever came of it: the machine may be busy
        up.process.send_signal(signal.SIGINT)
        code, _, complaint = up.end()
        assert code == 0, complaint
    log = list(open_run(tmp_path / "run").log())
    decided = [entry["decision"] for entry in log if entry["kind"] == "decision"]
    assert "only serves meanwhile, after 0 trials; its trials wait for those of sums" in decided[1]["reason"]
    on_trial: set[str] = set()
    for decision in decided:
        on_trial.discard(decision["target"])
        if decision["kind"] == "try_layout":
            on_trial.add(decision["target"])
        assert len(on_trial) <= 1, decided
    assert {decision["target"] for decision in decided if decision["kind"] == "try_layout"} == {"sums", "more"}
    assert decide_again(log).differences == ()
    more = [entry for entry in log if entry["kind"] == "step" and entry["service"] == "more"]
    at = next(k for k, entry in enumerate(more) if entry["decisions"] and entry["decisions"][0]["kind"] == "try_layout")
    first, *later = [entry["observation"] for entry in more[at:]]
    # While a decision is carried out, the layout before it serves.
    since_s = [seen["sample"]["since_s"] for seen in later if not seen.get("changing")]
    begun_s = max(first["sample"]["since_s"], more[at]["t_s"])
    assert since_s and min(since_s) > begun_s, "measured anew from its own turn on"


def test_a_site_over_https(tmp_path, site):
    """The load of the site file trusts the site's own certificate."""
    files = made(tmp_path)
    tls = f"serving: {{tls: {{certificate: {files.certificate.name}, key: {files.key.name}}}, "
    with Up(site({"serving: {": tls}), tmp_path, "--json") as up:
        code, said, complaint = up.end()
        assert code == 0, complaint
    summary = json.loads(said)
    assert summary["dashboard"].startswith("https://")
    assert summary["client"]["ok"] + summary["client"]["refused"] == summary["planned"] > 0
