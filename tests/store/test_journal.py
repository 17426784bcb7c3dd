"""The journal outlives its writer."""

import errno
import os
from pathlib import Path

import pytest

from joulery.domain.errors import CapabilityError
from joulery.store.journal import Journal


def written(path: Path) -> bytes:
    with Journal(path) as journal:
        journal.append("a", n=1)
        journal.append("b", n=2)
    return path.read_bytes()


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    written(path)

    with Journal(path) as journal:
        assert journal.entries == [{"kind": "a", "n": 1}, {"kind": "b", "n": 2}]
        assert journal.damaged == 0


def test_cut_anywhere_it_reads_what_is_whole_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with Journal(path) as journal:
            assert len(journal.entries) == whole[:length].count(b"\n")
            journal.append("c")
        with Journal(path) as journal:
            assert journal.entries[-1] == {"kind": "c"}
            assert journal.damaged == 0


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"kind": 3}\n', b"\0\0\0\n"])
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line + written(path))

    with Journal(path) as journal:
        assert [entry["kind"] for entry in journal.entries] == ["a", "b"]
        assert journal.damaged == 1


def test_replaced_by_fewer_lines_it_goes_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for n in range(100):
            journal.append("a", n=n)
        longer = journal.size_bytes
        journal.replace([{"kind": "sum", "n": 99}])
        journal.append("b")
        assert journal.size_bytes < longer

    with Journal(path) as journal:
        assert journal.entries == [{"kind": "sum", "n": 99}, {"kind": "b"}]


def test_a_line_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("a")
        assert synced == [journal.size_bytes]


def test_a_write_that_is_cut_short_goes_on_and_a_full_disk_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, room = tmp_path / "journal.jsonl", os.write, [30]

    def cut(fd: int, line: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        written = write(fd, line[: min(5, room[0])])
        room[0] -= written
        return written

    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", cut)
        journal.append("a")
        journal.append("b")
        with pytest.raises(CapabilityError, match="cannot write"):
            journal.append("c")
    monkeypatch.undo()
    assert path.read_bytes() == b'{"kind":"a"}\n{"kind":"b"}\n'


def test_a_folder_in_the_way_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="cannot write"):
        Journal(tmp_path)
