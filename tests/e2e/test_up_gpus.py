"""``joulery up`` on a GPU that is not there: profiled on its parts, served, charged by its own meter, given back."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.e2e.test_up import NOT_LOST, Up
from tests.fakes.mps import daemon, gpu_machine
from tests.fakes.nvml import NvmlFake, gpu
from tests.privileges import SETS_GPUS
from tests.runtime.site_files import toy_site
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
SMALL = 'model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.002}}'
LARGE = SMALL.replace("0.002", "0.006")


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    with gpu_machine(tmp_path, monkeypatch, gpu("NVIDIA A100-SXM4-40GB", idle_w=50.0)) as nvml:
        yield nvml


def on_gpu(folder: Path, device: str, mode: str = "act") -> Path:
    changed = {
        "mode: act": f"mode: {mode}",
        "use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}": "use: [nvml]",
        "fleet: {cpu: {cores: 2}}": f"fleet: {{devices: [{device}]}}",
        SMALL: SMALL.replace(":Sum", ":GpuSum"),
        LARGE: LARGE.replace(":Sum", ":GpuSum"),
    }
    return toy_site(folder, duration="2 s", replay="2 s", changed=changed)


@SETS_GPUS
def test_a_service_on_shares_of_a_gpu_whose_clock_is_governed(tmp_path: Path, nvml: NvmlFake) -> None:
    shared = "{mode: mps, shares: [[60 %, 40 %]]}], clocks: [{device: nvidia}"
    with Up(on_gpu(tmp_path, shared), tmp_path, "--json") as up:
        code, said, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    report = json.loads(said)
    assert report["failed"] == report["refused"], "a busy machine may refuse, never fail"
    assert report["requests"] > 20
    parts_j = sum(part["energy_j"] for part in report["parts"])
    assert report["energy_j"] == pytest.approx(parts_j + report["idle_j"] + report["unattributed_j"])
    assert report["requests_j"] == pytest.approx(parts_j) and parts_j > 0, "the driver names no process, requests ran"
    assert report["serving_j"] == report["load_generator_j"] == 0, "they use no GPU, and nothing else is metered"
    assert report["idle_j"] > 0
    (charge,) = report["charges"]
    assert charge["footprint"]["parts"][0]["energy_j"] == pytest.approx(report["requests_j"])
    assert charge["footprint"]["energy_j"] == pytest.approx(report["services"][0]["charged_j"])
    assert any("busy time is taken from the requests" in note for note in report["notes"])
    (profile,) = (tmp_path / "cache/profiles").glob("*.json")
    entries = {(one["variant"], one["slice"]): one for one in json.loads(profile.read_text())["entries"]}
    assert len(entries) == 4
    for entry in entries.values():
        assert 50 < entry["active_w"] < 400
    assert any(entry["decision"]["kind"] == "set_clock" for entry in open_run(tmp_path / "run").log("decision"))
    assert nvml.boards[0]["locked"] is None
    assert daemon(tmp_path) is None
    assert not list((tmp_path / "state/leases").glob("*.json"))


@SETS_GPUS
def test_the_power_of_a_gpu_is_limited_while_it_serves_and_given_back(tmp_path: Path, nvml: NvmlFake) -> None:
    limit = "device: nvidia, max_slowdown: 2, eta: 100 %, min: 90 %, trial: 1 s, settle: 50 ms, period: 100 ms"
    shared = f"{{mode: mps, shares: [[100 %]]}}], power_limits: [{{{limit}}}"
    site = on_gpu(tmp_path, shared)
    text = site.read_text().replace("duration: 2 s", "duration: 600 s").replace("latency: 500 ms", "latency: 20 s")
    site.write_text(text.replace("{kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}", "{kind: fixed}"))
    with Up(site, tmp_path) as up:
        up.until("/600 s ")
        wait_until(lambda: nvml.boards[0]["limit_mw"] == 367_000, "a limit")
        up.process.send_signal(signal.SIGINT)
        _, said, complaint = up.end()
        assert up.survivors() == [], complaint
    assert nvml.boards[0]["limit_mw"] == 400_000
    assert "gpu:0 (NVIDIA A100-SXM4-40GB): 366.8 to 400 W" in said
    assert [one["device"] for one in open_run(tmp_path / "run").report["power_limits"]] == ["gpu:0"]


def test_gpus_are_not_touched_unless_it_may_act(tmp_path: Path, nvml: NvmlFake) -> None:
    with Up(on_gpu(tmp_path, "{mode: mig}", "advise"), tmp_path) as up:
        code, _, complaint = up.end()
    assert code == 2
    assert "the mode is advise" in complaint
    assert nvml.layout() == (False, ())


def test_partitions_are_tried_live(tmp_path: Path, nvml: NvmlFake) -> None:
    path = on_gpu(tmp_path, "{mode: mig, cuts: [[7g.40gb], [3g.20gb, 4g.20gb]]}")
    trials = "search: clover, trials: {count: 2, longest: 3 s, clock: 60 s, warm_up: 100 ms, min_requests: 75}"
    text = path.read_text().replace("base_intensity: 200 g/kWh", f"base_intensity: 200 g/kWh, {trials}")
    # An SLO that a busy machine keeps, too: a threat would end the trials.
    text = text.replace("rate: 30 /s, duration: 2 s", "rate: 60 /s, duration: 600 s")
    path.write_text(text.replace("latency: 500 ms", "latency: 20 s"))
    with Up(path, tmp_path) as up:
        up.until("trial 2 of at most 2")
        up.until("after 2 trials")
        up.process.send_signal(signal.SIGINT)
        code, _, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    run = open_run(tmp_path / "run")
    tried = [e["decision"]["value"] for e in run.log() if e["kind"] == "decision" and e["outcome"] == "applied"]
    assert all(" on " in name and "g." in name for value in tried for name in value), "MIG slices alone"
    assert len({tuple(value) for value in tried}) >= 2
    outcomes = run.series("requests")["outcome"].tolist()
    assert outcomes.count("ok") > 100 and set(outcomes) <= NOT_LOST, "requests wait while the GPU is cut"
    assert decide_again(run.log()).differences == ()
    assert nvml.layout() == (False, ()), "what was cut is given back"


def test_two_services_of_one_site_file_one_with_a_gpu_of_its_own_both_on_slices_of_another(
    tmp_path: Path, nvml: NvmlFake
) -> None:
    name = "NVIDIA A100-SXM4-40GB"
    nvml = NvmlFake(gpu(name, idle_w=50.0), gpu(name, 1, idle_w=50.0), file=nvml.file)
    cuts = "mode: mig, cuts: [[3g.20gb, 4g.20gb]]"
    path = on_gpu(tmp_path, f"{{gpu: 0, {cuts}}}, {{gpu: 1, {cuts}}}")
    head, services, tail = text_parts(path.read_text())
    groups = {"sums": "gpus: [1, 0]", "more": "gpus: [0]"}
    twice = [
        services.replace("name: sums", f"name: {who}").replace("owner: tests", f"owner: tests\n    {group}")
        for who, group in groups.items()
    ]
    own = "    load: {kind: constant, rate: 20 /s, duration: 2 s}\n"
    path.write_text(f"{head}{twice[0]}{twice[1]}{own}plan: {{colocate: true}}\n{tail}")
    with Up(path, tmp_path) as up:
        code, said, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert [each["service"] for each in report["services"]] == ["sums", "more"]
    assert all(each["failed"] == each["refused"] for each in report["services"]), (
        "a busy machine may refuse, never fail"
    )
    assert all(each["requests"] > 20 for each in report["services"])
    assert (
        "gpu:0, gpu:1 partitioned as 3g.20gb+4g.20gb+4g.20gb" in said
        and "gpu:0 partitioned as 3g.20gb: 2 layouts" in said
    )
    assert [nvml.layout(index) for index in range(2)] == [(False, ()), (False, ())], "given back"


def text_parts(text: str) -> tuple[str, str, str]:
    """A toy site: what stands before its service, the service, what stands after."""
    head, begins, rest = text.partition("  - name: sums")
    service, ends, tail = rest.partition("serving:")
    return head, begins + service, ends + tail
