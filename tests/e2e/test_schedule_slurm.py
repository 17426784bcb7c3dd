"""joulery schedule beside a real Slurm: slurmctld, four slurmd with fake GPUs, jobs that checkpoint (spec check 14)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.clusters.slurm import open_slurm
from joulery.adapters.clusters.slurm_rest import RestPlace
from joulery.domain.cluster import Hold, JobState, Order, Start, Stop
from joulery.runtime.schedule.scheduler import release_all
from tests.e2e.slurm_forty import SHORT, good, play, torch_interpreter
from tests.e2e.slurm_jobs import JOB, Daemon
from tests.slurm_cluster import SUITE, SlurmCluster, missing, slurm_cluster
from tests.slurm_suite import PLUGINS
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
jobs:
  backend: slurm
  quantum: 4 s
  poll: 300 ms
  restart: 1 s
  measure: 1500 ms
  patience: 3 s
  power: {slot: 200 W}
  policy: {theta: 100 %, cap: 4}
  slurm: {progress: progress}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path / "slurm", nodes=4, gpus=2) as made:
        (made.folder / "site.yaml").write_text(SITE)
        (made.folder / "progress").mkdir()
        (made.folder / "job.py").write_text(JOB)
        yield made


def states(cluster: SlurmCluster) -> dict[int, tuple[str, str, str]]:
    """State, reason and operator's comment of every job Slurm knows."""
    jobs = cluster.jobs().items()
    return {number: (job["job_state"], job["state_reason"], job["admin_comment"]) for number, job in jobs}


def held(cluster: SlurmCluster) -> set[int]:
    """The jobs that joulery holds back."""
    return {job for job, (_, _, tag) in states(cluster).items() if tag.startswith("green:held")}


def submit(cluster: SlurmCluster, epochs: int, epoch_s: float = 0.3, power: float = 1.0, *, most: int = 4) -> int:
    script = cluster.folder / f"job-{epochs}-{epoch_s}-{power}.sh"
    script.write_text(f"#!/bin/bash\nexec {sys.executable} job.py {epochs} {epoch_s} {power}\n")
    return int(cluster.submit(script, "--gres=gpu:1", "--ntasks=1", f"--comment=joulery:min=1,max={most}"))


@pytest.mark.slow
def test_grow_shrink_preempt_crash_and_restart_lose_no_job_and_run_none_twice(tmp_path: Path) -> None:
    """Twelve jobs; ``python -m tests.e2e.slurm_forty`` plays it with forty. Real trainings where there is torch."""
    with slurm_cluster(tmp_path / "slurm", nodes=4, gpus=2) as made:
        result = play(made, SHORT, torch_interpreter())

    assert good(result), result
    assert result["grown"] and result["shrunk"] and result["preempted"], result
    restarts = result["restarts_of_trainings"]
    assert isinstance(restarts, list) and all(restarts), result


def test_once_prints_its_decisions_with_reasons_and_to_advise_changes_nothing(cluster: SlurmCluster) -> None:
    first = [submit(cluster, 1_000_000, most=1) for _ in range(8)]
    wait_until(lambda: all(states(cluster)[job][0] == "RUNNING" for job in first), "a full cluster")
    waiting = [submit(cluster, 1_000_000, most=1) for _ in range(2)]
    before = states(cluster)

    def once(mode: str) -> list[dict[str, Any]]:
        words = ("schedule", "site.yaml", "--backend", "slurm", "--once", "--json", "--mode", mode)
        done = subprocess.run(
            [sys.executable, "-m", "joulery", *words],
            env=cluster.env, cwd=cluster.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    entries = once("advise")
    assert [entry["kind"] for entry in entries].count("round") == 1
    actions = [entry for entry in entries if entry["kind"] == "action"]
    assert [entry["jobs"] for entry in actions if entry["do"] == "order"] == [waiting]
    assert all(entry["reason"] and entry["outcome"] == "advised" for entry in actions)
    assert {job: tag for job, (_, _, tag) in states(cluster).items()} == {
        job: tag for job, (_, _, tag) in before.items()
    }

    applied = [entry for entry in once("act") if entry["kind"] == "action" and entry["outcome"] == "applied"]
    assert "order" in {entry["do"] for entry in applied} and all(entry["reason"] for entry in applied)


def test_when_the_scheduler_dies_for_good_the_watchdog_releases_its_holds(cluster: SlurmCluster) -> None:
    jobs = [submit(cluster, 1_000_000, most=1) for _ in range(14)]
    daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
    try:
        daemon.until(lambda entry: entry.get("do") in ("hold", "stop") and entry["outcome"] == "applied")
        other = subprocess.run(
            [sys.executable, "-m", "joulery", "schedule", "site.yaml"],
            env=cluster.env, cwd=cluster.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert other.returncode == 2
        assert f"is scheduled by process {daemon.process.pid} already" in other.stderr
        assert "Traceback" not in other.stderr
        wait_until(lambda: held(cluster), "jobs that are held")
        wait_until(
            lambda: any(
                "rank" in tag and "of its pool before it" in tag for _, _, tag in states(cluster).values() if tag
            ),
            "why a held job waits, in its comment",
        )
    finally:
        daemon.kill()
    tagged = held(cluster)
    assert tagged
    wait_until(lambda: not any(tag for _, _, tag in states(cluster).values()), "the release of held jobs")

    assert not any("Held" in reason for _, reason, _ in states(cluster).values())
    log = (cluster.folder / "joulery-jobs" / "watchdog.log").read_text()
    assert f"released {len(tagged)} held jobs" in log
    assert len(jobs) == len(states(cluster))


def test_a_job_with_a_deadline_waits_and_starts_when_the_scheduler_ends(cluster: SlurmCluster) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = [(now + timedelta(hours=hour)).isoformat() for hour in range(-48, 48)]
    rows = [f"{hour},{20 if at >= 51 else 600}" for at, hour in enumerate(hours)]
    (cluster.folder / "grid.csv").write_text("\n".join(("timestamp_utc,ci_direct", *rows)) + "\n")
    grid = "carbon: {kind: file, path: grid.csv, forecast: grid.csv}"
    site = "\n".join(grid if line.startswith("carbon:") else line for line in SITE.splitlines())
    (cluster.folder / "site.yaml").write_text(site + "\n")
    script = cluster.folder / "sleep.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
    try:
        daemon.until(lambda entry: entry["kind"] == "round")
        by = (now + timedelta(hours=20)).isoformat()
        one_gpu = ("--gres=gpu:1", "--ntasks=1", "--time=60", "--hold")
        patient = int(cluster.submit(script, *one_gpu, f"--comment=joulery:by={by}"))
        urgent = int(cluster.submit(script, *one_gpu, f"--comment=joulery:by={(now + timedelta(hours=2)).isoformat()}"))
        for job in (patient, urgent):  # as job_submit.lua submits them: no job starts before the scheduler sees it
            cluster.run("scontrol", "update", f"JobId={job}", "AdminComment=green:held")
        daemon.until(lambda entry: entry.get("do") == "start" and entry["job"] == urgent)
        text = daemon.until(lambda entry: entry["kind"] == "round" and "1 wait for a cleaner hour" in entry["text"])
        assert "run" in text["text"]
        wait_until(lambda: states(cluster)[urgent][0] == "RUNNING", "the start of the job that cannot wait")
        assert states(cluster)[patient][0] == "PENDING" and states(cluster)[patient][2].startswith("green:held")
    finally:
        assert daemon.stop() == 0, daemon.errors
    wait_until(lambda: states(cluster)[patient][0] == "RUNNING", "the start of the released job")


def test_what_is_not_ours_is_left_alone_and_what_is_down_is_not_counted(cluster: SlurmCluster) -> None:
    script = cluster.folder / "sleep.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    owner_held = int(cluster.submit(script, "--gres=gpu:1", "--hold"))
    later = int(cluster.submit(script, "--gres=gpu:1", "--begin=now+1hour"))
    impossible = int(cluster.submit(script, "--gres=gpu:2", "--nodes=4", "--ntasks=8", "--comment=joulery:min=8,max=8"))
    stubborn = cluster.folder / "stubborn.sh"
    stubborn.write_text("#!/bin/bash\ntrap '' TERM\nwhile true; do sleep 0.1; done\n")
    ignoring = int(cluster.submit(stubborn, "--gres=gpu:1", "--comment=joulery:min=1,max=1"))
    cluster.run("scontrol", "update", "NodeName=g4", "State=DOWN", "Reason=test")
    daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
    try:
        daemon.until(lambda entry: entry["kind"] == "round")
        daemon.until(lambda entry: entry["kind"] == "round" and entry is not daemon.entries[0])
    finally:
        assert daemon.stop() == 0, daemon.errors
    touched = {entry["job"] for entry in daemon.entries if entry["kind"] == "action" and "job" in entry}

    assert not touched & {later, owner_held}
    assert states(cluster)[owner_held][1] == "JobHeldUser"
    assert states(cluster)[impossible][0] == "PENDING"
    assert states(cluster)[ignoring][0] in ("RUNNING", "PENDING")


def test_arrays_srun_and_heterogeneous_jobs_take_their_turn(tmp_path: Path) -> None:
    """None of them overtakes a job that is held; every task runs once; components start together.

    ``srun`` comes while every GPU is busy. A job that comes while one is free may start before joulery first sees it:
    Slurm starts it by itself at its submission, unless job_submit.lua holds it.
    """
    with slurm_cluster(tmp_path / "slurm", nodes=2, gpus=2) as made:
        (made.folder / "site.yaml").write_text(SITE)
        (made.folder / "progress").mkdir()
        script = made.folder / "note.sh"
        script.write_text("#!/bin/bash\necho ${SLURM_ARRAY_TASK_ID:-0} >> ran\nsleep 2\n")
        first = [int(made.submit(script, "--gres=gpu:1", "--ntasks=1")) for _ in range(4)]
        daemon = Daemon(made.folder / "site.yaml", made.env)
        try:
            daemon.until(lambda entry: entry["kind"] == "round")
            wait_until(lambda: not made.run("squeue", "-h").strip(), "the end of the first jobs")
            long = made.folder / "long.sh"
            long.write_text(script.read_text().replace("sleep 2", "sleep 8"))
            early = [int(made.submit(long, "--gres=gpu:1", "--ntasks=1", "--no-requeue")) for _ in range(4)]
            array = int(made.submit(script, "--gres=gpu:1", "--array=1-6"))
            components = ("--gres=gpu:1", "--nodes=1", ":", "--gres=gpu:2", "--nodes=1")
            het = int(made.run("sbatch", "--parsable", "--requeue", f"--chdir={made.folder}", *components, str(script)))
            daemon.until(lambda entry: entry.get("do") == "split")
            wait_until(lambda: len(made.run("squeue", "-h", "--states=running").split("\n")) > 4, "busy GPUs")
            with (made.folder / "srun.out").open("wb") as out:
                waits = subprocess.Popen(("srun", "--gres=gpu:1", "sleep", "1"), env=made.env, stdout=out, stderr=out)
            wait_until(lambda: not made.run("squeue", "-h").strip(), "the end of every job")
            assert waits.wait(30) == 0, (made.folder / "srun.out").read_text()
        finally:
            assert daemon.stop() == 0, daemon.errors
        jobs = list(made.jobs().values())
        begun = {job["job_id"]: job["start_time"] for job in jobs}
        ran = sorted(map(int, (made.folder / "ran").read_text().split()))
        (interactive,) = [job["job_id"] for job in jobs if not job["batch_flag"]]

        assert ran == [0] * 9 + [1, 2, 3, 4, 5, 6], "every script and every task ran once"
        assert {job["job_state"] for job in jobs} == {"COMPLETED"}
        assert begun[het] == begun[het + 1]
        assert interactive in {entry["job"] for entry in daemon.actions("start")}, "joulery started it, in its turn"
        assert min(begun[job] for job in early) >= min(begun[job] for job in first)
        tasks = [job["start_time"] for job in jobs if job["array_job_id"] == array]
        overtaken = [start_s for start_s in tasks if start_s > begun[interactive]]
        assert len(overtaken) <= 1, "every task but the one that is not separated yet goes before srun"
        assert not [job["job_id"] for job in jobs if job["priority"] == 0], "none is left held"
        assert {job["job_id"] for job in jobs if job["array_job_id"] == array} >= {array}


def test_no_job_stops_for_one_that_slurm_would_not_start(tmp_path: Path) -> None:
    """The license is taken by a job that may not be stopped: no GPU is freed for the others that want it."""
    lines = "Licenses=tool:1\nPartitionName=short Nodes=g[1-2] MaxTime=5 State=UP\n"
    with slurm_cluster(tmp_path / "slurm", nodes=2, gpus=2, conf_lines=lines) as made:
        (made.folder / "site.yaml").write_text(SITE.replace("quantum: 4 s", "quantum: 2 s"))
        (made.folder / "progress").mkdir()
        (made.folder / "job.py").write_text(JOB)
        script = made.folder / "sleep.sh"
        script.write_text("#!/bin/bash\nsleep 600\n")
        fixed = ("--gres=gpu:1", "--ntasks=1", "--comment=joulery:min=1,max=1")
        holder = int(made.submit(script, "--licenses=tool:1", "--no-requeue", *fixed))
        plain = [submit(made, 4000, 0.05, most=1) for _ in range(3)]
        daemon = Daemon(made.folder / "site.yaml", made.env)
        try:
            daemon.until(
                lambda entry: entry["kind"] == "round" and set(plain) <= set(entry.get("view", {}).get("job", ()))
            )
            licensed = [int(made.submit(script, "--licenses=tool:1", *fixed)) for _ in range(2)]
            late = int(made.submit(script, "--partition=short", "--time=60", *fixed))
            at = len(daemon.entries)
            daemon.until(lambda entry: [e["kind"] for e in daemon.entries[at:]].count("round") > 8)
            running = {job for job, (state, _, _) in states(made).items() if state == "RUNNING"}
        finally:
            assert daemon.stop() == 0, daemon.errors
        reasons = [entry["reason"] for entry in daemon.actions("stop") if entry["outcome"] == "applied"]
        successors = {int(reason.rpartition("job ")[2]) for reason in reasons if "job " in reason}

        assert not successors & {late, *licensed}, reasons
        assert holder in running and not running & {late, *licensed}
        assert len(running) >= 3, "at most one job is between stop and start"


def test_an_order_reaches_slurm_the_last_of_it_in_one_call_without_jobs_that_ended(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ("sbatch", "--parsable", "--begin=now+1hour", "--gres=gpu:1", "--wrap", "true")
    jobs = [int(cluster.run(*later)) for _ in range(19)]
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    order = jobs[::-1]
    said = open_slurm().apply(Order((*order[:17], 99_999, *order[17:])))

    priorities = {number: job["priority"] for number, job in cluster.jobs().items()}
    ranks = [priorities[job] for job in order]
    assert len(set(ranks[:16])) == 16 and len(set(ranks[16:])) == 1, ranks
    assert ranks == sorted(ranks, reverse=True)
    assert said == "19 ranked; refused: Invalid job id specified for job 99999"


def test_a_job_that_ignores_sigterm_is_killed_at_killwait_and_started_again(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = cluster.folder / "stubborn.sh"
    stubborn.write_text("#!/bin/bash\ntrap '' TERM\necho begun $SLURM_RESTART_COUNT\nwhile true; do sleep 0.1; done\n")
    job = int(cluster.submit(stubborn, "--gres=gpu:1", "--ntasks=1", "--comment=joulery:min=1,max=2"))
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    backend = open_slurm()

    def until(state: JobState) -> None:
        wait_until(lambda: backend.snapshot().jobs[0].state is state, f"a job that is {state}")

    output = cluster.folder / f"slurm-{job}.out"
    until(JobState.RUNNING)
    wait_until(lambda: output.exists() and "begun" in output.read_text(), "the job's first line")
    backend.apply(Stop(job))
    assert backend.snapshot().jobs[0].state is not JobState.WAITING, "it has its KillWait"
    until(JobState.WAITING)
    assert backend.snapshot().jobs[0].held_by_us
    backend.apply(Start(job, 2))
    until(JobState.RUNNING)
    (seen,) = backend.snapshot().jobs
    assert (seen.id, seen.slots, seen.restarts, seen.held_by_us) == (job, 2, 1, False)
    backend.apply(Hold(job))
    assert backend.snapshot().jobs[0].held_by_us, "Slurm holds what runs"
    assert release_all(backend) == [job]
    backend.apply(Stop(job))
    assert release_all(backend) == [job], "released while it is being stopped"
    # It waits until its credential has expired, then it runs again: a slow look sees only that.
    wait_until(lambda: backend.snapshot().jobs[0].restarts == 2, "the job's second restart")
    _, reason, mark = states(cluster)[job]
    assert not reason.startswith("JobHeld") and mark == ""


def test_a_job_that_slurm_does_not_resize_goes_on_as_another(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    script = cluster.folder / "per-task.sh"
    script.write_text("#!/bin/bash\necho family ${JOULERY_JOB:-$SLURM_JOB_ID} on $SLURM_GPUS_ON_NODE\nsleep 600\n")
    job = int(cluster.submit(script, "--ntasks=1", "--gpus-per-task=1", "--hold", "--comment=joulery:min=1,max=2"))
    backend = open_slurm(resubmit=True)
    assert backend.apply(Start(job, 2)).startswith(f"as job {job + 1}, because")

    def runs() -> bool:
        return {seen.id: seen.state for seen in backend.snapshot().jobs}.get(job + 1) is JobState.RUNNING

    wait_until(runs, "the job that follows")
    new = next(seen for seen in backend.snapshot().jobs if seen.id == job + 1)
    assert (new.slots, new.follows) == (2, job) and states(cluster)[job][0] == "CANCELLED"
    output = cluster.folder / f"slurm-{job}.out"
    wait_until(lambda: output.exists() and f"family {job} on 2" in output.read_text(), "output in the same file")


LUA = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "job_submit.lua"


def test_job_submit_lua_says_what_users_forget_and_refuses_what_cannot_work(tmp_path: Path) -> None:
    text = LUA.read_text().replace("MOST_GPUS = 0 ", "MOST_GPUS = 4 ").replace("HOLD = false", "HOLD = true")
    assert text != LUA.read_text()
    with slurm_cluster(tmp_path / "slurm", nodes=2, gpus=2, submit_lua=text) as made:
        script = made.folder / "sleep.sh"
        script.write_text("#!/bin/bash\nsleep 600\n")

        def submitted(*options: str) -> dict[str, Any]:
            done = made.run("sbatch", "--parsable", f"--chdir={made.folder}", *options, str(script))
            return made.jobs()[int(done.split("\n")[-2])]

        plain = submitted("--gres=gpu:2")
        assert (plain["comment"], plain["requeue"]) == ("joulery:min=2,max=2", True)
        assert (plain["admin_comment"], plain["priority"], plain["job_state"]) == ("green:held", 0, "PENDING")
        kept = submitted("--gres=gpu:1", "--comment=mine joulery:min=1,max=4")
        assert kept["comment"] == "mine joulery:min=1,max=4"
        added = submitted("--gpus=2", "--comment=mine")
        assert added["comment"] == "mine joulery:min=2,max=2"
        fixed = submitted("--gres=gpu:1", "--no-requeue")
        assert fixed["requeue"] is False and fixed["admin_comment"] == ""
        alone = submitted("--ntasks=1")
        assert alone["comment"] == "" and alone["admin_comment"] == ""
        for options, says in (
            (("--gpus=9",), "asks for 9 GPUs, the cluster has 4"),
            (("--gres=gpu:2", "--comment=joulery:min=1,max=1"), "does not hold the 2 GPUs"),
            (("--gres=gpu:1", "--comment=joulery:max=x"), None),
        ):
            refused = subprocess.run(
                ["sbatch", *options, str(script)], env=made.env, capture_output=True, text=True, check=False
            )
            assert (refused.returncode != 0) == (says is not None), refused.stderr
            assert says is None or says in refused.stderr


@pytest.mark.skipif(
    shutil.which("slurmrestd") is None, reason="slurmrestd is not installed: apt-get install slurmrestd"
)
def test_a_real_slurmrestd_reports_what_the_commands_report(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    jobs = [submit(cluster, 400, 0.05, most=1) for _ in range(10)]
    with slurmrestd(cluster) as place:
        read, plain = open_slurm(rest=RestPlace(socket=place)), open_slurm()
        try:
            wait_until(lambda: repr(read.snapshot()) == repr(plain.snapshot()), "the same snapshot")
            seen = read.snapshot()
            assert seen.slots == 8 and [job.id for job in seen.jobs] == jobs
            waiting = [job.id for job in seen.jobs if job.state is JobState.WAITING]
            read.apply(Hold(waiting[0]))
            assert [job.id for job in read.snapshot().jobs if job.held_by_us] == [waiting[0]]
        finally:
            read.close()
            plain.close()


@contextmanager
def slurmrestd(cluster: SlurmCluster) -> Iterator[Path]:
    """slurmrestd as the user slurm (it refuses to be root), on a socket in a folder that this user may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        conf = folder / "slurm.conf"
        conf.write_text(Path(cluster.env["SLURM_CONF"]).read_text())
        newer = ((SUITE or Path("/")) / PLUGINS / "openapi_slurmctld.so").exists()
        interface = "slurmctld" if newer else "openapi/v0.0.38"
        command = ("slurmrestd", "-f", str(conf), "-a", "rest_auth/local", "-s", interface, f"unix:{folder}/rest")
        as_slurm = ("setpriv", "--reuid=slurm", "--regid=slurm", "--clear-groups", *command)
        with (folder / "log").open("wb") as log:
            env = {**cluster.env, "SLURM_CONF": str(conf)}
            service = subprocess.Popen(as_slurm, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until(lambda: (folder / "rest").exists() or service.poll() is not None, "the socket of slurmrestd")
            assert service.poll() is None, (folder / "log").read_text()
            yield folder / "rest"
        finally:
            service.terminate()
            service.wait(30)
