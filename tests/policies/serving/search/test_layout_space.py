import math

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.gpu.mig import A100_40GB, GIB
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.serving.observation import Sample
from joulery.policies.serving.search.layout_space import (
    LayoutSpace,
    core_partitions,
    cpu_slices,
    layouts,
    slice_menu,
    unfit_edges,
)
from joulery.policies.serving.search.trials import MeasuredLayout, TrialBudget, Verdict, judge

CUTS = [cpu_slices(cut) for cut in core_partitions(2)]


def test_two_cores_and_three_variants_are_the_nine_layouts_of_the_predicting_policy():
    space = LayoutSpace.of(slice_menu(CUTS), ["lite0", "lite1", "lite2"], (), 1)
    assert set(space.layouts) == set(layouts(CUTS, ["lite0", "lite1", "lite2"])) and len(space.layouts) == 9
    assert [space.row(Layout.parse(layout.names())) for layout in space.layouts] == list(range(9))
    less = space.without({space.layouts[0]})
    assert space.layouts[0] not in less.layouts and len(less.graph) == 8
    assert less.graph.index(less.graph.graphs[3]) == 3 and less.layouts[3] == space.layouts[4]


def test_a_gpu_has_the_published_number_of_configurations_and_several_are_filled_alike():
    one = LayoutSpace.of(A100_40GB, ["a", "b", "c"], (), 1)
    assert len(one.layouts) == 438
    two = LayoutSpace.of(A100_40GB, ["a", "b", "c"], (), 2)
    assert len(two.layouts) == 438 and all(n % 2 == 0 for layout in two.layouts for n in layout.counts.values())


def test_what_does_not_fit_a_slice_is_an_edge_that_does_not_exist():
    edges = unfit_edges(A100_40GB, {"tiny": 1 * GIB, "huge": 30 * GIB, "unknown": 0})
    assert set(edges) == {("huge", name) for name in ("4g.20gb", "3g.20gb", "2g.10gb", "1g.5gb")}
    space = LayoutSpace.of(A100_40GB, ["tiny", "huge"], edges, 1)
    large = [layout for layout in space.layouts if "huge" in layout.counts]
    assert large == [Layout.parse(["huge on 7g.40gb"])]
    with pytest.raises(InfeasibleError):
        LayoutSpace.of(A100_40GB, ["huge"], [*edges, ("huge", "7g.40gb")], 1)
    assert unfit_edges(slice_menu(CUTS), {"huge": 30 * GIB}) == (), "a CPU slice has no memory of its own"


def test_the_cuts_of_a_gpu_give_the_space_of_its_menu():
    cuts = [tuple(Slice(SliceKind.MIG, profile=name) for name in cut) for cut in A100_40GB.multisets]
    menu = slice_menu(cuts)
    assert [(p.name, p.compute_slices, p.memory_bytes) for p in menu.profiles] == [
        (p.name, p.compute_slices, p.memory_bytes) for p in A100_40GB.profiles
    ]
    ours, theirs = (LayoutSpace.of(each, ["a", "b", "c"], (), 1) for each in (menu, A100_40GB))
    assert set(ours.layouts) == set(theirs.layouts)


def test_shares_and_whole_gpus_have_cuts_too():
    halves = (Slice(SliceKind.MPS, share_ratio=0.5),) * 2
    shared = LayoutSpace.of(slice_menu([(Slice(SliceKind.MPS),), halves]), ["a", "b"], (), 1)
    assert len(shared.layouts) == 2 + 3
    whole = LayoutSpace.of(slice_menu([(Slice(SliceKind.WHOLE),) * 2]), ["a", "b"], (), 1)
    assert len(whole.layouts) == 3
    with pytest.raises(InfeasibleError):
        slice_menu([])


BUDGET = TrialBudget(min_requests=100, energy_tolerance_ratio=0.05)


def sample(low: float, point: float, high: float, requests: int = 200, **changes) -> Sample:
    fields = {"energy_j": 2.0, "energy_band_j": 0.01, "served": {"v": requests}, **changes}
    return Sample(Layout.parse(["v on cpu:1"]), 0.0, requests, 0, point, low, high, **fields)


@pytest.mark.parametrize(
    ("seen", "now", "at_the_end"),
    [
        (sample(0.08, 0.09, 0.099), Verdict.WITHIN, Verdict.WITHIN),
        (sample(0.08, 0.09, 0.101), None, Verdict.UNSURE),
        (sample(0.101, 0.12, 0.2), Verdict.ABOVE, Verdict.ABOVE),
        (sample(0.101, 0.12, math.inf, requests=12), Verdict.ABOVE, Verdict.ABOVE),
        (sample(0.08, 0.09, 0.099, requests=99), None, Verdict.NO_DATA),
        (sample(0.08, 0.09, 0.099, energy_band_j=0.2), None, Verdict.WITHIN),
        (sample(0.08, 0.09, 0.099, energy_j=math.nan), None, Verdict.NO_DATA),
        (sample(0.08, 0.09, 0.099, energy_j=0.0), None, Verdict.NO_DATA),
        (sample(math.inf, math.inf, math.inf, served={}, energy_j=math.nan), None, Verdict.NO_DATA),
        (sample(-math.inf, math.nan, math.inf, requests=0, energy_j=math.nan), None, Verdict.NO_DATA),
    ],
)
def test_a_trial_is_judged_by_its_intervals(seen, now, at_the_end):
    assert judge(seen, 0.1, BUDGET, time_is_up=False) is now
    assert judge(seen, 0.1, BUDGET, time_is_up=True) is at_the_end
    again = Sample.from_dict(seen.as_dict())
    assert judge(again, 0.1, BUDGET, time_is_up=True) is at_the_end, "the log says the same"


def test_a_layout_not_sure_to_keep_a_limit_counts_as_above_it():
    sure = MeasuredLayout.of(sample(0.08, 0.09, 0.099), {"v": 0.8}, 50.0)
    assert sure.within(0.1) and sure.for_search(0.1).latency_s == 0.09 and sure.metrics.accuracy_ratio == 0.8
    assert not sure.within(0.095) and sure.for_search(0.095).latency_s > 0.095, "another limit, judged anew"
    never = MeasuredLayout.of(sample(math.inf, math.inf, math.inf), {"v": 0.8}, 50.0)
    assert never.for_search(0.1).latency_s == pytest.approx(1.0), "an infinite latency counts as ten limits"
