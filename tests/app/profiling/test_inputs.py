from pathlib import Path

import numpy as np
import pytest

from joulery.app.profiling.inputs import inputs_for, prompts_from, read_arrivals
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.tensors import TensorSpec

PHOTOS = Path(__file__).parents[3] / "examples" / "photos"


def test_photographs_are_sent_at_the_size_the_model_takes():
    found = inputs_for([TensorSpec("photo", "UINT8", (-1, 64, 64, 3))], PHOTOS)
    assert len(found) == 9
    assert all(one["photo"].shape == (1, 64, 64, 3) and one["photo"].dtype == np.uint8 for one in found)
    assert len({one["photo"].tobytes() for one in found}) == 9


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [TensorSpec("x", "FP32", (-1, 64, 64, 3))],
        [TensorSpec("x", "UINT8", (-1, 64, 32, 3))],
        [TensorSpec("x", "UINT8", (-1, -1, -1, 3))],
        [TensorSpec("x", "UINT8", (4, 64, 64, 3))],
        [TensorSpec("x", "UINT8", (64, 64, 3))],
        [TensorSpec("x", "UINT8", (1, 64, 64, 3)), TensorSpec("y", "FP32", (1,))],
    ],
)
def test_photographs_for_a_model_that_takes_none_are_refused(specs):
    with pytest.raises(ConfigError, match="photographs cannot be sent") as caught:
        inputs_for(specs, PHOTOS)
    assert "leave load.inputs out" in caught.value.hint


def test_a_folder_without_photographs_says_so(tmp_path):
    with pytest.raises(DataError, match="no photograph"):
        inputs_for([TensorSpec("photo", "UINT8", (-1, 64, 64, 3))], tmp_path)


def test_prompts_are_lines_and_there_are_some_of_our_own(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffWho was here?\n\n  Say föö. \n")
    assert prompts_from(file) == ["Who was here?", "Say föö."]
    ours = prompts_from(None)
    assert len(set(ours)) == len(ours) >= 10


@pytest.mark.parametrize(
    ("content", "said"), [(b" \n\n", "holds no prompt"), (b"caf\xe9\n", "not UTF-8"), (None, "cannot be read")]
)
def test_prompts_that_are_none_are_one_clear_error(tmp_path, content, said):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        prompts_from(file)
    assert caught.value.file == str(file)


def test_inputs_are_made_up_to_fit():
    specs = [
        TensorSpec("a", "FP32", (-1, 3)),
        TensorSpec("b", "INT64", (2,)),
        TensorSpec("c", "BOOL", (-1,)),
        TensorSpec("d", "BYTES", (2, -1)),
    ]
    found = inputs_for(specs, None, count=4)
    assert len(found) == 4 and not np.array_equal(found[0]["a"], found[1]["a"])
    first = found[0]
    assert [(first[s.name].shape, first[s.name].dtype.kind) for s in specs] == [
        ((1, 3), "f"),
        ((2,), "i"),
        ((1,), "b"),
        ((2, 1), "O"),
    ]
    again = inputs_for(specs, None, count=4)
    assert all(np.array_equal(one[k], other[k]) for one, other in zip(found, again, strict=True) for k in one)


def test_a_model_that_declares_nothing_gets_nothing():
    with pytest.raises(ConfigError, match="declares no inputs"):
        inputs_for([], None)


def test_recorded_arrivals(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("arrival_s\n0\n0.5\n0.5\n2\n")
    assert read_arrivals(file).tolist() == [0.0, 0.5, 0.5, 2.0]
    for content, words in (
        ("", "a.csv:1: no column arrival_s"),
        ("arrival_s\n", "no rows"),
        ("time\n1\n", "no column arrival_s"),
        ("arrival_s\n0\nx\n", "a.csv:3: arrival_s is 'x'"),
        ("arrival_s\n1\n0\n", "a.csv:3: arrivals count up from 0 s, 0 does not"),
        ("arrival_s\n-1\n", "a.csv:2: arrival_s is '-1'"),
        ("arrival_s\nnan\n", "a.csv:2: arrival_s is 'nan'"),
        ("arrival_s\n1\n\n2\n", "a.csv:3: arrival_s is missing"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=words) as caught:
            read_arrivals(file)
        assert "a.csv" in str(caught.value)
    with pytest.raises(DataError, match="No such file"):
        read_arrivals(tmp_path / "none.csv")
