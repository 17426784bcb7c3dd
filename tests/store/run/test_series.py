"""Columns in Parquet: what cannot be read is said with its cause."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from joulery.domain.errors import DataError
from joulery.store.run.series import read_series

NOT_UTF8 = pa.Array.from_buffers(pa.string(), 3, pa.array([b"tea", b"", b"\xff\xfe"], pa.binary()).buffers())


def labels(codes, words):
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), words, safe=False)


def refused(path, column):
    pq.write_table(pa.table({"fine": pa.array(range(len(column))), "odd": column}), path)
    with pytest.raises(DataError) as caught:
        read_series(path)
    assert caught.value.file == str(path)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("column", [NOT_UTF8, labels([0, 1, 2], NOT_UTF8)], ids=["text", "labels"])
def test_text_that_is_not_utf8_is_shown_with_its_row(tmp_path, column):
    error = refused(tmp_path / "series.parquet", column)
    assert error.message == r"odd holds text that is not UTF-8: b'\xff\xfe'"
    assert error.row == 3
    assert "UTF-8" in error.hint


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (labels([0, 5], pa.array(["tea"])), "odd cannot be read as dictionary<values=string"),
        (pa.array([1, 2], pa.time64("ns")), r"odd cannot be read as time64\[ns\]: .*nanoseconds"),
        (
            pa.StructArray.from_arrays([pa.array([2**45], pa.timestamp("s"))], ["at"]),
            "odd cannot be read as struct<.*year 1116918 is out of range",
        ),
    ],
    ids=["label without a word", "nanoseconds", "a time past all years"],
)
def test_what_does_not_fit_its_type_is_not_called_a_matter_of_utf8(tmp_path, column, said):
    error = refused(tmp_path / "series.parquet", column)
    assert re.search(said, error.message)
    assert "UTF-8" not in error.message
    assert error.row is None
