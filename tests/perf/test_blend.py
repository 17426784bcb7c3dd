import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind
from joulery.perf.blend import blended, with_assumed_variant
from joulery.perf.layouts import Predictor

ONE, TWO = (Slice(SliceKind.CPU, cores=n) for n in (1, 2))


def predictor(times_s: dict[str, float], pieces=(ONE,)) -> Predictor:
    entries = []
    for name, mean_s in times_s.items():
        for piece in pieces:
            spread = mean_s * np.linspace(0.8, 1.2, 41)
            timings = Timings(spread, 0.9 * spread)
            entries.append(SliceProfile(name, piece, timings, timings, 5.0 + 100 * mean_s))
    profile = Profile({}, tuple(entries), 20.0, Quality.MODELLED, "cpu-model")
    return Predictor(profile, {name: 0.5 + mean_s for name, mean_s in times_s.items()})


@given(st.floats(0.001, 0.3), st.floats(0.001, 0.3), st.integers(1, 99))
def test_seconds_joules_and_accuracy_of_a_blend_are_the_means_by_shares(a_s, b_s, percent):
    one = predictor({"a": a_s, "b": b_s})
    shares = (("a", percent / 100), ("b", 1 - percent / 100))
    mixed = blended(one, shares, "a")
    (entry,) = mixed.profile.entries
    parts = {item.variant: item for item in one.profile.entries}
    for value in (lambda item: item.loaded.mean_s, lambda item: item.energy_j):
        expected = math.fsum(share * value(parts[name]) for name, share in shares)
        assert value(entry) == pytest.approx(expected, rel=2e-3)
    assert mixed.accuracy_ratio["a"] == pytest.approx(math.fsum(s * one.accuracy_ratio[n] for n, s in shares))
    low, high = sorted((a_s, b_s))
    assert 0.8 * low * (1 - 1e-9) <= entry.loaded.service_s.min() and entry.loaded.service_s.max() <= 1.2 * high * 1.001


def test_a_blend_of_one_is_that_one():
    one = predictor({"a": 0.01, "b": 0.02})
    (entry,) = blended(one, (("b", 1.0),), "b").profile.entries
    assert entry.loaded.mean_s == pytest.approx(0.02, rel=1e-3)
    assert entry.loaded.quantile_s(0.95) == pytest.approx(one.profile.entries[1].loaded.quantile_s(0.95), rel=2e-3)


def test_a_blend_needs_a_slice_on_which_all_were_measured():
    here, there = predictor({"a": 0.01}), predictor({"b": 0.02}, (TWO,))
    both = Predictor(
        Profile({}, (*here.profile.entries, *there.profile.entries), 20.0, Quality.MODELLED, "m"), {"a": 0.5, "b": 0.6}
    )
    with pytest.raises(DataError, match=r"a and b.* no common slice"):
        blended(both, (("a", 0.5), ("b", 0.5)), "a")


def test_a_variant_without_a_profile_is_taken_as_another_or_as_it_was_seen():
    profile = predictor({"a": 0.01}, (ONE, TWO)).profile
    assumed = with_assumed_variant(profile, "new", "a", {})
    assert [assumed.entry("new", piece).loaded.mean_s for piece in (ONE, TWO)] == pytest.approx([0.01, 0.01])
    live = with_assumed_variant(profile, "new", "a", {"new": Timings([0.03, 0.05], [0.03, 0.05])})
    assert live.entry("new", TWO).loaded.mean_s == pytest.approx(0.04)
    assert with_assumed_variant(live, "new", "a", {}) is live, "what is known stays"
