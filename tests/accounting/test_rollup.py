import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.rollup import PART_KEYS, by_name, by_part, by_time, total
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import Tick

joules = st.floats(0, 1e6)
parts = st.builds(
    Part,
    device=st.sampled_from(["cpu:0", "gpu:0", "gpu:1"]),
    component=st.sampled_from(["package", "dram", "board"]),
    energy_j=joules,
    quality=st.sampled_from(Quality),
    meter=st.sampled_from(["rapl", "nvml"]),
    band_j=joules,
)
footprints = st.builds(
    Footprint, parts=st.lists(parts, max_size=6).map(tuple), idle_j=joules, unattributed_j=joules, carbon_g=joules
)


@given(footprints, st.sampled_from(sorted(PART_KEYS)))
def test_rows_by_part_add_up_to_the_total(footprint, by):
    rows = by_part(footprint, by)
    assert math.fsum(row.energy_j for row in rows) == pytest.approx(footprint.energy_j, rel=1e-9, abs=1e-9)
    assert [row.key for row in rows[-2:]] == ["idle", "unattributed"]
    assert len({row.key for row in rows}) == len(rows)


@given(st.lists(st.tuples(st.sampled_from("abc"), footprints), max_size=5))
def test_rows_by_name_add_up_to_the_total(named):
    rows = by_name(named)
    summed = total(named)
    assert math.fsum(row.energy_j for row in rows) == pytest.approx(summed.energy_j, rel=1e-9, abs=1e-9)
    assert [row.key for row in rows] == sorted({name for name, _ in named})


def test_the_grams_of_rows_by_part_add_up_and_are_unknown_without_a_signal():
    parts = (
        Part("cpu:0", "dram", 1.0, Quality.MEASURED, "rapl", 0.0, 0.25),
        Part("gpu:0", "board", 1.0, Quality.MEASURED, "nvml", 0.0, 1.0),
    )
    footprint = Footprint(parts=parts, idle_j=1.0, unattributed_j=1.0, idle_g=0.5, unattributed_g=0.125, carbon_g=1.875)
    assert all(math.isnan(row.carbon_g) for row in by_part(footprint, "device"))
    known = replace(footprint, signal=Signal.AVERAGE, scope=Scope.DIRECT)
    assert [(row.key, row.carbon_g) for row in by_part(known, "device")] == [
        ("cpu:0", 0.25),
        ("gpu:0", 1.0),
        ("idle", 0.5),
        ("unattributed", 0.125),
    ]
    assert [row.carbon_g for row in by_part(known + known, "meter")] == [2.0, 0.5, 1.0, 0.25]


def test_a_row_by_part_is_as_good_as_its_weakest_part():
    footprint = Footprint(
        parts=(
            Part("cpu:0", "dram", 1.0, Quality.ASSUMED, "table", 0.5),
            Part("cpu:0", "package", 2.0, Quality.MEASURED, "rapl", 0.25),
        )
    )
    (row, _, _) = by_part(footprint, "device")
    assert (row.key, row.energy_j, row.band_j, row.quality) == ("cpu:0", 3.0, 0.75, Quality.ASSUMED)
    assert [r.key for r in by_part(footprint, "component")[:2]] == ["cpu:0 dram", "cpu:0 package"]
    assert [r.key for r in by_part(footprint, "meter")[:2]] == ["rapl", "table"]
    assert [r.key for r in by_part(footprint, "quality")[:2]] == ["assumed", "measured"]


def test_the_band_of_what_is_left_is_shared_by_idle_and_unattributed():
    footprint = Footprint(idle_j=0.3, unattributed_j=0.1, idle_band_j=0.2)
    assert [row.band_j for row in by_part(footprint, "device")] == pytest.approx([0.15, 0.05])
    assert [row.band_j for row in by_part(Footprint(), "device")] == [0.0, 0.0]
    assert by_name([("a", footprint)])[0].band_j == 0.2


def test_grams_without_a_signal_are_unknown_not_zero():
    (row,) = by_name([("a", Footprint(idle_j=1.0))])
    assert math.isnan(row.carbon_g)
    (row,) = by_name([("a", Footprint(idle_j=1.0, carbon_g=2.0, signal=Signal.AVERAGE, scope=Scope.DIRECT))])
    assert row.carbon_g == 2.0


def test_grams_of_different_meaning_are_refused_with_the_name_of_the_run():
    average = Footprint(carbon_g=1.0, signal=Signal.AVERAGE, scope=Scope.LIFECYCLE)
    marginal = Footprint(carbon_g=1.0, signal=Signal.MARGINAL, scope=Scope.LIFECYCLE)
    with pytest.raises(DataError, match=r"run-b .* average and marginal"):
        total([("run-a", average), ("run-b", marginal)])


def test_ticks_by_time_add_up_to_the_last_cumulative_value():
    nan = math.nan
    energies = [10.0, nan, 40.0, 50.0]
    ticks = [Tick(float(i + 1), 1.0, energy_j=e, carbon_g=e / 10, power_w=1.0) for i, e in enumerate(energies)]
    rows = by_time(ticks, lambda t_s: "early" if t_s < 2 else "late")
    assert [(row.key, row.energy_j, row.carbon_g) for row in rows] == [("early", 10.0, 1.0), ("late", 40.0, 4.0)]


def test_a_tick_belongs_to_the_time_in_which_most_of_it_lies():
    rows = by_time([Tick(3600.0, 1.0, energy_j=5.0)], lambda t_s: str(int(t_s // 3600)))
    assert rows[0].key == "0"


def test_time_without_any_known_energy_is_unknown():
    (row,) = by_time([Tick(1.0, 1.0)], lambda _: "hour")
    assert math.isnan(row.energy_j)
    assert math.isnan(row.carbon_g)
