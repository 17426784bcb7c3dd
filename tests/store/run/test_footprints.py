import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.store.run.footprints import footprint_from_dict, footprint_to_dict

CONTRACT = ["energy_j", "carbon_g", "idle_j", "unattributed_j", "duration_s", "coverage_ratio", "quality", "parts"]
PART = Part("cpu:0", "package", 30.0, Quality.MODELLED, "cpu-model", 15.0, 0.007)
joules = st.floats(0, 1e6)

FULL = Footprint(
    parts=(PART,),
    idle_j=10.0,
    unattributed_j=2.0,
    carbon_g=0.01,
    carbon_covered_j=42.0,
    embodied_g=0.5,
    facility_j=50.0,
    start_s=100.0,
    end_s=110.0,
    duration_s=10.0,
    covered_s=8.0,
    idle_quality=Quality.ASSUMED,
    idle_band_j=6.0,
    idle_g=0.002,
    unattributed_g=0.001,
    signal=Signal.AVERAGE,
    scope=Scope.DIRECT,
    carbon_quality=Quality.ASSUMED,
)


def test_the_contract_for_scripts() -> None:
    report = footprint_to_dict(FULL)
    assert list(report)[: len(CONTRACT)] == CONTRACT
    assert report["energy_j"] == 42.0
    assert (report["band_j"], report["idle_band_j"]) == (21.0, 6.0)
    assert report["carbon_g"] == 0.01
    assert report["coverage_ratio"] == 0.8
    assert report["quality"] == "assumed"
    assert report["pue"] == 50.0 / 42.0
    assert report["parts"] == [
        {
            "device": "cpu:0",
            "component": "package",
            "energy_j": 30.0,
            "quality": "modelled",
            "meter": "cpu-model",
            "band_j": 15.0,
            "carbon_g": 0.007,
        }
    ]
    assert (report["idle_g"], report["unattributed_g"]) == (0.002, 0.001)


def test_unknown_is_null_and_never_zero() -> None:
    nothing_read = footprint_to_dict(Footprint(start_s=0.0, end_s=5.0, duration_s=5.0, signal=Signal.AVERAGE))
    assert [nothing_read[k] for k in ("energy_j", "idle_j", "unattributed_j", "carbon_g", "facility_j")] == [None] * 5
    assert nothing_read["coverage_ratio"] == 0.0
    no_carbon = footprint_to_dict(Footprint(parts=(PART,), duration_s=1.0, covered_s=1.0))
    assert (no_carbon["carbon_g"], no_carbon["carbon_coverage_ratio"]) == (None, 0.0)
    assert (no_carbon["idle_g"], no_carbon["parts"][0]["carbon_g"]) == (None, None)
    uncovered = footprint_to_dict(Footprint(parts=(PART,), duration_s=1.0, covered_s=1.0, signal=Signal.AVERAGE))
    assert uncovered["carbon_g"] is None
    empty = footprint_to_dict(Footprint())
    assert (empty["energy_j"], empty["start_s"], empty["end_s"]) == (0.0, None, None)


def test_no_energy_with_a_known_intensity_is_no_carbon() -> None:
    still = Footprint(duration_s=1.0, covered_s=1.0, signal=Signal.AVERAGE, scope=Scope.DIRECT)
    assert footprint_to_dict(still)["carbon_g"] == 0.0


@given(energy_j=joules, idle_j=joules, lost_j=joules, covered=st.floats(1e-3, 1))
def test_it_survives_a_round_trip_through_json(energy_j: float, idle_j: float, lost_j: float, covered: float) -> None:
    footprint = Footprint(
        parts=(Part("gpu:0", "board", energy_j, Quality.MEASURED, "nvml"), PART),
        idle_j=idle_j,
        unattributed_j=lost_j,
        carbon_g=1.5,
        carbon_covered_j=1.0,
        facility_j=3.0,
        start_s=0.0,
        end_s=1.0,
        duration_s=1.0,
        covered_s=covered,
        idle_band_j=0.5,
        signal=Signal.MARGINAL,
        scope=Scope.LIFECYCLE,
        carbon_quality=Quality.ASSUMED,
    )
    assert footprint_from_dict(orjson.loads(orjson.dumps(footprint_to_dict(footprint)))) == footprint


def test_an_empty_one_survives_too() -> None:
    again = footprint_from_dict(footprint_to_dict(Footprint()))
    assert math.isnan(again.start_s)
    assert math.isnan(again.end_s)
    assert again + FULL == FULL


@pytest.mark.parametrize("broken", [{}, {**footprint_to_dict(FULL), "quality": 1, "idle_quality": "great"}])
def test_nonsense_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(DataError, match="not a footprint"):
        footprint_from_dict(broken)


def test_a_document_older_than_the_grams_of_parts_does_not_know_them() -> None:
    old = footprint_to_dict(FULL)
    for key in ("idle_g", "unattributed_g"):
        del old[key]
    del old["parts"][0]["carbon_g"]
    read = footprint_from_dict(old)
    assert read.carbon_g == FULL.carbon_g
    assert all(math.isnan(grams) for grams in (read.idle_g, read.unattributed_g, read.parts[0].carbon_g))
    assert footprint_to_dict(read)["idle_g"] is None
    old["carbon_g"] = old["carbon_signal"] = old["carbon_scope"] = None
    assert footprint_from_dict(old).idle_g == 0.0
