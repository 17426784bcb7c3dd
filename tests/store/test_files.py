"""JSON files: read, missing, or refused with their row."""

from pathlib import Path

import pytest

from joulery.domain.errors import DataError
from joulery.store.files import read_json, require_json


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
