import os
from pathlib import Path

import pytest

from joulery.domain.errors import CapabilityError
from joulery.ui.cli import main
from joulery.ui.cli.measure import ExitCodeFirst


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("a mistake of ours"), "ValueError: a mistake of ours"),
        (CapabilityError("the disk is full", hint="free some space"), "joulery: the disk is full\n  free some space"),
        (KeyboardInterrupt(), "interrupted while writing the report"),
    ],
)
def test_from_its_end_on_the_commands_exit_code_stands(
    capfd: pytest.CaptureFixture[str], error: BaseException, says: str
) -> None:
    guard = ExitCodeFirst()
    with guard:
        guard.ended(5)
        raise error
    assert guard.exit_code == 5
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("error", [ValueError("a mistake"), CapabilityError("refused"), KeyboardInterrupt()])
def test_before_its_end_an_error_is_an_error(error: BaseException) -> None:
    with pytest.raises(type(error)), ExitCodeFirst():
        raise error


def test_an_exit_is_an_exit() -> None:
    guard = ExitCodeFirst()
    with pytest.raises(SystemExit), guard:
        guard.ended(5)
        raise SystemExit(1)


def test_a_reader_that_went_away_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(2)
    try:
        guard = ExitCodeFirst()
        with guard:
            guard.ended(8)
            raise BrokenPipeError
        os.write(2, b"into the void")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert guard.exit_code == 8
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train.py", "command not found\n  a file of this folder is run as python3 train.py\n"),
        ("run me", "command not found\n  a file of this folder is run as ./'run me'\n"),
        ("sh -c 'exit 3'", "command not found\n  it is one word: leave the quotes out, or measure sh -c "),
        ("no-such-program --flag", "command not found\n"),
    ],
)
def test_a_command_that_does_not_exist_says_what_was_probably_meant(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "run me"):
        (tmp_path / name).touch()
    assert main(["measure", "--", command]) == 127
    assert capsys.readouterr().err.startswith(f"joulery: {command}: {said}")
