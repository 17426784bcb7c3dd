"""sacct's output as past jobs: every hole and oddity of real files."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from joulery.adapters.clusters.sacct import read_sacct
from joulery.domain.errors import DataError

HEADER = "JobID|JobName|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|AllocTRES\n"
ROW = (
    "17|train|ada|nlp|gpu|COMPLETED|2026-10-01T00:00:00|2026-10-01T01:00:00|2026-10-01T02:00:00|3600|"
    "billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1\n"
)


def log(folder: Path, *rows: str, header: str = HEADER):
    file = folder / "jobs.txt"
    file.write_text(header + "".join(rows))
    return read_sacct(file, UTC)


def test_a_whole_row(tmp_path: Path) -> None:
    (job,) = log(tmp_path, ROW).jobs

    assert (job.id, job.name, job.owner, job.account, job.partition, job.state) == (
        "17", "train", "ada", "nlp", "gpu", "COMPLETED",
    )  # fmt: skip
    assert (job.elapsed_s, job.end_s - job.start_s, job.start_s - job.submit_s) == (3600.0, 3600.0, 3600.0)
    assert (job.gpus, job.cpus, job.nodes) == (2, 8, 1)
    assert math.isnan(job.measured_j)


@pytest.mark.parametrize(
    ("submit", "eligible", "hours"),
    [
        ("2026-10-01T00:00:00", "2026-10-01T00:30:00", 0.5),
        ("2026-10-01T00:30:00", "2026-10-01T00:00:00", 0.5),
        ("2026-10-01T00:00:00", "Unknown", 1.0),
        ("Unknown", "2026-10-01T00:30:00", 0.5),
        ("Unknown", "Unknown", math.nan),
    ],
)
def test_a_job_that_was_held_comes_when_it_could_start(
    tmp_path: Path, submit: str, eligible: str, hours: float
) -> None:
    row = ROW.replace("|2026-10-01T00:00:00|", f"|{submit}|{eligible}|")
    (job,) = log(tmp_path, row, header=HEADER.replace("Submit|", "Submit|Eligible|")).jobs
    assert (job.start_s - job.submit_s) / 3600 == pytest.approx(hours, nan_ok=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("17|", "17.batch|"), "a step of a job"),
        (("17|", "17.0|"), "a step of a job"),
        (("COMPLETED", "PENDING"), "still waits"),
        (("|3600|", "|0|"), "never ran"),
        (("17|", "|"), "no job number"),
        (
            ("2026-10-01T01:00:00|2026-10-01T02:00:00|3600", "Unknown|Unknown|"),
            "no elapsed time and no start and end",
        ),
        (("2026-10-01T01:00:00|2026-10-01T02:00:00", "None|Unknown"), "neither start nor end"),
        (
            ("2026-10-01T01:00:00|2026-10-01T02:00:00|3600", "2026-10-01T02:00:00|2026-10-01T01:00:00|"),
            "ended before it began",
        ),
        (("train", "tr|ain"), "more fields than the first line names"),
        (("COMPLETED", "RUNNING"), "the same run again"),
    ],
)
def test_rows_that_hold_no_job_are_left_out_and_counted(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    found = log(tmp_path, ROW, ROW.replace(*change, 1))

    assert len(found.jobs) == 1
    assert found.left_out == {why: 1}


def test_a_quote_in_a_name_is_a_character_like_any_other(tmp_path: Path) -> None:
    found = log(tmp_path, ROW.replace("train", '"train'), ROW.replace("17", "18"), ROW.replace("17", "19"))

    assert [(job.id, job.name) for job in found.jobs] == [("17", '"train'), ("18", "train"), ("19", "train")]


def test_a_run_reported_twice_counts_once_with_the_later_duration(tmp_path: Path) -> None:
    longer = ROW.replace("RUNNING", "COMPLETED").replace("|3600|", "|7200|")
    found = log(tmp_path, ROW.replace("COMPLETED", "RUNNING"), longer, ROW)
    assert [job.elapsed_s for job in found.jobs] == [7200.0]
    assert found.left_out == {"the same run again": 2}
    requeued = ROW.replace("COMPLETED", "REQUEUED")
    again = ROW.replace("T01:00:00", "T03:00:00").replace("T02:00:00", "T04:00:00")
    assert [job.elapsed_s for job in log(tmp_path, requeued, again).jobs] == [3600.0, 3600.0]


def test_parts_of_arrays_and_of_heterogeneous_jobs_count_each(tmp_path: Path) -> None:
    numbers = ("17_1", "17_2", "18+0", "18+1")
    found = log(tmp_path, *(ROW.replace("17", number, 1) for number in numbers))

    assert tuple(job.id for job in found.jobs) == numbers


@pytest.mark.parametrize(
    "state", ["CANCELLED by 1003", "CANCELLED+", "TIMEOUT", "NODE_FAIL", "RUNNING", "FAILED", "COMPLETING", "SUSPENDED"]
)
def test_however_it_ended_it_held_what_it_held(tmp_path: Path, state: str) -> None:
    found = log(tmp_path, ROW.replace("COMPLETED", state))

    assert found.jobs[0].elapsed_s == 3600.0
    assert found.notes == ()


def test_an_unknown_state_is_noted_and_counted(tmp_path: Path) -> None:
    assert log(tmp_path, ROW.replace("COMPLETED", "ENTANGLED")).notes == (
        "1 jobs in the unknown state ENTANGLED count as ended",
    )


def test_holes_are_filled_from_what_is_there(tmp_path: Path) -> None:
    (no_elapsed,) = log(tmp_path, ROW.replace("|3600|", "||")).jobs
    assert no_elapsed.elapsed_s == 3600.0
    (no_start,) = log(tmp_path, ROW.replace("2026-10-01T01:00:00", "Unknown")).jobs
    assert no_start.start_s == no_start.end_s - 3600.0
    (running,) = log(tmp_path, ROW.replace("2026-10-01T02:00:00", "Unknown")).jobs
    assert running.end_s == running.start_s + 3600.0
    (bare,) = log(tmp_path, "5|2026-10-01T01:00:00|60\n", header="JobID|Start|ElapsedRaw\n").jobs
    assert (bare.owner, bare.partition, bare.gpus, bare.state) == ("unknown", "unknown", 0, "unknown")
    (short,) = log(tmp_path, ROW, "18|train|ada\n").jobs
    assert short.id == "17"


@pytest.mark.parametrize(("text", "seconds"), [("1-02:03:04", 93784), ("02:03:04", 7384), ("03:04", 184)])
def test_elapsed_as_people_read_it(tmp_path: Path, text: str, seconds: int) -> None:
    found = log(tmp_path, f"5|2026-10-01T01:00:00|{text}\n", header="JobIDRaw|Start|Elapsed\n")

    assert found.jobs[0].elapsed_s == seconds


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [("cpu=1,gres/gpu=4", 4), ("gres/gpu:a100=2,gres/gpu:v100=1", 3), ("cpu=8", 0), ("", 0), ("gres/gpumem=40", 0)],
)
def test_gpus_are_counted_once(tmp_path: Path, tres: str, gpus: int) -> None:
    row = "|".join([*ROW.strip().split("|")[:-1], tres]) + "\n"

    assert log(tmp_path, row).jobs[0].gpus == gpus


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_what_a_spreadsheet_saved_is_read(tmp_path: Path, separator: str) -> None:
    file = tmp_path / "jobs.csv"
    lines = ["JobID|JobName|Start|ElapsedRaw|AllocTRES", '7_3|a|2026-10-01T01:00:00|60|"cpu=1,gres/gpu=2"']
    file.write_text("\ufeff" + "".join(line.replace("|", separator) + "\r\n" for line in lines))
    (job,) = read_sacct(file, UTC).jobs
    assert (job.id, job.name, job.gpus) == ("7_3", "a", 2)


def test_commas_a_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text(
        '\ufeffJobID,JobName,Start,ElapsedRaw,AllocTRES\n\n7_3,"a,b",2026-10-01T01:00:00,60,"cpu=1,gres/gpu=2"\n'
    )
    (job,) = read_sacct(file, UTC).jobs

    assert (job.id, job.name, job.gpus) == ("7_3", "a,b", 2)


def test_stamps_are_read_in_the_zone_named(tmp_path: Path) -> None:
    file = tmp_path / "jobs.txt"
    file.write_text(HEADER + ROW)
    london, utc = read_sacct(file, ZoneInfo("Europe/London")), read_sacct(file, UTC)

    assert utc.jobs[0].start_s - london.jobs[0].start_s == 3600.0


@pytest.mark.parametrize(("text", "joules"), [("123.5", 123.5), ("0", math.nan), ("", math.nan), ("1.8e19", math.nan)])
def test_slurms_own_measurement(tmp_path: Path, text: str, joules: float) -> None:
    found = log(tmp_path, f"5|2026-10-01T01:00:00|60|{text}\n", header="JobID|Start|ElapsedRaw|ConsumedEnergyRaw\n")

    assert found.jobs[0].measured_j == pytest.approx(joules, nan_ok=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ("a|b|c\n1|2|3\n", "names no JobID"),
        (HEADER, "no rows"),
        (HEADER + "17.0|x\n", "no job held anything: 1 x a step of a job"),
        ("JobID,JobName\n1," + "x" * 200_000, "not CSV"),
    ],
)
def test_a_file_without_jobs_is_one_clear_error(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "jobs.txt"
    file.write_text(content)
    with pytest.raises(DataError, match=said):
        read_sacct(file)
    with pytest.raises(DataError, match="cannot be read"):
        read_sacct(tmp_path / "none.txt")


def test_two_clusters_number_their_jobs_alike(tmp_path: Path) -> None:
    header = "Cluster|JobID|Start|End|ElapsedRaw|AllocTRES\n"
    rows = ("east|1|2026-11-26T23:20:24|2026-11-26T23:21:04|40|gres/gpu=2\n",
            "west|1|2026-11-26T23:20:24|2026-11-26T23:21:24|60|gres/gpu=2\n")  # fmt: skip
    found = log(tmp_path, *rows, header=header)
    assert [(job.cluster, job.id, job.elapsed_s) for job in found.jobs] == [("east", "1", 40.0), ("west", "1", 60.0)]
    assert not found.left_out


LONDON = ZoneInfo("Europe/London")  # 2026-10-25 01:00 to 02:00 comes twice: first in summer time, an hour before UTC


@pytest.mark.parametrize(
    ("start", "end", "elapsed_s", "began"),
    [
        ("2026-10-25T01:30:00", "2026-10-25T03:00:00", 5400, "2026-10-25T01:30:00+00:00"),
        ("2026-10-25T01:30:00", "2026-10-25T03:00:00", 9000, "2026-10-25T00:30:00+00:00"),
        ("2026-10-25T01:50:00", "2026-10-25T01:10:00", 1200, "2026-10-25T00:50:00+00:00"),
        ("2026-10-25T00:30:00", "2026-10-25T01:10:00", 6000, "2026-10-24T23:30:00+00:00"),
        ("2026-10-25T01:10:00", "2026-10-25T01:50:00", 2400, "2026-10-25T00:10:00+00:00"),  # either: the first
        ("2026-03-29T00:30:00", "2026-03-29T02:30:00", 3600, "2026-03-29T00:30:00+00:00"),
    ],
)
def test_the_hour_that_comes_twice_is_resolved_by_the_elapsed_time(
    tmp_path: Path, start: str, end: str, elapsed_s: int, began: str
) -> None:
    (tmp_path / "jobs.txt").write_text(
        f"JobID|Start|End|ElapsedRaw|AllocTRES\n1|{start}|{end}|{elapsed_s}|gres/gpu=1\n"
    )
    (job,) = read_sacct(tmp_path / "jobs.txt", LONDON).jobs
    assert (job.start_s, job.elapsed_s) == (datetime.fromisoformat(began).timestamp(), elapsed_s)
    # Without an elapsed time it is what lies between, never less than nothing.
    (tmp_path / "jobs.txt").write_text(f"JobID|Start|End|AllocTRES\n1|{start}|{end}|gres/gpu=1\n")
    (job,) = read_sacct(tmp_path / "jobs.txt", LONDON).jobs
    assert job.elapsed_s > 0


def test_stamps_may_be_unix_seconds(tmp_path: Path) -> None:
    """``SLURM_TIME_FORMAT=%s sacct …`` as Slurm 22.05 printed it."""
    header = "JobID|Submit|Start|End|ElapsedRaw|AllocTRES\n"
    found = log(tmp_path, "1|1795735223|1795735224|1795735264|40|gres/gpu=2", header=header)
    assert [(job.submit_s, job.start_s, job.end_s) for job in found.jobs] == [(1795735223, 1795735224, 1795735264)]


HEADER_OF_ENERGY = "JobID|State|Start|ElapsedRaw|ConsumedEnergyRaw|AllocTRES\n"
# As 22.05 printed it with acct_gather_energy: job 1 without srun, job 2 with srun for six of its ten seconds.
ENERGY = (
    "1|FAILED|2026-11-26T23:34:24|13||billing=1,cpu=1,gres/gpu=1,node=1\n",
    "1.batch|FAILED|2026-11-26T23:34:24|13|654|cpu=1,gres/gpu=1,mem=0,node=1\n",
    "2|COMPLETED|2026-11-26T23:35:01|10|298|billing=1,cpu=1,energy=298,gres/gpu=1,node=1\n",
    "2.batch|COMPLETED|2026-11-26T23:35:01|10|503|cpu=1,gres/gpu=1,mem=0,node=1\n",
    "2.0|COMPLETED|2026-11-26T23:35:01|6|298|cpu=1,gres/gpu=1,mem=0,node=1\n",
)


def test_energy_is_that_of_the_row_that_saw_most_of_the_job(tmp_path: Path) -> None:
    found = log(tmp_path, *ENERGY, header=HEADER_OF_ENERGY)
    assert [(job.id, job.measured_j) for job in found.jobs] == [("1", 654.0), ("2", 503.0)]
    assert not found.left_out, "the steps were used"
    assert log(tmp_path, *ENERGY[::-1], header=HEADER_OF_ENERGY).jobs == found.jobs[::-1], "in any order"
    alone = log(tmp_path, ENERGY[0], ENERGY[2], header=HEADER_OF_ENERGY)
    assert math.isnan(alone.jobs[0].measured_j) and alone.jobs[1].measured_j == 298.0, "with -X"


def test_steps_belong_to_the_run_and_the_cluster_they_ran_in(tmp_path: Path) -> None:
    again = "1|COMPLETED|2026-11-26T23:50:00|13||billing=1,gres/gpu=1\n"
    step = "1.batch|COMPLETED|2026-11-26T23:50:00|13|70|gres/gpu=1\n"
    found = log(tmp_path, *ENERGY[:2], again, step, header=HEADER_OF_ENERGY)
    assert [job.measured_j for job in found.jobs] == [654.0, 70.0]
    rows = [f"east|{ENERGY[0]}", f"west|{ENERGY[1]}"]
    found = log(tmp_path, *rows, header=f"Cluster|{HEADER_OF_ENERGY}")
    assert math.isnan(found.jobs[0].measured_j)
