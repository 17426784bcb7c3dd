"""joulery report --from-sacct, and the trace that simulate reads."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from joulery.app.past_jobs import BY as PAST_BY
from joulery.policies.clocks.power_limit import LIMIT_RATIOS
from joulery.store.jobs import JobLimitBook
from joulery.ui.cli import main
from joulery.ui.cli.report_sacct import BY

HEADER = "JobID|JobName|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|AllocTRES\n"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.txt"
    rows = [
        f"{n}|train|{'ada' if n % 2 else 'bob'}|lab|{'gpu' if n < 3 else 'big'}|COMPLETED|2026-10-0{n}T00:00:00|"
        f"2026-10-0{n}T01:00:00|2026-10-0{n}T02:00:00|3600|cpu=4,gres/gpu={n},node=1\n"
        for n in (1, 2, 3)
    ]
    file.write_text(HEADER + "".join(rows) + "4.batch|x\n")
    return file


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["report", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_joules_and_grams_by_owner(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--from-sacct", str(jobs), "--gpu-power", "250 W", "--carbon", "200 g/kWh", "--sacct-timezone", "UTC")
    code, out, _ = run(capsys, *flags, "--json")
    assert code == 0
    document = json.loads(out)

    assert {row["key"]: row["energy_j"] for row in document["rows"]} == {"ada": 3_600_000.0, "bob": 1_800_000.0}
    assert document["total"]["carbon_g"] == pytest.approx(1.5 * 200)
    assert document["total"]["quality"] == "modelled"
    assert document["left_out"] == {"a step of a job": 1}
    code, out, _ = run(capsys, *flags, "--by", "partition")
    assert code == 0
    for words in ("partition", "big", "0.75 kWh", "0.30 kg", "modelled: elapsed time x 250 W a GPU", "left out: 1 x"):
        assert words in out


def test_the_jobs_may_come_through_a_pipe(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sacct … | joulery report --from-sacct -"""
    flags = ("--gpu-power", "250 W", "--sacct-timezone", "UTC", "--format", "csv")
    _, expected, _ = run(capsys, "--from-sacct", str(jobs), *flags)
    kept = os.dup(0)
    try:
        os.dup2(os.open(jobs, os.O_RDONLY), 0)
        assert run(capsys, "--from-sacct", "-", *flags) == (0, expected, "")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_little_is_not_shown_as_nothing(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.write_text(jobs.read_text().replace("|3600|", "|36|"))
    flags = ("--gpu-power", "250 W", "--carbon", "200 g/kWh", "--sacct-timezone", "UTC")
    _, out, _ = run(capsys, "--from-sacct", str(jobs), *flags, "--by", "partition")
    assert "0.0075 kWh" in out and "0.0015 kg" in out
    assert "0.00 k" not in out


def test_without_an_intensity_there_are_no_grams(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, f"--from-sacct={jobs}", "--gpu-power", "250 W", "--json")
    document = json.loads(out)

    assert document["total"]["carbon_g"] is None
    assert any("no grams" in note for note in document["notes"])


def test_the_trace_is_what_simulate_reads(jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    code, _, err = run(capsys, "--from-sacct", str(jobs), "--gpu-power", "250 W", "--trace", str(trace))

    assert code == 0
    assert f"3 jobs written to {trace}" in err
    rows = list(csv.DictReader(trace.read_text().splitlines()))
    assert [row["num_gpus"] for row in rows] == ["1", "2", "3"]
    assert [float(row["submit_s"]) for row in rows] == [0.0, 82800.0, 169200.0], "from the first start"
    assert [float(row["duration_s"]) for row in rows] == [3600.0, 7200.0, 10800.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "3 jobs held GPUs and were not measured"),
        (("--gpu-power", "250"), "needs a unit"),
        (("--gpu-power", "250 W", "--since", "1 d"), "no job ran since then; the newest ended on 2026-10-03"),
        (("--gpu-power", "250 W", "--sacct-timezone", "Mars/Olympus"), "is not a time zone"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    jobs: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.9e9)
    code, out, err = run(capsys, "--from-sacct", str(jobs), *words)

    assert code == 2
    assert said in err
    assert out == ""


def test_reports_of_runs_are_as_they_were(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, str(tmp_path))
    assert (code, "holds no run" in err) == (2, True)


def test_its_help_is_its_own() -> None:
    from joulery.ui.cli import cli

    assert "--gpu-power" in CliRunner().invoke(cli, ["report", "--from-sacct", "x", "--help"]).output
    assert "--gpu-power" not in CliRunner().invoke(cli, ["report", "--help"]).output


def test_what_another_scheduler_would_have_saved(
    jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--from-sacct", str(jobs), "--gpu-power", "250 W", "--carbon", "200 g/kWh", "--sacct-timezone", "UTC")
    code, out, err = run(capsys, *flags, "--what-if", "green-lean", "--draws", "3", "--json")
    assert code == 0, err
    answer = json.loads(out)["what_if"]
    assert (answer["policy"], answer["against"], answer["quality"]) == ("green-lean", "fifo", "simulated")
    assert (answer["jobs"], answer["gpus"], answer["draws"]) == (3, 4, 3)
    change, saved = answer["job_carbon_change_ratio"], answer["job_carbon_saved_kg"]
    assert saved["low"] == pytest.approx(-change["high"] * 0.3) and saved["low"] <= saved["mean"] <= saved["high"]
    code, out, _ = run(capsys, *flags, "--what-if", "green-lean", "--draws", "3", "--gpus", "8")
    assert code == 0 and "simulated on 8 GPUs" in out and "cluster CO2e" in out and "of the 0.3 kg above" in out
    assert "Power of jobs: all assumed; their scaling: all assumed; nodes of 2 GPUs." in out
    measured = jobs.read_text().splitlines()
    measured = [f"{measured[0]}|ConsumedEnergyRaw", *(f"{line}|{9 * 10**6}" for line in measured[1:])]
    (tmp_path / "measured.txt").write_text("\n".join(measured) + "\n")
    known = ("--from-sacct", str(tmp_path / "measured.txt"), *flags[2:], "--what-if", "lean", "--samples", "2")
    code, out, err = run(capsys, *known, "--node-gpus", "4", "--json")
    assert code == 0, err
    answer = json.loads(out)["what_if"]
    assert (answer["node_gpus"], answer["speedup_of_jobs"]) == (4, "assumed")
    assert answer["placed"] and 0.0 <= answer["fragmented_ratio"]["mean"] < 1.0
    assert answer["power_of_jobs"]["measured"] == 3 and answer["power_of_jobs"]["assumed"] == 0
    code, _, err = run(capsys, *known, "--jobs", str(tmp_path / "gone"))
    assert code == 2 and "no scheduler wrote to this folder" in err
    for more, says in (
        (("--what-if", "greener"), "no such training policy"),
        (("--what-if", "green", "--gpus", "2"), "a job held 3 GPUs"),
    ):
        code, _, err = run(capsys, *flags, *more)
        assert code == 2 and says in err
    code, _, err = run(capsys, *flags[:4], "--what-if", "green")
    assert code == 2 and "grams need an intensity" in err


def test_clusters_are_kept_apart_in_statements_and_are_not_simulated_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "both.txt"
    row = "{}|1|train|ada|lab|gpu|COMPLETED|2026-10-01T00:00:00|2026-10-01T01:00:00|2026-10-01T02:00:00|3600|gres/gpu=1"
    file.write_text("Cluster|" + HEADER + row.format("east") + "\n" + row.format("west") + "\n")
    flags = ("--from-sacct", str(file), "--gpu-power", "250 W", "--carbon", "200 g/kWh", "--sacct-timezone", "UTC")
    _, out, _ = run(capsys, *flags, "--by", "cluster,owner", "--json")
    document = json.loads(out)
    assert [(row["cluster"], row["jobs"], row["gpu_s"]) for row in document["rows"]] == [
        ("east", 1, 3600.0), ("west", 1, 3600.0)
    ]  # fmt: skip
    assert document["total"]["jobs"] == 2 and document["left_out"] == {}
    code, _, err = run(capsys, *flags, "--what-if", "green")
    assert code == 2 and "2 clusters: east, west" in err and "sacct -M" in err


def test_a_job_that_ran_twice_counts_once_and_no_owner_is_left_out_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "jobs.txt"
    row = (
        "{}|x|user{}|lab|gpu|COMPLETED|2026-10-01T00:00:00|2026-10-01T{:02}:00:00|2026-10-01T23:00:00|3600|gres/gpu=1\n"
    )
    file.write_text(HEADER + "".join(row.format(n, n, hour) for n in range(1, 46) for hour in (1, 3)))
    flags = ("--from-sacct", str(file), "--gpu-power", "250 W", "--sacct-timezone", "UTC")
    _, out, _ = run(capsys, *flags, "--json")
    document = json.loads(out)
    assert {row["jobs"] for row in document["rows"]} == {1} and document["total"]["jobs"] == 45
    _, out, _ = run(capsys, *flags)
    assert len([line for line in out.splitlines() if line.startswith("user")]) == 40
    assert "and 5 more: --format csv has them" in out


def test_statements_by_month_and_account(jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = "9|long|eve|vis|gpu|COMPLETED|2026-10-30T00:00:00|2026-10-31T12:00:00|2026-11-01T12:00:00|86400|gres/gpu=4\n"
    jobs.write_text(jobs.read_text() + row)
    flags = ("--from-sacct", str(jobs), "--gpu-power", "250 W", "--carbon", "200 g/kWh", "--sacct-timezone", "UTC")
    _, out, _ = run(capsys, *flags, "--by", "month,account,owner", "--json")
    document = json.loads(out)
    rows = {(row["month"], row["account"], row["owner"]): row["energy_j"] for row in document["rows"]}
    assert rows["2026-10", "vis", "eve"] == rows["2026-11", "vis", "eve"] == 4 * 250 * 43_200
    assert list(rows)[-1] == ("2026-11", "vis", "eve"), "months in order"
    assert math.fsum(rows.values()) == pytest.approx(document["total"]["energy_j"], rel=1e-12)
    assert document["total"]["jobs"] == 4

    _, out, _ = run(capsys, *flags, "--by", "account", "--month", "2026-11", "--format", "csv")
    assert list(csv.DictReader(out.splitlines())) == [
        {
            "account": "vis",
            "jobs": "1",
            "gpu_h": "48.0",
            "energy_kwh": "12.0",
            "carbon_kg": "2.4",
            "quality": "modelled",
        }
    ]
    code, _, err = run(capsys, *flags, "--month", "2026-11", "--by", "account", "--html", str(tmp_path / "s.html"))
    assert code == 0 and "s.html" in err and "2026-11" in (tmp_path / "s.html").read_text()
    code, _, err = run(capsys, *flags, "--month", "2027-01")
    assert code == 2 and "no job ran in 2027-01" in err and "2026-10 to 2026-11" in err
    for words in (("--by", "month,colour"), ("--by", "month,month"), ("--month", "2026-13"), ("--by", "")):
        assert run(capsys, *flags, *words)[0] == 2
    code, _, err = run(capsys, *flags, "--what-if", "lean", "--format", "csv")
    assert code == 2 and "--what-if goes with text and json" in err
    assert BY == PAST_BY


def test_jobs_stay_on_the_type_of_gpu_that_they_ran_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "jobs.txt"
    rows = [
        f"{n}|train|ada|COMPLETED|2026-01-05T0{n}:00:00|2026-01-05T0{n}:00:00|3600|{9 * 10**5 if n < 3 else ''}|"
        f"cpu=4,gres/gpu={n},gres/gpu:{kind}={n}"
        for n, kind in ((1, "a100"), (2, "v100"), (3, "a100"))
    ]
    log.write_text(
        "\n".join(("JobID|JobName|User|State|Submit|Start|ElapsedRaw|ConsumedEnergyRaw|AllocTRES", *rows)) + "\n"
    )
    flags = ("--from-sacct", str(log), "--gpu-power", "250 W", "--carbon", "200 g/kWh", "--sacct-timezone", "UTC",
             "--what-if", "lean", "--samples", "2")  # fmt: skip
    code, out, err = run(capsys, *flags, "--nodes", "a100:1x4,v100:2x2", "--json", "--trace", str(tmp_path / "t.csv"))
    assert code == 0, err
    answer = json.loads(out)["what_if"]
    assert (answer["gpus"], answer["placed"], answer["node_gpus"]) == (8, True, None)
    assert answer["groups"] == [{"type": "a100", "nodes": 1, "gpus": 4}, {"type": "v100", "nodes": 2, "gpus": 2}]
    assert set(answer["energy_by_type_change_ratio"]) == {"a100", "v100"}
    assert answer["power_of_jobs"] == {"measured": 2, "learned": 1, "assumed": 0}, "from the same type alone"
    assert (tmp_path / "t.csv").read_text().splitlines()[1].endswith(",1,a100,250")
    code, out, _ = run(capsys, *flags, "--nodes", "a100:1x4,v100:2x2")
    assert "1 nodes of 4 a100 and 2 nodes of 2 v100" in out and "Jobs stay on the type they ran on" in out
    for nodes, more, says in (
        ("a100:1x4", (), "job 2 ran on GPUs of type v100, --nodes names a100"),
        ("a100:1x2,v100:1x2", (), "asks for 3 GPUs"),
        ("a100:4", (), "is not a group of nodes"),
        ("a100:0x4", (), "is not a group of nodes"),
        ("", (), "is not a group of nodes"),
        ("a100:1x4,v100:2x2", ("--gpus", "8"), "--nodes states the number of GPUs"),
    ):
        code, _, err = run(capsys, *flags, "--nodes", nodes, *more)
        assert code == 2 and says in err, err


def learnable(path: Path) -> Path:
    """Three kinds of jobs on two types and 1, 2 and 4 GPUs: 1.8 and 3 times as fast, twice on an a100."""
    rows, start_s = [], 1_790_000_000
    for again in range(4):
        for kind, work_s in (("bert", 20_000), ("vit", 9_000), ("gpt", 30_000)):
            for gpu_type, speed in (("v100", 1.0), ("a100", 2.0)):
                for gpus, ups in ((1, 1.0), (2, 1.8), (4, 3.0)):
                    elapsed_s = round(work_s / speed / ups * (1.0 + 0.01 * ((7 * again + gpus) % 5)))
                    watts = 300 if gpu_type == "v100" else 450
                    begin, end = (time.strftime("%FT%T", time.gmtime(t)) for t in (start_s, start_s + elapsed_s))
                    rows.append(
                        f"{len(rows) + 1}|{kind}|ada|lab|gpu|COMPLETED|{begin}|{begin}|{end}|{elapsed_s}|"
                        f"cpu=4,gres/gpu:{gpu_type}={gpus},gres/gpu={gpus}|cpu=4,gres/gpu={gpus}|"
                        f"{watts * gpus * elapsed_s}\n"
                    )
                    start_s += 1800
        start_s += 40_000
    path.write_text(HEADER.rstrip() + "|ReqTRES|ConsumedEnergyRaw\n" + "".join(rows))
    return path


def test_speed_by_number_and_type_of_gpus_is_learned_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--from-sacct", str(learnable(tmp_path / "jobs.txt")), "--sacct-timezone", "UTC", "--carbon", "200 g/kWh")
    more = ("--what-if", "lean", "--samples", "2", "--nodes", "v100:2x4,a100:1x4")
    code, out, err = run(capsys, *flags, *more, "--json", "--trace", str(tmp_path / "t.csv"))
    assert code == 0, err
    found = json.loads(out)["what_if"]
    assert found["scaling_of_jobs"] == {"measured": 0, "learned": 72, "assumed": 0, "kinds": 3}
    assert found["jobs_on_any_type"] == 72
    slow = next(name for name, known in found["gpu_types"].items() if known["ratio"] == 1.0)
    (fast,) = found["gpu_types"].keys() - {slow}
    speed, watts = found["gpu_types"][fast], found["gpu_types_power"][fast]
    assert speed["ratio"] == pytest.approx(2.0 if fast == "a100" else 0.5, rel=0.01)
    assert speed["low"] <= speed["ratio"] <= speed["high"] and (speed["kinds"], speed["jobs"]) == (3, 72)
    assert watts["ratio"] == pytest.approx((450 - 120) / (300 - 120) if fast == "a100" else 180 / 330)
    tests = found["backtest"]
    assert tests["power"] == {"inside": 18, "checked": 18} and tests["run_time"]["checked"] == 18
    code, out, err = run(capsys, *flags, *more)
    for words in (
        "their scaling: 0 measured, 72 learned from the same owner and name, 0 assumed", f"Speed of {fast}: ",
        f"x that of {slow}", "learned from 3 kinds, 72 jobs", "Back-test: run time of 1",
        "power of 18 of 18 ended jobs",
        "72 jobs that named no type run on any of known speed",
    ):  # fmt: skip
        assert words in out
    header, first = (tmp_path / "t.csv").read_text().splitlines()[:2]
    assert header == "job_id,submit_s,duration_s,num_gpus,gpu_type,speedup,gpu_w"
    assert first.split(",")[4] == "v100" and first.split(",")[5].startswith("1:1 2:1.7")
    with (tmp_path / "t.csv").open() as file:
        times = {row["num_gpus"]: float(row["duration_s"]) for row in csv.DictReader(file) if int(row["job_id"]) < 4}
    assert times == pytest.approx(dict.fromkeys("124", times["1"]), rel=0.06), "equal work, whatever its GPUs"


def test_progress_that_jobs_reported_goes_before_what_equal_names_suggest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one type: a scheduler's log names none."""
    lines = learnable(tmp_path / "jobs.txt").read_text().splitlines(keepends=True)
    (tmp_path / "jobs.txt").write_text("".join(line for line in lines if "a100" not in line))
    log = tmp_path / "state/runs/r1/log.jsonl"
    log.parent.mkdir(parents=True)
    entry = {
        "kind": "over",
        "job": 1,
        "owner": "ada",
        "name": "bert",
        "rates": {"1": 0.01, "2": 0.012, "x": 1, "4": None},
    }
    log.write_text(json.dumps(entry) + "\n")
    flags = ("--from-sacct", str(tmp_path / "jobs.txt"), "--sacct-timezone", "UTC", "--carbon", "200 g/kWh")
    more = (
        "--what-if",
        "lean",
        "--samples",
        "2",
        "--jobs",
        str(tmp_path / "state"),
        "--trace",
        str(tmp_path / "t.csv"),
    )
    code, out, err = run(capsys, *flags, *more, "--json")
    assert code == 0, err
    found = json.loads(out)["what_if"]
    assert found["scaling_of_jobs"] == {"measured": 12, "learned": 24, "assumed": 0, "kinds": 3}
    assert found["gpu_types"] == {} and found["jobs_on_any_type"] == 0
    ups = {line.split(",")[5] for line in (tmp_path / "t.csv").read_text().splitlines()[1:]}
    assert len(ups) == 2 and "1:1 2:1.2" in ups


def test_limits_that_agents_measured_replace_assumed_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--from-sacct", str(learnable(tmp_path / "jobs.txt")), "--sacct-timezone", "UTC", "--carbon", "200 g/kWh")
    more = (*flags, "--what-if", "lean", "--samples", "2", "--json")
    book, saved = JobLimitBook(tmp_path / "meters/limits"), []
    for power_ratio in (0.99, 0.3):  # a limit that saves next to nothing, and one that saves most
        for kind in ("bert", "vit", "gpt"):
            for model in ("Tesla V100", "NVIDIA A100"):
                points = [(ratio, 1.0, power_ratio) for ratio in LIMIT_RATIOS]
                assert book.write(f"ada/{kind} on 2 × {model} at 300 W", points)
        code, out, err = run(capsys, *more, "--meters", str(tmp_path / "meters"))
        assert code == 0, err
        found = json.loads(out)["what_if"]
        assert found["limits_of_jobs"] == {"measured": 72, "assumed": 0}
        saved.append(found["job_carbon_change_ratio"]["mean"])
    assert saved[1] < saved[0] - 0.2
    code, _, err = run(capsys, *more, "--meters", str(tmp_path / "nowhere"))
    assert code == 2 and "--meters" in err and "is not a folder" in err


def test_jobs_of_one_name_that_differ_teach_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"{n}|train|ada|lab|gpu|COMPLETED|2026-10-01T00:00:00|2026-10-{n:02}T01:00:00|2026-10-{n:02}T02:00:00|"
        f"{60 * 3 ** (n % 7)}|cpu=4,gres/gpu={1 + n % 2},node=1\n"
        for n in range(1, 25)
    ]
    (tmp_path / "jobs.txt").write_text(HEADER + "".join(rows))
    flags = ("--from-sacct", str(tmp_path / "jobs.txt"), "--gpu-power", "250 W", "--carbon", "200 g/kWh")
    code, out, err = run(capsys, *flags, "--what-if", "lean", "--samples", "2")
    assert code == 0, err
    assert "their scaling: all assumed" in out and "Back-test: run time of" in out
