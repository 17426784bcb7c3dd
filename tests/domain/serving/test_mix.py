import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.domain.serving.mix import OWN, MixCounter, MixStep, VariantMix

WARM = frozenset({"small", "medium", "large"})


def always(*weights: tuple[str, float]) -> VariantMix:
    return VariantMix((MixStep(100.0, math.inf, weights),))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 400))
def test_shares_are_kept_to_within_one_request(first, second, requests):
    small, medium = first, (1 - first) * second
    counter = MixCounter(always(("small", small), ("medium", medium)))
    found = Counter(counter.choose("large", WARM, 0, 0.0) for _ in range(requests))
    for name, share in (("small", small), ("medium", medium), ("large", 1 - small - medium)):
        assert abs(found[name] - share * requests) < 1.01 + 1e-6 * requests


def test_less_slack_has_leaner_weights():
    """50 requests/s, 200 /s and 1000 /s within 60, 80 and 90 ms."""
    steps = (MixStep(50.0, 0.06), MixStep(200.0, 0.08, (("medium", 1.0),)), MixStep(1e3, 0.09, (("small", 1.0),)))
    counter = MixCounter(VariantMix(steps))

    def chosen(waiting: int, oldest_wait_s: float) -> str:
        return counter.choose("large", WARM, waiting, oldest_wait_s)

    assert [chosen(n, 0.0) for n in (0, 3, 4, 16, 17, 500)] == [
        *("large", "large", "medium", "medium", "small", "small")
    ]
    assert [chosen(1, wait_s) for wait_s in (0.03, 0.05, 0.076, 9.0)] == ["large", "medium", "small", "small"]
    assert counter.mix.steady == ()


def test_a_variant_that_is_not_loaded_is_answered_by_the_replicas_own():
    assert MixCounter(always(("small", 1.0))).choose("large", frozenset(), 5, 0.1) == "large"
    assert MixCounter().choose("large", WARM, 5, 0.1) == "large" and OWN.as_list() == []


def test_a_mix_is_written_and_read():
    mix = VariantMix((MixStep(50.0, 0.06), MixStep(1e3, 0.09, (("small", 1.0),))))
    assert VariantMix.of(mix.as_list()) == mix and VariantMix.of([]) == OWN


@pytest.mark.parametrize(
    "step",
    [
        MixStep(0.0, 1.0),
        MixStep(math.inf, 1.0),
        MixStep(1.0, math.nan),
        MixStep(1.0, 1.0, (("small", 1.5),)),
        MixStep(1.0, 1.0, (("small", 0.7), ("medium", 0.7))),
        MixStep(1.0, 1.0, (("small", -0.1),)),
    ],
)
def test_nonsense_is_no_mix(step):
    with pytest.raises(DataError):
        VariantMix((step,))


def test_what_is_no_mix_is_refused():
    for value in ([0], [{"rate_rps": 1}], [{"rate_rps": "x", "delay_s": 1, "weights": {}}], 5):
        with pytest.raises(DataError):
            VariantMix.of(value)


@given(
    st.lists(st.tuples(st.floats(0.3, 0.99), st.floats(0.01, 5.0)), min_size=2, max_size=5),
    st.integers(1, 500),
    st.floats(0.0, 1.0),
)
def test_flows_that_keep_a_floor_keep_it_request_by_request(variants, requests, slack):
    """Replicas of several variants: accuracy is below the flows' by less than the variants span, over the requests."""
    accuracy = {f"v{at}": ratio for at, (ratio, _) in enumerate(variants)}
    total = math.fsum(flow for _, flow in variants)
    shares = {f"v{at}": flow / total for at, (_, flow) in enumerate(variants)}
    planned = math.fsum(share * accuracy[name] for name, share in shares.items())
    floor = planned - slack * (planned - min(accuracy.values()))
    counter = MixCounter(VariantMix((MixStep(1.0, 0.0, tuple(shares.items())),)))
    chosen = [counter.choose("", accuracy.keys(), 0, 0.0) for _ in range(requests)]
    assert set(chosen) <= accuracy.keys(), "every request has a variant"
    mean = math.fsum(accuracy[name] for name in chosen) / requests
    span = max(accuracy.values()) - min(accuracy.values())
    assert mean >= floor - len(variants) * span / requests - 1e-9


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(1, 8), st.integers(0, 40)), min_size=1, max_size=40))
def test_a_pick_counts_nothing_until_it_is_counted(share, batches):
    """However large the batches turn out, each variant's share is kept to within one of them."""
    steps = (MixStep(50.0, 0.4, (("medium", share),)), MixStep(1e3, 9e9, (("small", share),)))
    one, other = MixCounter(VariantMix(steps)), MixCounter(VariantMix(steps))
    for requests, waiting in batches:
        one.pick("large", WARM, 40 - waiting, 0.1)
        chosen = one.pick("large", WARM, waiting, 0.0)
        one.count(requests)
        assert chosen in {"large", "medium", "small"}
        if requests == 1 and all(size == 1 for size, _ in batches):
            assert chosen == other.choose("large", WARM, waiting, 0.0)
    counter = MixCounter(always(("small", share)))
    answered: Counter[str] = Counter()
    for requests, waiting in batches:
        answered[counter.pick("large", WARM, waiting, 0.0)] += requests
        counter.count(requests)
    assert abs(answered["small"] - share * sum(answered.values())) <= 8 + 1e-9
