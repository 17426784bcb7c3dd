import math

import pytest

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.gpu.mig import A100_40GB, GIB
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.serving.spaces import core_partitions, cpu_slices, layouts
from joulery.policies.serving.trial_sample import Sample, Tried, Verdict, judge
from joulery.policies.serving.trial_space import TrialSpace, misfits, slice_menu

CUTS = [cpu_slices(cut) for cut in core_partitions(2)]


def test_two_cores_and_three_variants_are_the_nine_layouts_of_the_predicting_policy():
    space = TrialSpace.of(slice_menu(CUTS), ["lite0", "lite1", "lite2"], (), 1)
    assert set(space.layouts) == set(layouts(CUTS, ["lite0", "lite1", "lite2"])) and len(space.layouts) == 9
    assert [space.layouts[row] for row in space.rows().values()] == list(space.layouts)
    less = space.without({space.layouts[0]})
    assert space.layouts[0] not in less.layouts and len(less.graph) == 8
    assert less.graph.index(less.graph.graphs[3]) == 3 and less.layouts[3] == space.layouts[4]


def test_a_gpu_has_the_published_number_of_configurations_and_several_are_filled_alike():
    one = TrialSpace.of(A100_40GB, ["a", "b", "c"], (), 1)
    assert len(one.layouts) == 438
    two = TrialSpace.of(A100_40GB, ["a", "b", "c"], (), 2)
    assert len(two.layouts) == 438 and all(n % 2 == 0 for layout in two.layouts for n in layout.counts.values())


def test_what_does_not_fit_a_slice_is_an_edge_that_does_not_exist():
    edges = misfits(A100_40GB, {"tiny": 1 * GIB, "huge": 30 * GIB, "unknown": 0})
    assert set(edges) == {("huge", name) for name in ("4g.20gb", "3g.20gb", "2g.10gb", "1g.5gb")}
    space = TrialSpace.of(A100_40GB, ["tiny", "huge"], edges, 1)
    large = [layout for layout in space.layouts if "huge" in layout.counts]
    assert large == [Layout.parse(["huge on 7g.40gb"])]
    with pytest.raises(InfeasibleError):
        TrialSpace.of(A100_40GB, ["huge"], [*edges, ("huge", "7g.40gb")], 1)
    assert misfits(slice_menu(CUTS), {"huge": 30 * GIB}) == (), "a CPU slice has no memory of its own"


def test_the_cuts_of_a_gpu_give_the_space_of_its_menu():
    cuts = [tuple(Slice(SliceKind.MIG, profile=name) for name in cut) for cut in A100_40GB.multisets]
    menu = slice_menu(cuts)
    assert [(p.name, p.compute_slices, p.memory_bytes) for p in menu.profiles] == [
        (p.name, p.compute_slices, p.memory_bytes) for p in A100_40GB.profiles
    ]
    ours, theirs = (TrialSpace.of(each, ["a", "b", "c"], (), 1) for each in (menu, A100_40GB))
    assert set(ours.layouts) == set(theirs.layouts)


def test_shares_and_whole_gpus_have_cuts_too():
    halves = (Slice(SliceKind.MPS, share_ratio=0.5),) * 2
    shared = TrialSpace.of(slice_menu([(Slice(SliceKind.MPS),), halves]), ["a", "b"], (), 1)
    assert len(shared.layouts) == 2 + 3
    whole = TrialSpace.of(slice_menu([(Slice(SliceKind.WHOLE),) * 2]), ["a", "b"], (), 1)
    assert len(whole.layouts) == 3
    with pytest.raises(InfeasibleError):
        slice_menu([])


def sample(low: float, point: float, high: float, requests: int = 200, **changes) -> Sample:
    fields = {"energy_j": 2.0, "energy_band_j": 0.01, "served": {"v": requests}, **changes}
    return Sample(Layout.parse(["v on cpu:1"]), 0.0, requests, 0, point, low, high, **fields)


@pytest.mark.parametrize(
    ("seen", "now", "at_the_end"),
    [
        (sample(0.08, 0.09, 0.099), Verdict.KEEPS, Verdict.KEEPS),
        (sample(0.08, 0.09, 0.101), None, Verdict.UNSURE),
        (sample(0.101, 0.12, 0.2), Verdict.BREAKS, Verdict.BREAKS),
        (sample(0.101, 0.12, math.inf, requests=12), Verdict.BREAKS, Verdict.BREAKS),
        (sample(0.08, 0.09, 0.099, requests=99), None, Verdict.SILENT),
        (sample(0.08, 0.09, 0.099, energy_band_j=0.2), None, Verdict.KEEPS),
        (sample(0.08, 0.09, 0.099, energy_j=math.nan), None, Verdict.SILENT),
        (sample(0.08, 0.09, 0.099, energy_j=0.0), None, Verdict.SILENT),
        (sample(math.inf, math.inf, math.inf, served={}, energy_j=math.nan), None, Verdict.SILENT),
        (sample(-math.inf, math.nan, math.inf, requests=0, energy_j=math.nan), None, Verdict.SILENT),
    ],
)
def test_a_trial_is_judged_by_its_intervals(seen, now, at_the_end):
    assert judge(seen, 0.1, 100, 0.05, time_is_up=False) is now
    assert judge(seen, 0.1, 100, 0.05, time_is_up=True) is at_the_end
    again = Sample.from_dict(seen.as_dict())
    assert judge(again, 0.1, 100, 0.05, time_is_up=True) is at_the_end, "the log says the same"


def test_what_is_not_sure_to_keep_a_limit_is_told_as_breaking_it():
    sure = Tried.of(sample(0.08, 0.09, 0.099), {"v": 0.8}, 50.0)
    assert sure.keeps(0.1) and sure.told(0.1).latency_s == 0.09 and sure.metrics.accuracy_ratio == 0.8
    assert not sure.keeps(0.095) and sure.told(0.095).latency_s > 0.095, "another limit, judged anew"
    never = Tried.of(sample(math.inf, math.inf, math.inf), {"v": 0.8}, 50.0)
    assert never.told(0.1).latency_s == pytest.approx(1.0), "what never ends is told as ten limits"
