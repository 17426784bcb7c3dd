"""Files: JSON read, missing, or refused with its row; those a person names written as they are, ours in any case."""

import os
import stat
from pathlib import Path

import pytest

from joulery.domain.errors import CapabilityError, DataError
from joulery.store.files import read_json, require_json, write_atomically, write_named


@pytest.mark.parametrize("read", [read_json, require_json])
def test_what_is_no_json_is_refused_with_its_row(tmp_path: Path, read) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"a":\n  [1, 2}')
    with pytest.raises(DataError, match="not JSON") as caught:
        read(file)
    assert (caught.value.file, caught.value.row) == (str(file), 2)
    file.write_text('{"a": [1, 2]}')
    assert read(file) == {"a": [1, 2]}


def test_a_missing_file_is_the_callers_to_judge_or_an_error(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(FileNotFoundError):
        read_json(file)
    with pytest.raises(DataError, match="no such file") as caught:
        require_json(file)
    assert caught.value.file == str(file)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        require_json(tmp_path)


def test_a_named_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("a longer text that was there before")
    write_named(file, "für\n")
    assert file.read_bytes() == "für\n".encode()
    assert list(tmp_path.iterdir()) == [file], "no leftover"
    write_named(file, b"\xff")
    assert file.read_bytes() == b"\xff"


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_named(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "kept/page.html", tmp_path / "latest.html"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to(target)
    write_named(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("at", ["folder", "nowhere/page.html"])
def test_a_place_that_holds_no_file_is_refused(tmp_path: Path, at: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CapabilityError, match=f"cannot write .*{at}: ") as caught:
        write_named(tmp_path / at, "text")
    assert caught.value.resource == str(tmp_path / at)
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_written_file_replaces_a_foreign_link_or_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "passwd", tmp_path / "fact.json", tmp_path / "other.json"
    target.write_text("kept")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe):
        write_atomically(path, lambda file: file.write(b"{}"))
        assert path.is_file()
        assert not path.is_symlink()
        assert path.read_bytes() == b"{}"
    assert target.read_text() == "kept"


def test_a_reader_that_goes_away_is_no_disk_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(BrokenPipeError):
            write_named(Path(f"/proc/self/fd/{writing}"), "a page")
    finally:
        os.close(writing)
