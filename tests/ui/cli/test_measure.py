import os

import pytest

from joulery.domain.errors import CapabilityError
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
