import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality

joules = st.floats(0, 1e9, allow_nan=False)
parts = st.builds(
    Part,
    device=st.sampled_from(["cpu:0", "cpu:1", "gpu:0"]),
    component=st.sampled_from(["package", "dram", "board"]),
    energy_j=joules,
    quality=st.sampled_from(list(Quality)),
    meter=st.sampled_from(["rapl", "cpu-model"]),
    band_j=joules,
    carbon_g=joules,
)


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    start_s = draw(st.floats(0, 1e9))
    return Footprint(
        parts=tuple(draw(st.lists(parts, max_size=4))),
        idle_j=draw(joules),
        unattributed_j=draw(joules),
        carbon_g=draw(joules),
        idle_g=draw(joules),
        unattributed_g=draw(joules),
        idle_band_j=draw(joules),
        facility_j=draw(joules),
        start_s=start_s,
        end_s=start_s + draw(st.floats(0, 1e6)),
        duration_s=draw(st.floats(0, 1e6)),
        signal=Signal.AVERAGE,
    )


@given(footprints())
def test_the_empty_footprint_is_neutral(a: Footprint) -> None:
    left, right = Footprint() + a, a + Footprint()
    assert left == right
    assert math.isclose(left.energy_j, a.energy_j, rel_tol=1e-12)
    assert left.carbon_g == a.carbon_g
    assert (left.start_s, left.end_s) == (a.start_s, a.end_s)


@given(footprints(), footprints(), footprints())
def test_addition_is_associative_and_conserves(a: Footprint, b: Footprint, c: Footprint) -> None:
    left, right = (a + b) + c, a + (b + c)
    assert math.isclose(left.energy_j, right.energy_j, rel_tol=1e-9)
    assert math.isclose(left.energy_j, a.energy_j + b.energy_j + c.energy_j, rel_tol=1e-9)
    assert math.isclose(left.attributed_j + left.idle_j + left.unattributed_j, left.energy_j, rel_tol=1e-9)
    assert [part.key for part in left.parts] == [part.key for part in right.parts]
    assert left.end_s == max(a.end_s, b.end_s, c.end_s)
    assert left.quality == right.quality
    assert left.idle_quality == right.idle_quality


def test_the_total_is_only_as_good_as_its_weakest_part() -> None:
    measured = Footprint(parts=(Part("gpu:0", "board", 5.0, Quality.MEASURED, "nvml"),))
    modelled = Footprint(parts=(Part("cpu:0", "package", 1.0, Quality.MODELLED, "cpu-model"),))
    assert measured.quality is Quality.MEASURED
    assert (measured + modelled).quality is Quality.MODELLED
    assert Footprint(idle_j=1.0, idle_quality=Quality.ASSUMED).quality is Quality.ASSUMED


def test_grams_of_different_scopes_are_never_added() -> None:
    with pytest.raises(DataError, match="scope direct and lifecycle"):
        Footprint(scope=Scope.DIRECT) + Footprint(scope=Scope.LIFECYCLE)


def test_grams_are_only_as_good_as_their_weakest_intensity() -> None:
    assumed = Footprint(carbon_g=1.0, carbon_quality=Quality.ASSUMED)
    assert (Footprint() + assumed).carbon_quality is (assumed + Footprint()).carbon_quality is Quality.ASSUMED


def test_what_only_rounding_misses_is_covered() -> None:
    footprint = Footprint(
        parts=(Part("cpu:0", "package", 0.1 + 0.2, Quality.MEASURED, "rapl"),),
        carbon_covered_j=0.3,
        facility_j=0.3,
        duration_s=0.1 + 0.2,
        covered_s=0.3,
    )
    assert (footprint.coverage_ratio, footprint.carbon_coverage_ratio, footprint.pue) == (1.0, 1.0, 1.0)
    assert Footprint(duration_s=1.0, covered_s=0.999999).coverage_ratio < 1.0


@given(footprints(), st.floats(0, 1))
def test_portions_add_up_to_the_whole(a: Footprint, ratio: float) -> None:
    both = a.portion(ratio) + a.portion(1 - ratio)
    added = ("energy_j", "idle_j", "unattributed_j", "carbon_g", "idle_g", "unattributed_g", "facility_j", "duration_s")
    for name in (*added, "band_j"):
        assert math.isclose(getattr(both, name), getattr(a, name), rel_tol=1e-9, abs_tol=1e-12), name
    of_parts = [math.fsum(part.carbon_g for part in one.parts) for one in (both, a)]
    assert math.isclose(*of_parts, rel_tol=1e-9, abs_tol=1e-12)
    assert (both.start_s, both.end_s, both.signal) == (a.start_s, a.end_s, a.signal)
    assert math.isclose(a.portion(ratio).energy_j, ratio * a.energy_j, rel_tol=1e-9, abs_tol=1e-12)
    assert a.portion(1.0) == a


def test_a_footprint_reads_well_in_a_terminal_and_a_notebook() -> None:
    part = Part("cpu:0", "server", 3600.0, Quality.MODELLED, "cpu-model", band_j=1800.0)
    footprint = Footprint((part,), carbon_g=0.25, facility_j=4320.0, duration_s=90.0, covered_s=90.0)
    assert str(footprint) == "3.60 kJ (1.00 Wh) modelled ± 50 %, 250 mg CO2e, measured, 1 min 30 s"
    assert footprint._repr_html_().startswith("<table><tr><th>energy</th><td>3.60 kJ (1.00 Wh) modelled")
    assert (footprint.energy_kwh, footprint.cost(0.5)) == (pytest.approx(1e-3), pytest.approx(0.6e-3))
    assert "50.0 % of the time covered" in str(Footprint((part,), duration_s=90.0, covered_s=45.0))
    assert "no carbon source" in str(Footprint())


def test_idle_joules_are_as_good_as_those_that_have_some() -> None:
    none = Footprint(idle_quality=Quality.ASSUMED)
    some = Footprint(idle_j=2.0)
    assert (none + some).idle_quality is (some + none).idle_quality is Quality.MEASURED
    assert (none + Footprint()).idle_quality is (Footprint() + none).idle_quality is Quality.ASSUMED
