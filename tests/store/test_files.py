"""Files: JSON read, missing, or refused with its row; text written whole, into what is no file too."""

import os
import stat
from pathlib import Path

import pytest

from joulery.domain.errors import CapabilityError, DataError
from joulery.store.files import read_json, require_json, write_text


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


def test_text_takes_the_place_of_a_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("a longer text that was there before")
    write_text(file, "für\n")
    assert file.read_bytes() == "für\n".encode()
    assert list(tmp_path.iterdir()) == [file], "no leftover"


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("at", ["folder", "nowhere/page.html"])
def test_a_place_that_holds_no_file_is_refused(tmp_path: Path, at: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CapabilityError, match=f"cannot write .*{at}: ") as caught:
        write_text(tmp_path / at, "text")
    assert caught.value.resource == str(tmp_path / at)
    assert list((tmp_path / "folder").iterdir()) == []
