"""Series with and without pyarrow: the same columns come back; what cannot be read is said with its cause."""

import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.store.run import series
from joulery.store.run.series import Labels, read_labelled, read_series, series_file, series_names, write_series

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
    assert error.message.startswith("odd holds text") and r"b'\xff\xfe'" in error.message
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


@pytest.fixture(params=["parquet", "npz"])
def kind(request, monkeypatch):
    """How series are written: with pyarrow, and where it is not installed."""
    if request.param == "npz":
        monkeypatch.setattr(series, "find_spec", lambda name: None)
    return request.param


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
ROWS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(width=64), WORDS, st.booleans()), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_columns_come_back_as_they_were_written(tmp_path, kind, rows):
    whole, decimal, text, truth = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    words = sorted(set(text))
    columns = {
        "whole": np.array(whole, np.int64),
        "decimal": np.array(decimal, np.float64),
        "text": text if text else np.array([], np.str_),
        "truth": np.array(truth, np.bool_),
        "label": Labels(np.array([words.index(word) for word in text], np.int32), words),
    }
    write_series(tmp_path, "one", columns)
    path = series_file(tmp_path, "one")
    assert path.name == f"one.{kind}" and series_names(tmp_path) == ("one",)
    found = read_series(path)
    assert list(found) == list(columns)
    assert found["whole"].tolist() == whole and found["truth"].tolist() == truth
    assert np.array_equal(found["decimal"], columns["decimal"], equal_nan=True)
    assert found["text"].tolist() == found["label"].tolist() == text
    numbers, labels = read_labelled(path, ("text", "label"))
    assert list(numbers) == ["whole", "decimal", "truth"] and numbers["whole"].tolist() == whole
    for name in ("text", "label"):
        assert [labels[name].words[code] for code in labels[name].codes] == text
    assert list(read_series(path, ["text"])) == ["text"]


def test_every_array_of_a_file_is_a_column(tmp_path, monkeypatch):
    """numpy before 2.1 takes any further keyword for an array."""
    found = {}
    monkeypatch.setattr(series, "find_spec", lambda name: None)
    monkeypatch.setattr(np, "savez_compressed", lambda file, **arrays: found.update(arrays))
    write_series(tmp_path, "one", {"n": [1], "text": ["a"]})
    assert sorted(found) == ["n", "text"]


def test_a_series_written_again_in_the_other_form_takes_the_place_of_the_first(tmp_path, monkeypatch):
    write_series(tmp_path, "one", {"n": [1]})
    with monkeypatch.context() as without:
        without.setattr(series, "find_spec", lambda name: None)
        write_series(tmp_path, "one", {"n": [2]})
    assert read_series(series_file(tmp_path, "one"))["n"].tolist() == [2]
    write_series(tmp_path, "one", {"n": [3]})
    assert read_series(series_file(tmp_path, "one"))["n"].tolist() == [3]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_series_is_one_error_and_columns_are_equally_long(tmp_path, kind):
    with pytest.raises(DataError, match="equally long"):
        write_series(tmp_path, "one", {"n": [1], "m": [1, 2]})
    with pytest.raises(DataError, match="no such series"):
        read_series(tmp_path / f"one.{kind}")
    write_series(tmp_path, "one", {"n": np.arange(1000)})
    path = series_file(tmp_path, "one")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="not a readable"):
        read_series(path)


def test_of_two_forms_that_a_kill_has_left_the_newer_counts(tmp_path):
    for age, kind in enumerate(("parquet", "npz")):
        (tmp_path / f"one.{kind}").touch()
        os.utime(tmp_path / f"one.{kind}", (100 - age, 100 - age))
    assert series_file(tmp_path, "one").suffix == ".parquet" and series_names(tmp_path) == ("one",)
    os.utime(tmp_path / "one.npz", (200, 200))
    assert series_file(tmp_path, "one").suffix == ".npz"
