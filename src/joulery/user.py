"""Name and home folder of the user of this process, with fallbacks where the system has neither.

A container that runs as a number without an entry in the user database has no name, and without ``HOME`` no home
folder. Every layer may import it, except the pure ones.
"""

from __future__ import annotations

import getpass
import os
import pwd
from pathlib import Path

NOWHERE = Path("/")
"""The home folder of a user who has none, as container engines set it: root alone may write there."""


def user_name() -> str:
    """The user's name: by the environment, else the user database, else the user's number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def account_name(uid: int) -> str:
    """The name of a user id in the user database; the id as text where it has no entry."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def home_folder() -> Path:
    """``$HOME`` where it is set, else the folder in the user database, else :data:`NOWHERE`."""
    try:
        return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return NOWHERE


def cache_home() -> Path:
    """``$XDG_CACHE_HOME``, else ``.cache`` in the home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache")


def state_home() -> Path:
    """``$XDG_STATE_HOME``, else ``.local/state`` in the home folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state")
