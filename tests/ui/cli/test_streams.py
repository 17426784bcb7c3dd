"""Standard output and standard error that refuse what a command prints."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from joulery.ui.cli import main
from joulery.ui.cli.measure import ExitCodeFirst
from joulery.ui.cli.streams import keep_going, standard_streams


def stream(path: Path | str, encoding: str = "utf-8", *, buffered: bool = True) -> io.TextIOWrapper:
    """A standard stream as Python opens it: with a buffer, or without one (PYTHONUNBUFFERED)."""
    raw = io.FileIO(path, "w")
    return io.TextIOWrapper(io.BufferedWriter(raw) if buffered else raw, encoding, write_through=not buffered)


@pytest.fixture(params=[True, False], ids=["buffered", "unbuffered"])
def full(request: pytest.FixtureRequest) -> Iterator[io.TextIOWrapper]:
    """A stream into a disk that is full."""
    with stream("/dev/full", buffered=request.param) as made:
        yield made


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["config", "schema"]])
def test_output_that_is_refused_is_one_clear_error(
    full: io.TextIOWrapper, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Short output, and output longer than any buffer."""
    monkeypatch.setattr(sys, "stdout", full)
    assert main(arguments) == 2
    assert capfd.readouterr().err == (
        "joulery: standard output cannot be written: No space left on device\n"
        "  free some space, or send it to another place\n"
    )
    assert sys.stdout is full


@pytest.mark.parametrize("arguments", [["report", "absent"], ["repotr"]])
def test_a_message_that_cannot_be_printed_costs_no_exit_code(
    full: io.TextIOWrapper, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    assert main(arguments) == 2


@pytest.mark.parametrize("error", [None, ValueError("a mistake of ours"), KeyboardInterrupt()])
def test_a_footprint_that_cannot_be_printed_costs_the_command_no_exit_code(
    full: io.TextIOWrapper, error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    guard = ExitCodeFirst()
    with standard_streams(), guard:
        guard.ended(7)
        if error is not None:
            raise error
        print("energy 4.91 J", file=sys.stderr)
    assert guard.exit_code == 7


def test_a_stream_that_is_not_there_takes_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["report", "absent"]) == 2
    assert sys.stderr is None


def test_characters_that_an_encoding_lacks_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out"
    with stream(file, "latin-1") as latin:
        monkeypatch.setattr(sys, "stdout", latin)
        with standard_streams():
            print("energy ± 50 %, carbon \N{EN DASH}, \udcff")
    assert file.read_bytes() == b"energy \xb1 50 %, carbon \\u2013, \\udcff\n"


def test_a_folder_that_is_gone_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text("joulery: 1\njobs: {slots: {count: 1}}\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert main(["submit", "--site", str(tmp_path / "site.yaml"), "--", "true"]) == 2
    finally:
        os.chdir(tmp_path)
    assert capsys.readouterr().err == "joulery: the current folder is gone\n  cd to one that is there\n"


def test_a_command_with_bytes_that_are_no_text_is_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file name in Latin-1, and an owner; a process of its own, for measuring waits for this process's signals."""
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"M\xfcnchen")
    flags = ["--meter", "fake:5", "--owner", name, "--out", "run"]
    subprocess.run([sys.executable, "-m", "joulery", "measure", *flags, "--", "touch", name], check=True)
    assert (tmp_path / name).exists()
    assert json.loads((tmp_path / "run/manifest.json").read_text())["owner"] == "M\\udcfcnchen"
    for form in (["--json"], ["--by", "owner"], ["--html", "page.html"], ["--format", "csv"]):
        assert main(["report", "run", *form]) == 0
    assert "M\\udcfcnchen" in capfd.readouterr().out


def test_a_log_that_is_full_ends_no_daemon_and_gets_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(entry: Mapping[str, Any]) -> None:
        click.echo(entry["text"])

    with stream("/dev/full") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with standard_streams():
            said = keep_going(say)
            said({"text": "round 1"})
            os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), log.fileno())
            said({"text": "round 2"})
    assert (tmp_path / "log").read_text().splitlines()[-1] == "round 2"
