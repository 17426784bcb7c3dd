"""Who runs this process, where the system does not know."""

import os
from pathlib import Path

import pytest

from joulery.user import NOWHERE, account_name, cache_home, home_folder, state_home, user_name


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a number without an entry in the user database, with an empty environment."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_number_without_a_name_has_itself_and_no_home(nameless: None) -> None:
    assert user_name() == account_name(os.getuid()) == str(os.getuid())
    assert home_folder() == NOWHERE
    assert (cache_home(), state_home()) == (NOWHERE / ".cache", NOWHERE / ".local/state")


def test_the_environment_comes_first_and_an_empty_value_is_none(
    nameless: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "")
    assert home_folder() == NOWHERE
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada")
    assert (user_name(), cache_home()) == ("ada", tmp_path / ".cache")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_home() == Path("/state")
