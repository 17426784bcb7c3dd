import json

import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind

ONE, TWO = (Slice(SliceKind.CPU, cores=n) for n in (1, 2))


def profile() -> Profile:
    alone = Timings([0.004, 0.005, 0.0041], [0.004, 0.0049, 0.0040])
    return Profile(
        {"processor": "some", "cores": 2},
        (
            SliceProfile("lite0", ONE, alone, Timings([0.006, 0.0061], [0.005, 0.0051]), 9.5, 0.3, 0.25, 90_000_000),
            SliceProfile("lite0", TWO, alone, alone, 9.5),
        ),
        idle_w=float("nan"),
        quality=Quality.MODELLED,
        meter="cpu-model",
        band_ratio=0.3,
        created_s=1.75e9,
        warmup=5,
        models={"lite0": "ab" * 32},
    )


def test_json_keeps_everything():
    written = json.loads(json.dumps(profile().as_dict()))
    read = Profile.from_dict(written)
    assert read.as_dict() == written
    entry = read.entry("lite0", ONE)
    np.testing.assert_array_equal(entry.loaded.service_s, [0.006, 0.0061])
    assert (entry.active_w, entry.startup_s, entry.startup_cpu_s, entry.memory_bytes) == (9.5, 0.3, 0.25, 90_000_000)
    assert np.isnan(read.idle_w) and read.quality is Quality.MODELLED and read.models == {"lite0": "ab" * 32}
    whole = read.entry("lite0", TWO)
    assert whole.loaded is whole.alone, "no neighbour, nothing else to measure"


def test_figures_derived_from_samples():
    timings = Timings([1.0, 1.0, 2.0, 4.0], [0.5, 0.5, 1.0, 2.0])
    assert (timings.mean_s, timings.mean_cpu_s, timings.quantile_s(0.5)) == (2.0, 1.0, 1.5)
    assert timings.drift_ratio == pytest.approx(2.0)
    assert timings.mean_error_ratio == pytest.approx(1.96 * np.std([1, 1, 2, 4], ddof=1) / 2 / 2)
    assert np.isnan(Timings([1.0], [1.0]).mean_error_ratio) and np.isnan(Timings([1.0], [1.0]).drift_ratio)
    entry = profile().entry("lite0", ONE)
    assert entry.energy_j == pytest.approx(0.00505 * 9.5), "joules are those of the loaded machine"


@pytest.mark.parametrize("service", [[], [0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 2.0]])
def test_samples_that_cannot_be_are_refused(service):
    with pytest.raises(DataError):
        Timings(service, [1.0])
    with pytest.raises(DataError):
        Timings([1.0], [-1.0])


def test_watts_must_be_positive():
    for watts in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="above idle"):
            SliceProfile("v", ONE, Timings([1.0], [1.0]), Timings([1.0], [1.0]), watts)


def test_pairs_are_unique_and_missing_ones_are_named():
    entry = profile().entries[0]
    with pytest.raises(DataError, match="each variant once"):
        Profile({}, (entry, entry), 1.0, Quality.MODELLED, "m")
    with pytest.raises(DataError, match="lite2 was not measured on cpu:1"):
        profile().entry("lite2", ONE)


def test_other_schemas_and_damage_are_one_clear_error():
    good = profile().as_dict()
    for broken in (None, {}, {**good, "schema": "joulery.profile/2"}):
        with pytest.raises(DataError, match="not a profile"):
            Profile.from_dict(broken)
    for key in ("power", "entries", "machine", "models", "created_s"):
        with pytest.raises(DataError, match="not a usable profile"):
            Profile.from_dict({name: value for name, value in good.items() if name != key})
    with pytest.raises(DataError, match="not a usable profile"):
        Profile.from_dict({**good, "power": {**good["power"], "quality": "certain"}})
