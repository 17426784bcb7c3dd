import numpy as np
import pytest

from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.store.run.directory import create_run, open_run
from joulery.store.run.intensity import read_intensity, write_intensity

SERIES = CarbonSeries(
    "GB",
    [0.0, 1800.0, 3600.0, 7200.0],
    [100.0, np.nan, 250.0],
    signal=Signal.MARGINAL,
    scope=Scope.DIRECT,
    source="a file",
    issued_at_s=-5.0,
    estimated=[False, True, False],
    quality=Quality.ASSUMED,
)


def test_a_series_comes_back_with_its_gaps_and_labels(tmp_path):
    with create_run(tmp_path / "run", kind="measure") as writer:
        write_intensity(writer, SERIES)
    back = read_intensity(open_run(tmp_path / "run"))
    for name in ("zone", "signal", "scope", "source", "issued_at_s", "quality"):
        assert getattr(back, name) == getattr(SERIES, name), name
    for name in ("edges_s", "g_per_kwh", "estimated"):
        np.testing.assert_array_equal(getattr(back, name), getattr(SERIES, name))


def test_a_run_without_intensity_has_none(tmp_path):
    create_run(tmp_path / "run", kind="measure").close()
    assert read_intensity(open_run(tmp_path / "run")) is None


@pytest.mark.parametrize("label", [{}, {"zone": "GB"}, 5])
def test_damaged_labels_are_one_clear_error(tmp_path, label):
    with create_run(tmp_path / "run", kind="measure") as writer:
        write_intensity(writer, SERIES)
        writer.describe(carbon=label)
    with pytest.raises(DataError, match="carbon: "):
        read_intensity(open_run(tmp_path / "run"))


def test_a_lost_series_is_one_clear_error(tmp_path):
    with create_run(tmp_path / "run", kind="measure") as writer:
        write_intensity(writer, SERIES)
    (tmp_path / "run" / "carbon.parquet").unlink()
    with pytest.raises(DataError, match="there is no such series"):
        read_intensity(open_run(tmp_path / "run"))
