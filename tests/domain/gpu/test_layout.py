import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.service import Slice, SliceKind

slices = st.one_of(
    st.builds(Slice, st.just(SliceKind.CPU), cores=st.integers(1, 8)),
    st.builds(Slice, st.just(SliceKind.MIG), profile=st.sampled_from(["1g.5gb", "3g.20gb"])),
    st.builds(Slice, st.just(SliceKind.MPS), share_ratio=st.integers(1, 100).map(lambda n: n / 100)),
)
instances = st.lists(st.builds(Instance, st.sampled_from("abc"), slices), min_size=1, max_size=6)


@given(instances, st.randoms())
def test_order_does_not_matter_and_json_keeps_everything(items, random):
    layout = Layout(items)
    shuffled = list(items)
    random.shuffle(shuffled)
    assert Layout(shuffled) == layout and hash(Layout(shuffled)) == hash(layout)
    assert Layout.parse(layout.names()) == layout
    assert sum(layout.counts.values()) == len(items) == len(layout.slices)


def test_it_reads_well():
    one, two = Slice(SliceKind.CPU, cores=1), Slice(SliceKind.CPU, cores=2)
    layout = Layout([Instance("lite2", one), Instance("lite1", one), Instance("lite0", two)])
    assert str(layout) == "lite0 on cpu:2 | lite1 on cpu:1 | lite2 on cpu:1"
    assert layout.counts == {"lite0": 1, "lite1": 1, "lite2": 1}


@pytest.mark.parametrize(
    "broken", [[], ["a"], ["a on "], ["a on moon:3"], ["a on cpu:x"], ["a on cpu:0"], ["a on mps:2"], [None], None]
)
def test_what_is_no_layout_is_refused(broken):
    with pytest.raises(DataError):
        Layout.parse(broken)


def test_a_variant_may_be_called_anything():
    odd = Layout([Instance("on on cpu:1", Slice(SliceKind.CPU, cores=2))])
    assert Layout.parse(odd.names()) == odd
    assert Slice.parse("whole") == Slice(SliceKind.WHOLE)
