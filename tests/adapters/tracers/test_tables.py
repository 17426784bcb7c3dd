"""Events and power as CSV: what is read, and what is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.tracers.files import read_events
from joulery.adapters.tracers.tables import read_event_table, read_power_table
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


HEAD = "op,start_ns,dur_ns,device,lane,phase\n"


def test_events(tmp_path: Path) -> None:
    text = HEAD + 'a/b,1700000000000000001,10,CPU:0,main,forward\n"x,y",5,0,GPU:0,,\n'
    encoded = [text.encode(encoding) for encoding in ("utf-8", "utf-8-sig", "utf-16")]
    for content in (*encoded, *map(gzip.compress, encoded), "\ufeff" + text.replace("\n", "\r\n")):
        trace = read_events(written(tmp_path, content))
        assert trace.ops == ("a/b", "x,y") and trace.devices == ("CPU:0", "GPU:0")
        assert trace.start_ns.tolist() == [1700000000000000001, 5]
        assert trace.dur_ns.tolist() == [10, 0]
        assert [trace.phases[p] for p in trace.phase] == ["forward", ""]
        assert trace.lane[1] == -1 and trace.lane[0] >= 0


def test_lane_and_phase_may_be_left_out_and_columns_may_come_in_any_order(tmp_path: Path) -> None:
    trace = read_event_table(written(tmp_path, "device,extra,dur_ns,start_ns,op\nCPU:0,q,10,0,a\n"))
    assert trace.lane.tolist() == [-1] and trace.phases == ("",)
    assert len(read_event_table(written(tmp_path, HEAD))) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no such table"),
        ("op,start_ns\na,1\n", "no column dur_ns, device"),
        (HEAD + "a,1.5,2,CPU:0,,\n", "invalid value '1.5'"),
        (HEAD + "a,x,2,CPU:0,,\n", "invalid value 'x'"),
        (HEAD + "a,,2,CPU:0,,\n", "start_ns is empty"),
        (HEAD + "a,1,nan,CPU:0,,\n", "dur_ns is empty"),
        (HEAD + "a,1,-2,CPU:0,,\n", "ends 2 ns before it starts"),
        (HEAD + ",1,2,CPU:0,,\n", "op is empty"),
        (HEAD + "a,1,2,,,\n", "device is empty"),
        (HEAD + "a,1,2,CPU:0\n", "expected 6 cells"),
        (HEAD + "a,99999999999999999999,2,CPU:0,,\n", "invalid value"),
        (HEAD + "a,9000000000000000000,9000000000000000000,CPU:0,,\n", "beyond any clock"),
        ("op,op,start_ns,dur_ns,device\na,b,1,2,c\n", "two columns"),
        (b"\xff\xfe\x00op", "no such table"),
    ],
)
def test_bad_events_are_one_clear_error(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        read_event_table(written(tmp_path, text))
    assert caught.value.file


@pytest.mark.parametrize("kind", ["a workbook or an archive", "Parquet"])
def test_other_files_are_named(tmp_path: Path, kind: str) -> None:
    beginning = {"Parquet": b"PAR1", "a workbook or an archive": b"PK\x03\x04"}[kind]
    for read in (read_event_table, read_power_table):
        with pytest.raises(DataError, match=f"is {kind}, not CSV"):
            read(written(tmp_path, beginning + b"\0" * 20))


def test_gzip_cut_short_is_reported(tmp_path: Path) -> None:
    content = gzip.compress((HEAD + "a,1,2,CPU:0,,\n" * 5000).encode())
    with pytest.raises(DataError, match=r"ends early|damaged"):
        read_event_table(written(tmp_path, content[: len(content) // 2]))


def test_power_is_sorted_and_the_last_of_equal_stamps_counts(tmp_path: Path) -> None:
    text = "t_ns,device,power_w\n3,CPU:0,7\n5,CPU:0,nan\n0,CPU:0,10\n3,CPU:0,8\n1,GPU:0,50\n"
    cpu, gpu = read_power_table(written(tmp_path, text))
    assert (cpu.channel.device, cpu.channel.kind, cpu.channel.quality) == ("CPU:0", ReadingKind.POWER, Quality.MEASURED)
    assert cpu.t_ns.tolist() == [0, 3, 5]
    np.testing.assert_array_equal(cpu.values, [10, 8, np.nan])
    assert cpu.period_s == 2.5e-9 and len(gpu) == 1


def test_a_counter_is_preferred_and_components_are_apart(tmp_path: Path) -> None:
    text = (
        "t_ns,device,component,power_w,counter_j,wrap_j,averaging_s,quality\n"
        "0,CPU:0,package,5,1,262144,,measured\n4,CPU:0,package,5,2,262144,,measured\n"
        "0,CPU:0,dram,5,,,,\n4,CPU:0,dram,5,,,,\n0,GPU:0,,70,,,1.0,modelled\n9,GPU:0,,80,,,1.0,modelled\n"
    )
    dram, package, gpu = read_power_table(written(tmp_path, text))
    assert (package.channel.kind, package.channel.wrap_j) == (ReadingKind.COUNTER, 262144)
    assert package.values.tolist() == [1, 2] and dram.values.tolist() == [5, 5]
    assert (gpu.channel.kind, gpu.channel.averaging_s) == (ReadingKind.AVERAGE, 1.0)
    assert (gpu.channel.quality, gpu.channel.component) == (Quality.MODELLED, "package")


def test_a_stated_period_counts(tmp_path: Path) -> None:
    (trace,) = read_power_table(written(tmp_path, "t_ns,device,power_w\n0,CPU:0,7\n"), period_s=0.5)
    assert trace.period_s == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no such table"),
        ("t_ns,device\n1,CPU:0\n", "neither power_w nor counter_j"),
        ("t_ns,device,power_w\n", "no reading"),
        ("t_ns,device,power_w\n0,CPU:0,-1\n", "expected a finite value >= 0"),
        ("t_ns,device,power_w\n0,CPU:0,inf\n", "expected a finite value >= 0"),
        ("t_ns,device,power_w\n0,CPU:0,abc\n", "invalid value 'abc'"),
        ("t_ns,device,power_w\nx,CPU:0,1\n", "invalid value 'x'"),
        ("t_ns,device,power_w\n,CPU:0,1\n", "t_ns is empty"),
        ("t_ns,device,power_w,quality\n0,CPU:0,1,good\n", "good"),
        ("t_ns,device,power_w,quality\n0,CPU:0,1,measured\n1,CPU:0,1,modelled\n", "different quality"),
    ],
)
def test_bad_power_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_power_table(written(tmp_path, text))
