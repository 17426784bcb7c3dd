import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.store.run.directory import create_run, new_run_id, open_run


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    with create_run(tmp_path / "a" / "run", kind="measure", argv=["echo", "x"], zone="GB", owner="nlp") as writer:
        writer.describe(channels=[{"device": "cpu:0"}])
        writer.log("note", text="hello", value=math.nan, t_s=12.5)
        writer.log("decision", target="svc")
        writer.write_series(
            "power", {"t_ns": np.array([1, 2]), "value": np.array([1.0, math.nan]), "device": ["a", "b"]}
        )
        writer.write_report({"energy_j": 3.5, "carbon_g": None})
    run = open_run(tmp_path / "a" / "run")
    assert run.closed
    assert run.manifest["state"] == "closed"
    assert run.manifest["kind"] == "measure"
    assert run.manifest["argv"] == ["echo", "x"]
    assert (run.manifest["zone"], run.manifest["owner"]) == ("GB", "nlp")
    assert run.manifest["channels"] == [{"device": "cpu:0"}]
    assert run.manifest["ended_s"] >= run.manifest["created_s"]
    assert [entry["kind"] for entry in run.log()] == ["note", "decision"]
    assert list(run.log("note")) == [{"t_s": 12.5, "kind": "note", "text": "hello", "value": None}]
    assert run.series_names == ("power",)
    series = run.series("power")
    assert series["t_ns"].tolist() == [1, 2]
    assert series["device"].tolist() == ["a", "b"]
    assert series["value"][0] == 1.0
    assert math.isnan(series["value"][1])
    assert run.report == {"energy_j": 3.5, "carbon_g": None}


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    create_run(tmp_path, kind="measure").close()
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run"):
        create_run(tmp_path, kind="measure")
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_failed_block_is_marked(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), create_run(tmp_path, kind="measure"):
        raise ZeroDivisionError
    assert open_run(tmp_path).manifest["state"] == "failed"


def test_a_full_disk_hides_no_error_that_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise CapabilityError("cannot write manifest.json: No space left on device")

    with pytest.raises(CapabilityError, match="the journal"), create_run(tmp_path / "failed", kind="measure") as run:
        monkeypatch.setattr(run, "describe", refuse)
        raise CapabilityError("cannot write the journal")
    with pytest.raises(CapabilityError, match="manifest"), create_run(tmp_path / "ended", kind="measure") as run:
        monkeypatch.setattr(run, "describe", refuse)


def test_an_open_run_is_readable_and_says_it_is_not_closed(tmp_path: Path) -> None:
    writer = create_run(tmp_path, kind="up")
    writer.log("note")
    run = open_run(tmp_path)
    assert not run.closed
    assert run.report is None
    assert len(list(run.log())) == 1
    writer.close()
    writer.close()
    assert open_run(tmp_path).closed


@given(cut=st.integers(0, 200))
def test_a_torn_last_line_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    with create_run(folder, kind="up") as writer:
        for i in range(5):
            writer.log("tick", t_s=float(i), i=i)
    log = folder / "log.jsonl"
    whole = log.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    log.write_bytes(kept)
    assert [entry["i"] for entry in open_run(folder).log()] == list(range(kept.count(b"\n")))


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    with create_run(tmp_path, kind="up") as writer:
        writer.log("a")
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b"{oops\n{}\n")
    with pytest.raises(DataError, match=r"log\.jsonl:2: not JSON"):
        list(open_run(tmp_path).log())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ('{"schema": "joulery.run/2"}', "'joulery.run/2'.*reads 'joulery.run/1'"),
        ("[]", "schema is None"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=says):
        open_run(tmp_path)


def test_no_run_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, lacks in (("nothing", "no such folder"), ("file", "is a file"), ("folder", "no manifest.json")):
        with pytest.raises(DataError, match=f"{name} holds no run: .*{lacks}") as caught:
            open_run(tmp_path / name)
        assert "runs/" in caught.value.hint and "--out" in caught.value.hint
    create_run(tmp_path / "run", kind="up").close()
    with pytest.raises(DataError, match="no such series"):
        open_run(tmp_path / "run").series("power")
    (tmp_path / "run" / "report.json").write_text("[1]")
    with pytest.raises(DataError, match="one JSON object"):
        _ = open_run(tmp_path / "run").report


def test_columns_must_be_equally_long(tmp_path: Path) -> None:
    with create_run(tmp_path, kind="up") as writer, pytest.raises(DataError, match="equally long"):
        writer.write_series("x", {"a": [1], "b": [1, 2]})


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapabilityError, match="Not a directory") as caught:
        create_run(tmp_path / "file" / "run", kind="up")
    assert "--out" in caught.value.hint


FULL = """
import resource, signal, sys
from joulery.domain.errors import CapabilityError
from joulery.store.run.directory import create_run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = create_run(sys.argv[1], kind="up")
writer.write_report({"first": True})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
failures = []
for attempt in (
    lambda: [writer.log("note", text="x" * 100) for _ in range(100)],
    lambda: writer.write_report({"text": "y" * 8192}),
    lambda: writer.write_series("s", {"a": [str(i * 7919) for i in range(20000)]}),
):
    try:
        attempt()
    except CapabilityError as error:
        failures.append((str(error), error.hint))
print(failures)
"""


def test_a_full_disk_is_a_clear_error_and_what_was_there_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    failures = eval(done.stdout)
    assert len(failures) == 3
    assert all("File too large" in message and "ulimit -f" in hint for message, hint in failures)
    run = open_run(tmp_path / "run")
    assert run.report == {"first": True}
    assert 20 < len(list(run.log())) < 100
    assert (run.path / "log.jsonl").read_bytes().endswith(b"}\n")
    assert not run.closed
    assert sorted(path.name for path in run.path.iterdir()) == ["log.jsonl", "manifest.json", "report.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_tmpfs(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        writer = create_run(tmp_path / "run", kind="up")
        with pytest.raises(CapabilityError, match="No space left on device") as caught:
            writer.write_report({"text": "y" * 100_000})
        assert "what was written before is kept" in caught.value.hint
        writer.write_report({"small": 1})
        writer.close()
        assert open_run(tmp_path / "run").report == {"small": 1}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_run_can_be_taken_back_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    writer = create_run(tmp_path / "run", kind="measure")
    (writer.path / "samples").mkdir()
    writer.write_series("power", {"a": [1]})
    writer.write_report({})
    writer.discard()
    writer.discard()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    create_run(tmp_path / "run", kind="measure").discard()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_run_names_sort_by_time_and_do_not_collide() -> None:
    assert new_run_id(1_700_000_000.0).startswith("20231114T221320Z-")
    assert len({new_run_id(1_700_000_000.0)[-4:] for _ in range(50)}) > 40
