"""``joulery measure`` as people and scripts use it: real processes, real signals, a fake or modelled meter."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from joulery.store.run.directory import open_run
from tests.waiting import Stretch, recorded_s, sampled, wait_until

pytestmark = pytest.mark.e2e

JOULERY = [sys.executable, "-m", "joulery"]
MEASURE = [*JOULERY, "measure"]
CLOCKED = "import time\nstart_s = time.monotonic()\n{}open('took_s', 'w').write(repr(time.monotonic() - start_s))\n"
"""A program that writes how long it took on its own clock."""
BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
CONTRACT = ["energy_j", "carbon_g", "idle_j", "unattributed_j", "duration_s", "coverage_ratio", "quality", "parts"]


def measure(tmp_path: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MEASURE, *arguments], cwd=tmp_path, capture_output=True, text=True, **options)


def report(folder: Path) -> dict[str, Any]:
    done = subprocess.run([*JOULERY, "report", str(folder), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(pid: int) -> bool:
    wait_until(lambda: not alive(pid), f"the end of process {pid}")
    return True


def samplers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"joulery.app.sampler" in Path(f"/proc/{c}/cmdline").read_bytes()]


def groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob("**/joulery-[0-9]*"))


def carbon_file(folder: Path, start: datetime, g_per_kwh: float = 360.0, hours: int = 4) -> Path:
    rows = [f"{start.replace(hour=(start.hour + h) % 24):%Y-%m-%dT%H:00:00Z},{g_per_kwh},9" for h in range(hours)]
    file = folder / "carbon.csv"
    file.write_text("timestamp_utc,ci_lifecycle,ci_direct\n" + "\n".join(rows) + "\n")
    return file


def test_the_contract_for_scripts(tmp_path: Path) -> None:
    rows = "\n".join(
        f"{datetime.fromtimestamp(time.time() // 3600 * 3600 + 3600 * h, UTC):%Y-%m-%dT%H:%M:%SZ},{100 + h},360"
        for h in range(-2, 4)
    )
    (tmp_path / "carbon.csv").write_text(f"timestamp_utc,ci_lifecycle,ci_direct\n{rows}\n")
    with Stretch() as around:
        done = measure(
            tmp_path, "--out", "run", "--carbon", "carbon.csv", "--column", "ci_direct", "--owner", "nlp", "--",
            sys.executable, "-c", CLOCKED.format(BURN.format(0.5)),
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    fields = report(tmp_path / "run")
    assert list(fields)[:8] == CONTRACT
    assert set(fields["parts"][0]) >= {"device", "component", "energy_j", "quality", "meter"}
    parts_j = sum(part["energy_j"] for part in fields["parts"])
    assert parts_j + fields["idle_j"] + fields["unattributed_j"] == pytest.approx(fields["energy_j"], rel=1e-9)
    assert fields["energy_j"] > 0
    assert fields["carbon_g"] == pytest.approx(fields["energy_j"] * 360 / 3.6e6, rel=1e-6)
    assert fields["coverage_ratio"] == pytest.approx(1.0, abs=0.01)
    assert float((tmp_path / "took_s").read_text()) <= fields["duration_s"] <= around.s
    run = open_run(tmp_path / "run")
    assert run.report is not None
    assert list(run.report)[:8] == CONTRACT
    assert run.manifest["owner"] == "nlp"
    assert run.manifest["state"] == "closed"
    assert set(run.series_names) >= {"power", "busy", "carbon"}
    assert not (tmp_path / "run/samples").exists()


def test_a_run_pays_for_its_own_time_and_not_for_others(tmp_path: Path) -> None:
    """Half of our time is a grandchild's, and another process is busy: the watts are scripted, the shares are real."""
    other = subprocess.Popen([sys.executable, "-c", BURN.format(60)])
    try:
        script = (
            BURN.format(0.6) + f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(0.6)!r}])"
        )
        done = measure(tmp_path, "--out", "run", "--meter", "fake:100", "--", sys.executable, "-c", script)
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    fields, busy = run.report, run.series("busy")
    assert fields is not None
    total_j = fields["energy_j"] + fields["other_j"] + fields["other_idle_j"]
    assert total_j == pytest.approx(100 * fields["duration_s"], rel=0.02)
    assert fields["cpu_s"] >= 1.2
    share = fields["cpu_s"] / busy["busy_s"].sum()
    assert 0 < share < 1, "another process was busy too"
    assert fields["energy_j"] == pytest.approx(share * total_j, rel=0.3)
    assert fields["other_j"] == pytest.approx((1 - share) * total_j, rel=0.3)


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("sh", "-c", "exit 42"), 42, ""),
        (("sh", "-c", "kill -TERM $$"), 143, ""),
        (("no-such-command",), 127, "joulery: no-such-command: command not found"),
        (("./no-such-file",), 127, "joulery: ./no-such-file: no such file or directory"),
        (("/",), 126, "joulery: /: is a directory"),
        (
            ("./data",),
            126,
            "joulery: ./data: permission denied\n  name its interpreter, such as python3 ./data, or chmod +x it",
        ),
        (("./bad-interpreter",), 127, "joulery: ./bad-interpreter: No such file or directory"),
    ],
)
def test_the_exit_code_is_the_commands(tmp_path: Path, command: tuple[str, ...], code: int, says: str) -> None:
    (tmp_path / "data").write_text("x")
    (tmp_path / "bad-interpreter").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bad-interpreter").chmod(0o755)
    done = measure(tmp_path, "--", *command)
    assert done.returncode == code
    if says:
        assert done.stderr == says + "\n"
    if code in (126, 127):
        assert not any((tmp_path / "runs").glob("*"))


def test_the_commands_streams_are_its_own_and_the_footprint_goes_to_standard_error(tmp_path: Path) -> None:
    done = measure(tmp_path, "--", "sh", "-c", "cat; echo err >&2", input="through\n")
    assert done.stdout == "through\n"
    assert done.stderr.startswith("err\n")
    assert "energy" in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"joulery report runs/{folder.name}" in done.stderr


def test_json_is_one_last_line(tmp_path: Path) -> None:
    done = measure(tmp_path, "--json", "--out", "run", "--carbon", "250 g/kWh", "--", "true")
    fields = json.loads(done.stderr.splitlines()[-1])
    assert list(fields)[:8] == CONTRACT
    assert fields["run"] == "run"
    assert fields["carbon_quality"] == "assumed"


def test_options_of_the_command_are_not_ours(tmp_path: Path) -> None:
    done = measure(tmp_path, "--idle", "none", "echo", "--json", "--out", "x", "--help")
    assert done.stdout == "--json --out x --help\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--carbon", "nothing.csv"), "nothing.csv"),
        (("--zone", "Atlantis"), "unknown grid zone"),
        (("--zone", "GB", "--carbon", "1 g/kWh"), "--zone and --carbon"),
        (("--carbon", "1 g/kWh", "--carbon-at", "yesterday"), "not a time"),
        (("--period", "4"), "a time needs a unit"),
        (("--period", "4 s"), "not a sampling period"),
        (("--pue", "0.5"), "not a PUE"),
        (("--meter", "rappl"), "no such meter"),
        (("--meter", "fake:1", "--meter", "cpu-model"), "two meters would count the same device"),
        (("--meter", "replay:nothing.csv"), "No such file"),
        (("--out", "file/run"), "Not a directory"),
        (("--out", "taken"), "already holds a run"),
    ],
)
def test_what_was_asked_wrongly_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/manifest.json").write_text("{}")
    done = measure(tmp_path, *arguments, "--", "touch", "it-ran")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "it-ran").exists()


def test_a_carbon_file_of_another_time_gives_no_grams_unless_asked_to_pretend(tmp_path: Path) -> None:
    start = datetime(2020, 6, 10, 10, tzinfo=UTC)
    carbon_file(tmp_path, start)
    done = measure(tmp_path, "--out", "a", "--carbon", "carbon.csv", "--", "true")
    assert done.returncode == 0
    fields = report(tmp_path / "a")
    assert fields["carbon_g"] is None
    assert "2020-06-10" in fields["carbon_reason"]
    done = measure(tmp_path, "--out", "b", "--carbon", "carbon.csv", "--carbon-at", "2020-06-10T11:30Z", "--", "true")
    fields = report(tmp_path / "b")
    assert fields["carbon_g"] == pytest.approx(fields["energy_j"] * 360 / 3.6e6, rel=1e-6)
    assert fields["carbon_quality"] == "assumed"


class Running:
    """A measured command that has said that it runs."""

    def __init__(
        self, folder: Path, *arguments: str, command: str = "echo ready; exec sleep 60", **options: Any
    ) -> None:
        self.process = subprocess.Popen(
            [*MEASURE, "--out", str(folder / "run"), *arguments, "--", "sh", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        (self.sampler,) = samplers_of(self.process.pid)

    def end(self) -> str:
        _, stderr = self.process.communicate()
        return stderr


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Running]]:
    started: list[Running] = []
    yield started
    for run in started:
        try:
            os.killpg(run.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            run.process.communicate()


def test_ctrl_c_ends_the_command_and_still_gives_its_footprint(running: list[Running], tmp_path: Path) -> None:
    run = Running(tmp_path)
    running.append(run)
    with Stretch() as before:
        sampled(tmp_path / "run")
    os.killpg(run.process.pid, signal.SIGINT)
    stderr = run.end()
    assert run.process.returncode == 130
    assert "energy" in stderr
    assert "Traceback" not in stderr
    assert gone(run.sampler)
    assert report(tmp_path / "run")["duration_s"] >= before.s


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9])
def test_ctrl_c_at_any_moment_ends_cleanly(tmp_path: Path, after_s: float) -> None:
    process = subprocess.Popen(
        [*MEASURE, "--out", str(tmp_path / "run"), "--", "sleep", "0.4"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # the group exists until its leader is waited for
    _, stderr = process.communicate()
    # Python itself was still starting, or it was interrupted, or done already.
    starting = process.returncode == 1 and "/joulery/" not in stderr
    assert starting or process.returncode in (-signal.SIGINT, 130, 0), stderr
    wait_until(lambda: not any(str(tmp_path).encode() in cmdline for cmdline in cmdlines()), "the end of every process")
    if (tmp_path / "run/manifest.json").exists():
        assert open_run(tmp_path / "run").manifest["kind"] == "measure"
    assert "joulery.app.sampler" not in stderr


def cmdlines() -> list[bytes]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


def test_a_killed_measuring_process_leaves_no_sampler_no_group_and_a_readable_run(
    running: list[Running], tmp_path: Path
) -> None:
    run = Running(tmp_path, "--meter", "fake:80", command=f'echo ready; exec {sys.executable} -c "{BURN.format(30)}"')
    running.append(run)
    wait_until(lambda: recorded_s(tmp_path / "run") > 0.5, "half a second of readings")
    before_s = recorded_s(tmp_path / "run")
    run.process.kill()
    run.process.wait()
    assert gone(run.sampler)
    assert not {group for group in groups() if group.name == f"joulery-{run.process.pid}"}
    assert not open_run(tmp_path / "run").closed
    fields = report(tmp_path / "run")
    assert fields["duration_s"] >= before_s
    assert fields["energy_j"] > 0
    assert any("killed" in note for note in fields["notes"])


def test_a_sampler_that_dies_lowers_the_coverage_and_keeps_the_exit_code(
    running: list[Running], tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    run = Running(tmp_path, command=f"echo ready; until [ -e {lost} ]; do sleep 0.05; done; sleep 0.7; exit 9")
    running.append(run)
    sampled(tmp_path / "run")
    os.kill(run.sampler, signal.SIGKILL)
    lost.touch()
    stderr = run.end()
    assert run.process.returncode == 9
    assert "warning: not all of the run was measured: the sampler was ended by signal 9" in stderr
    fields = report(tmp_path / "run")
    assert 0.0 < fields["coverage_ratio"] < 1.0
    assert fields["energy_j"] > 0


def test_a_full_disk_costs_the_record_and_neither_the_exit_code_nor_the_numbers(tmp_path: Path) -> None:
    script = (
        "import os, resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'joulery', *sys.argv[1:]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "measure", "--out", str(tmp_path / "run"), "--", "sh", "-c", "sleep 1; exit 5"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert open_run(tmp_path / "run").manifest["kind"] == "measure"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_disk_that_fills_up_during_the_run(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        fill = (
            f"import os, time\nstart_s = time.monotonic()\ntime.sleep(0.3)\n"
            f"os.system('cat /dev/zero > {tmp_path}/filler 2>/dev/null')\ntime.sleep(0.5)\n"
            "print(time.monotonic() - start_s, flush=True)\nos._exit(6)\n"
        )
        with Stretch() as around:
            done = subprocess.run(
                [*MEASURE, "--out", str(tmp_path / "run"), "--", sys.executable, "-c", fill],
                capture_output=True,
                text=True,
            )
        assert done.returncode == 6
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        assert "energy" in done.stderr
        (tmp_path / "filler").unlink()
        assert float(done.stdout) <= report(tmp_path / "run")["duration_s"] <= around.s
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_hold_runs_is_replaced_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    done = measure(tmp_path, "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "warning: cannot write runs/" in done.stderr
    assert "the run is kept in /" in done.stderr


def test_a_daemon_left_behind_lives_on_and_causes_no_delay(tmp_path: Path) -> None:
    done = measure(tmp_path, "--out", "run", "--", "sh", "-c", "sleep 3000 >/dev/null 2>&1 & echo $!")
    try:
        assert done.returncode == 0
        assert alive(int(done.stdout)), "the measurement ended before the daemon"
        assert not {group for group in groups() if str(done.stdout).strip() in (group / "cgroup.procs").read_text()}
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    """``joulery measure ... 2>&1 | head -n 1``: the footprint finds no reader any more."""
    line = " ".join([*MEASURE, "--", "sh", "-c", "'echo one; exit 8'"])
    done = subprocess.run(
        ["bash", "-c", f"{line} 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "one\n"
    assert done.returncode == 8
    assert "Traceback" not in done.stderr


WITHOUT_GROUP = """
import sys
from joulery.app.wiring import share
share.make_run_group = lambda pid: None
from joulery.ui.cli import main
sys.exit(main(["measure", *sys.argv[1:]]))
"""


def test_without_a_control_group_orphans_are_adopted_and_counted(tmp_path: Path) -> None:
    """The subshell ends at once; what it started works for 0.4 s and ends before the command does."""
    orphan = f'({sys.executable} -c \'{BURN.format(0.4)}open("done", "w")\' &); until test -e done; do sleep 0.05; done'
    arguments = ["--out", str(tmp_path / "run"), "--meter", "fake:100", "--", "sh", "-c", orphan]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GROUP, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.report is not None
    assert run.series("busy")["run_s"].sum() >= 0.35
    assert run.report["energy_j"] > 0


def test_a_counter_that_wraps_loses_nothing(tmp_path: Path) -> None:
    script = [{"watts": [[0, 100]], "wrap_j": 40, "start_j": 39}]
    (tmp_path / "script.json").write_text(json.dumps(script))
    done = measure(tmp_path, "--out", "run", "--meter", "fake:script.json", "--", "sleep", "1.2")
    assert done.returncode == 0
    fields = report(tmp_path / "run")
    total_j = fields["energy_j"] + fields["other_j"] + fields["other_idle_j"]
    assert total_j == pytest.approx(100 * fields["duration_s"], rel=0.02)
    assert fields["coverage_ratio"] == pytest.approx(1.0, abs=0.01)


def test_a_device_that_falls_silent_is_a_gap_with_a_note(tmp_path: Path) -> None:
    script = [{"watts": [[0, 100]], "device": "gpu:0", "component": "board", "kind": "power", "silent_s": [[1.0, 600]]}]
    (tmp_path / "script.json").write_text(json.dumps(script))
    done = measure(tmp_path, "--out", "run", "--meter", "fake:script.json", "--", "sleep", "1.5")
    assert done.returncode == 0
    fields = report(tmp_path / "run")
    assert 0.0 < fields["coverage_ratio"] < 0.8
    assert fields["energy_j"] == pytest.approx(100 * fields["coverage_ratio"] * fields["duration_s"], rel=0.01)
    assert any("the fake gives nothing" in note for note in fields["notes"])


def test_each_node_of_a_job_leaves_its_run_and_the_first_prints_their_sum(tmp_path: Path) -> None:
    steady = ["--meter", "fake:40", "--idle", "share", "--out", "job"]
    later = subprocess.Popen(
        [*MEASURE, *steady, "--node", "1/2", "--", "sleep", "0.6"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    first = measure(tmp_path, *steady, "--node", "0/2", "--json", "--", "sleep", "0.3")
    _, said = later.communicate()
    assert (first.returncode, later.returncode) == (0, 0), first.stderr + said
    assert "node 1 of a job on 2 nodes: the figures are of this node" in " ".join(said.split())
    job = json.loads(first.stderr.splitlines()[-1])["job"]
    nodes = [report(tmp_path / "job" / f"node-{node}") for node in (0, 1)]
    assert (job["nodes"], job["reported"]) == (2, 2)
    assert job["energy_j"] == pytest.approx(sum(node["energy_j"] for node in nodes), rel=1e-9)
    assert report(tmp_path / "job")["energy_j"] == job["energy_j"]


TASK = """\
import os, pathlib, time
def meet(place):
    pathlib.Path(place + os.environ["SLURM_LOCALID"]).touch()
    while not all(pathlib.Path(place + task).exists() for task in "01"):
        time.sleep(0.01)
meet("begun-")
end = time.process_time() + 0.4
while time.process_time() < end: pass
meet("done-")
raise SystemExit(3)
"""


def test_of_several_tasks_on_a_node_the_first_measures_all_and_the_others_are_only_run(tmp_path: Path) -> None:
    """As srun starts them: side by side, below one parent."""
    (tmp_path / "task.py").write_text(TASK)
    joulery, task = " ".join(JOULERY), f"{sys.executable} task.py"
    script = (
        f"SLURM_LOCALID=1 {joulery} measure -- {task} & other=$!\n"
        f"SLURM_LOCALID=0 {joulery} measure --json --out run -- {task}; code=$?\n"
        "wait $other; exit $((code * 10 + $?))"
    )
    slurm = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, **slurm}, capture_output=True, text=True
    )
    assert done.returncode == 33, done.stderr
    assert (
        done.stderr.count('"energy_j": ') == 2 and not (tmp_path / "runs").exists()
    )  # one report: its total, its part
    assert report(tmp_path / "run")["cpu_s"] is None  # the system's figure is of one task
    ran_s = open_run(tmp_path / "run").series("busy")["run_s"]
    assert float(sum(ran_s)) > 0.7  # both tasks, 0.4 s each


def test_a_command_that_starts_its_program_elsewhere_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "srun").chmod(0o755)
    done = measure(tmp_path, "--", "./srun", "python", "train.py")
    assert done.returncode == 0
    assert "warning: only srun itself is counted" in " ".join(done.stderr.split())
