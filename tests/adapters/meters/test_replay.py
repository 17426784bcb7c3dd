import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.meters import replay
from joulery.adapters.meters.replay import ReplayMeter, open_replay
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.store.run.series import write_series


class Clock:
    now_s = 7.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ReplayMeter.__init__, "__defaults__", (made,))
    return made


def csv(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    return file


def test_power_is_held_and_ends_with_the_recording(tmp_path: Path, clock: Clock) -> None:
    meter = open_replay(csv(tmp_path, "t_s,power_w\n100,5\n101,7\n103,9\n"))
    (channel,) = meter.channels
    assert (channel.device, channel.component, channel.kind) == ("cpu:0", "package", ReadingKind.POWER)
    assert (channel.meter, channel.quality) == ("replay", Quality.ASSUMED)
    seen = []
    for _ in range(5):
        seen.append(meter.read()[0])
        clock.now_s += 0.999
    assert seen[:4] == [5.0, 5.0, 7.0, 7.0]
    assert math.isnan(seen[4]) or seen[4] == 7.0
    clock.now_s += 5
    assert math.isnan(meter.read()[0])
    assert math.isnan(meter.read()[0])
    notes = meter.notes()
    assert "recorded at another time" in notes[0]
    assert notes[1:] == ("cpu:0: the recording is over after 3.000 s",)


def test_a_counter_is_interpolated(tmp_path: Path, clock: Clock) -> None:
    meter = open_replay(csv(tmp_path, "t_s,energy_j,device,component\n0,100,gpu:1,board\n2,140,gpu:1,board\n"))
    (channel,) = meter.channels
    assert (channel.device, channel.component, channel.kind) == ("gpu:1", "board", ReadingKind.COUNTER)
    clock.now_s += 0.5
    assert meter.read() == pytest.approx((110.0,))
    clock.now_s += 1.5
    assert meter.read() == pytest.approx((140.0,))
    meter.close()
    assert math.isnan(meter.read()[0])


def test_the_power_series_of_a_run_is_a_recording(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "power.parquet"
    write_series(
        tmp_path,
        "power",
        {
            "t_ns": np.array([1_000_000_000, 1_500_000_000, 2_000_000_000, 1_000_000_000]),
            "value": np.array([1.0, math.nan, 3.0, 40.0]),
            "unit": ["J", "J", "J", "W"],
            "device": ["cpu:0", "cpu:0", "cpu:0", "gpu:0"],
            "component": ["package", "package", "package", "board"],
            "channel": np.array([0, 0, 0, 1]),
        },
    )
    meter = open_replay(file)
    assert [(c.device, c.kind) for c in meter.channels] == [
        ("cpu:0", ReadingKind.COUNTER),
        ("gpu:0", ReadingKind.POWER),
    ]
    assert meter.read() == (1.0, 40.0)
    clock.now_s += 0.5
    assert meter.read()[0] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "row", "says"),
    [
        ("", None, "holds no readings"),
        ("t_s,power_w\n", None, "holds no readings"),
        ("t_s,power_w\n0,1\n0,2\n", 3, "time 0.0 does not follow 0.0"),
        ("t_s,power_w\n5,1\n4,2\n", 3, "does not follow"),
        ("t_s,energy_j\n0,5\n1,4\n", 3, "the counter falls from 5.0 to 4.0"),
        ("t_s,power_w\n0,x\n", 2, "not a reading"),
        ("t_s,power_w\n0,-1\n", 2, "value >= 0"),
        ("t_s,power_w\n0,inf\n", 2, "value >= 0"),
        ("t_s,power_w\nnan,1\n", 2, "finite time"),
        ("time,watts\n0,1\n", 2, "not a reading"),
        ("t_s,unit,value\n0,kWh,1\n", 2, "not a reading"),
    ],
)
def test_a_bad_recording_is_one_error_that_names_the_row(tmp_path: Path, text: str, row: int | None, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        open_replay(csv(tmp_path, text))
    assert caught.value.row == row


def test_what_is_no_recording_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_replay(tmp_path / "nothing.csv")
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        open_replay(tmp_path / "bad.csv")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a Parquet file"):
        open_replay(tmp_path / "bad.parquet")


def test_missing_values_are_as_if_not_taken(tmp_path: Path, clock: Clock) -> None:
    meter = open_replay(csv(tmp_path, "t_s,energy_j\n0,0\n1,\n2,20\n3,nan\n4,40\n"))
    clock.now_s += 1.0
    assert meter.read() == pytest.approx((10.0,))
    clock.now_s += 2.0
    assert meter.read() == pytest.approx((30.0,))


@given(text=st.text(alphabet="t_spower,wj0123456789.-\nenai ", max_size=200))
def test_no_text_brings_it_down(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "trace.csv"
    file.write_text(text)
    try:
        meter = open_replay(file)
    except DataError:
        return
    assert len(meter.read()) == len(meter.channels) > 0


def test_the_module_says_what_it_reads() -> None:
    assert "t_ns" in (replay.__doc__ or "")
