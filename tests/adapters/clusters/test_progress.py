"""What jobs say of their progress."""

import math
from pathlib import Path

import pytest

from joulery.adapters.clusters.progress import parse_progress, read_progress


@pytest.mark.parametrize(
    ("line", "ratio"),
    [
        ("epoch 3/10", 0.3),
        ("Epoch: 3 / 10", 0.3),
        ("128/512", 0.25),
        ("samples 1.5/3", 0.5),
        ("0.25", 0.25),
        ("25 %", 0.25),
        ("25%", 0.25),
        ("1", 1.0),
        ("11/10", 1.0),
    ],
)
def test_what_is_understood(line: str, ratio: float) -> None:
    assert parse_progress(line) == pytest.approx(ratio)


@pytest.mark.parametrize("line", ["", "hello", "3/0", "-1/3", "17", "nan", "1e3", "epoch three of ten"])
def test_what_is_not(line: str) -> None:
    assert math.isnan(parse_progress(line))


def test_the_last_whole_line_that_says_something_counts(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    file.write_text("epoch 1/10\nepoch 2/10\nwarning\nepoch 3/1")

    assert read_progress(file) == pytest.approx(0.2)


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    file.write_text("".join(f"epoch {k}/100000\n" for k in range(50_000)))

    assert read_progress(file) == pytest.approx(0.49999)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"epoch 1/2"])
def test_nothing_to_read_is_unknown(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "progress"
    assert math.isnan(read_progress(file))
    file.write_bytes(content)
    assert math.isnan(read_progress(file))
