import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import CapabilityError, DataError
from joulery.store.run.readings import read_recording, read_recordings
from joulery.store.run.samples import Appender, SampleWriter

CLOCK = {"unix_ns": 1_700_000_000_000_000_000, "monotonic_ns": 5_000}
OFFSET = CLOCK["unix_ns"] - CLOCK["monotonic_ns"]


def write(file: Path, rows: int, columns: int = 2) -> None:
    writer = SampleWriter(file, [f"c{i}" for i in range(columns)], CLOCK)
    for row in range(rows):
        writer.record(6_000 + row, tuple(row + 0.5 * column for column in range(columns)))
    writer.close()


def test_records_read_back_in_unix_time(tmp_path: Path) -> None:
    file = tmp_path / "a.samples"
    write(file, 3)
    recording = read_recording(file)
    assert recording.columns == ["c0", "c1"]
    assert recording.t_ns.tolist() == [OFFSET + 6_000, OFFSET + 6_001, OFFSET + 6_002]
    assert recording.column("c1").tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(DataError, match="no column 'c2'"):
        recording.column("c2")


def test_the_file_is_what_its_description_says(tmp_path: Path) -> None:
    file = tmp_path / "a.samples"
    write(file, 1)
    line, body = file.read_bytes().split(b"\n", 1)
    assert (len(line) + 1) % 8 == 0
    assert json.loads(line) == {"schema": "joulery.samples/1", "columns": ["c0", "c1"], **CLOCK}
    assert body == np.array([6_000], "<i8").tobytes() + np.array([0.0, 0.5], "<f8").tobytes()


def test_missing_values_stay_missing(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "a.samples", ["x"], CLOCK)
    writer.record(1, (float("nan"),))
    writer.close()
    assert np.isnan(read_recording(tmp_path / "a.samples").values[0, 0])


@given(rows=st.integers(0, 6), columns=st.integers(0, 3), cut=st.integers(0, 200))
def test_a_torn_tail_costs_the_torn_record_alone(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, cut: int
) -> None:
    file = tmp_path_factory.mktemp("torn") / "a.samples"
    write(file, rows, columns)
    whole = file.read_bytes()
    start = whole.index(b"\n") + 1
    kept = whole[: max(start, len(whole) - cut)]
    file.write_bytes(kept)
    recording = read_recording(file)
    assert len(recording.t_ns) == (len(kept) - start) // (8 * (1 + columns))
    assert recording.values.shape == (len(recording.t_ns), columns)


def test_records_after_one_out_of_order_are_not_believed(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "a.samples", ["x"], CLOCK)
    for stamp in (10, 20, 15, 30):
        writer.record(stamp, (1.0,))
    writer.close()
    assert (read_recording(tmp_path / "a.samples").t_ns - OFFSET).tolist() == [10, 20]


def test_a_block_of_zeros_at_the_end_is_not_believed(tmp_path: Path) -> None:
    """What a file system may leave behind when the power goes."""
    write(tmp_path / "a.samples", 2)
    with (tmp_path / "a.samples").open("ab") as file:
        file.write(bytes(24 * 4))
    assert len(read_recording(tmp_path / "a.samples").t_ns) == 2


@given(data=st.binary(max_size=300))
def test_no_bytes_bring_the_reader_down(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "a.samples"
    file.write_bytes(data)
    with pytest.raises(DataError):
        read_recording(file)


@pytest.mark.parametrize("header", ["[]", "{}", '{"schema": "joulery.samples/2"}', '{"schema": "joulery.samples/1"}'])
def test_a_foreign_header_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.samples").write_text(header + "\n")
    with pytest.raises(DataError):
        read_recording(tmp_path / "a.samples")


def test_a_folder_of_recordings_leaves_out_a_file_torn_in_its_header(tmp_path: Path) -> None:
    write(tmp_path / "a.samples", 2)
    (tmp_path / "b.samples").write_bytes((tmp_path / "a.samples").read_bytes()[:20])
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert list(read_recordings(tmp_path)) == ["a"]
    assert read_recordings(tmp_path / "nothing") == {}


def test_what_waits_is_not_in_the_file_until_it_is_flushed(tmp_path: Path) -> None:
    appender = Appender(tmp_path / "a")
    appender.add(b"one")
    assert (tmp_path / "a").read_bytes() == b""
    appender.flush()
    appender.add(b"two")
    appender.close()
    appender.close()
    assert (tmp_path / "a").read_bytes() == b"onetwo"
    with pytest.raises(CapabilityError, match="File exists"):
        Appender(tmp_path / "a")


FULL = """
import resource, signal, sys
from pathlib import Path
from joulery.domain.errors import CapabilityError
from joulery.store.run.samples import SampleWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = SampleWriter(Path(sys.argv[1]), ["x"], {"unix_ns": 1, "monotonic_ns": 0})
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def write(start, count):
    for i in range(start, start + count):
        writer.record(1 + i, (float(i),))
limit(1000)
write(0, 100)
writer.flush()                      # full, and patient
write(100, 100)
writer.flush()
limit(10 ** 9)
writer.flush()                      # room again: nothing was lost
limit(10_000)
write(200, 1000)
writer.flush()
other = SampleWriter(Path(sys.argv[1] + "2"), ["x"], {"unix_ns": 1, "monotonic_ns": 0})
for i in range(700):
    other.record(1 + i, (float(i),))
try:
    other.close()
except CapabilityError:
    print("little, but the end")
try:
    write(1200, 300_000)
    writer.flush()
except CapabilityError as error:
    print(error, "|", error.hint)
try:
    writer.close()
except CapabilityError:
    print("not all")
"""


def test_a_full_disk_is_waited_out_for_a_while_and_then_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.samples"
    done = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True)
    at_the_end, first, second = done.stdout.splitlines()
    assert at_the_end == "little, but the end"
    assert "File too large" in first
    assert second == "not all"
    values = read_recording(file).column("x")
    assert len(values) >= 500
    assert values.tolist() == list(range(len(values)))
    assert file.stat().st_size == 10_000
