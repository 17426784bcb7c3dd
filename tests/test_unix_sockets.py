"""The path of a Unix socket: only a socket that nothing listens on is removed."""

import socket
from pathlib import Path

import pytest

from joulery.domain.errors import ConfigError
from joulery.unix_sockets import clear_socket_path

KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)


def bound(path: Path, kind: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    if kind != socket.SOCK_DGRAM:
        made.listen()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_left_behind_is_removed_and_one_in_use_is_not(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"
    clear_socket_path(path, kind, "--listen")
    with bound(path, kind), pytest.raises(ConfigError, match="another process listens there"):
        clear_socket_path(path, kind, "--listen")
    assert path.is_socket()
    clear_socket_path(path, kind, "--listen")
    assert not path.exists()


def test_a_listener_of_another_type_is_left_alone(tmp_path: Path) -> None:
    with bound(tmp_path / "s", socket.SOCK_DGRAM), pytest.raises(ConfigError, match="another process listens there"):
        clear_socket_path(tmp_path / "s", socket.SOCK_STREAM, "--listen")


def test_whatever_else_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (tmp_path, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(ConfigError, match="--listen: is not a socket"):
            clear_socket_path(path, socket.SOCK_STREAM, "--listen")
    clear_socket_path(tmp_path / "file" / "below", socket.SOCK_STREAM, "--listen")
    assert (tmp_path / "link").read_text() == "mine"


def test_a_socket_that_cannot_be_removed_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    bound(tmp_path / "s", socket.SOCK_STREAM).close()
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(ConfigError, match="cannot be removed: Permission denied"):
        clear_socket_path(tmp_path / "s", socket.SOCK_STREAM, "--listen")
