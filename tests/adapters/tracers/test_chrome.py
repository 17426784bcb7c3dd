"""Chrome trace JSON in blocks: every cut of the text, every damage, exact stamps."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.adapters.tracers import chrome
from joulery.adapters.tracers.chrome import Block, ChromeTrace, stamps_ns
from joulery.domain.errors import DataError

EVENTS = [
    {"ph": "X", "name": 'a},{"b', "ts": 1.5, "dur": 2, "args": {"dims": [[1, 2], []], "list": [{"x": 1}, {"y": 2}]}},
    {"ph": "X", "name": "}]", "ts": 2, "dur": 2, "args": {"]": "[{"}},
    {"ph": "s", "name": "\\", "ts": 3, "id": 1},
    {},
    {"ph": "X", "name": "last", "ts": 4.25, "dur": 0},
]


def whole(path: Path) -> tuple[list, dict]:
    trace = ChromeTrace(path)
    events = [event for block in trace.blocks() for event in block.events]
    return events, trace.meta


def written(folder: Path, text: str | bytes, name: str = "t.json") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block", [1, 3, 17, 64, 1 << 20])
def test_events_come_whole_whatever_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, block: int
) -> None:
    monkeypatch.setattr(chrome, "BLOCK_BYTES", block)
    head, foot = {"schemaVersion": 1, "x": {"traceEvents": "no"}}, {"baseTimeNanoseconds": 7, "list": [{"a": [1]}]}
    path = written(tmp_path, json.dumps({**head, "traceEvents": EVENTS, **foot}, indent=indent))
    assert whole(path) == (EVENTS, {**head, **foot})
    assert whole(written(tmp_path, json.dumps(EVENTS, indent=indent))) == (EVENTS, {})


def test_no_events_is_a_trace_too(tmp_path: Path) -> None:
    assert whole(written(tmp_path, '{"traceEvents": [ ], "a": 1}')) == ([], {"a": 1})
    assert whole(written(tmp_path, "\ufeff[]")) == ([], {})


def test_gzip_is_seen_through(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert whole(path)[0] == EVENTS


def test_a_long_tail_behind_the_events_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "BLOCK_BYTES", 64)
    frames = {str(i): {"name": f"f{i}", "parents": [{"p": i}]} for i in range(200)}
    path = written(tmp_path, json.dumps({"traceEvents": EVENTS, "stackFrames": frames}))
    assert whole(path) == (EVENTS, {"stackFrames": frames})


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    for document in ({"a": [1], "traceEvents": EVENTS, "b": {"c": [2]}}, EVENTS):
        text = json.dumps(document).encode()
        for cut in range(len(text)):
            with pytest.raises(DataError):
                whole(written(tmp_path, text[:cut]))


def test_every_truncation_of_gzip_is_reported(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": EVENTS * 20}).encode())
    for cut in range(2, len(packed)):
        with pytest.raises(DataError, match="the gzip stream ends early"):
            whole(written(tmp_path, packed[:cut]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no trace"),
        ("{}", "no trace"),
        ('"traceEvents": [', "no trace"),
        ('{"traceEvents": [{"ts": 1}, {"ts": }]}', "damaged"),
        ('{"traceEvents": [{"ts": 1}] x}', "behind the events"),
        ("[{}] x", "behind the events"),
        ('{"traceEvents": [{"ts": NaN}]}', "damaged"),
        (b"\x1f\x8bnonsense", "gzip stream"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        whole(written(tmp_path, text))


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        whole(tmp_path / "nowhere.json")


def exact(text: str) -> list[int]:
    block = Block(json.loads(f"[{text}]"), text.encode())
    return stamps_ns(block, [event["ts"] for event in block.events if "ts" in event], file="t").tolist()


def test_stamps_are_exact_where_floats_are_not() -> None:
    assert exact('{"ts": 1695835542514261.123}, {"ts": 1695835542514261.124}') == [
        1695835542514261123,
        1695835542514261124,
    ]
    assert exact('{"ts": 7776000000000.001}, {"ts":7776000000000.002}') == [7776000000000001, 7776000000000002]
    assert exact('{"ts": 8.5830000000000002}, {"ts": 5}, {"dur": 3}') == [8583, 5000]
    assert exact('{"ts": 1695835542514261}') == [1695835542514261000]
    assert exact('{"ts": 1695835542514261.5}, {"ts": 1695835542514261}') == [1695835542514261500, 1695835542514261000]
    assert exact('{"ts": -7776000000000.5}') == [-7776000000000500]


def test_a_stamp_among_the_arguments_is_ignored() -> None:
    text = '{"args": {"ts": 3.5}, "ts": 1695835542514261.123}, {"args": {"ts": 1}}'
    assert exact(text) == [1695835542514261123]
    text = '{"args": {"ts": 1695835542514261.9}}, {"ts": 1695835542514261.123}'
    block = Block(json.loads(f"[{text}]"), text.encode())
    assert stamps_ns(block, [1695835542514261.123], file="t").tolist() == [1695835542514261123]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4 * 10**18), min_size=1, max_size=5))
def test_any_nanosecond_survives(stamps: list[int]) -> None:
    text = ",".join(f'{{"ts": {ns // 1000}.{ns % 1000:03d}}}' for ns in stamps)
    assert exact(text) == stamps


@pytest.mark.parametrize("stamp", ["x", None, [1], 1e400])
def test_a_stamp_that_is_no_number_is_reported(stamp) -> None:
    with pytest.raises(DataError, match="time stamp"):
        stamps_ns(Block([], b""), [stamp], file="t")
