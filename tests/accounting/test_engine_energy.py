"""Joules of models from the engine's own counters: conserved whatever happens to engine, meter and grid."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.engine_energy import MAX_MODELS, OTHER_MODELS, EngineBook
from joulery.accounting.token_energy import PROMPT_WEIGHT
from joulery.domain.energy.workload import EngineCounters, ModelCounters
from joulery.domain.quality import Quality

NAN = math.nan
GOOD = Quality.MEASURED


def counters(active=1.0, **models):
    return EngineCounters("vllm", {name: ModelCounters(*values) for name, values in models.items()}, active)


def observed(*steps):
    """A book after (joules, counters) a second apart."""
    book = EngineBook()
    for at_s, (energy_j, seen) in enumerate(steps):
        book.spend(energy_j, 360.0, GOOD)
        book.observe(seen, float(at_s))
    return book


def sums(book):
    parts = (book.idle.energy_j, book.unattributed.energy_j, book.pending_j)
    return math.fsum([model.energy_j for model in book.models.values()] + list(parts))


COUNTS = st.one_of(st.just(NAN), st.integers(0, 50).map(float))
MODELS = st.dictionaries(
    st.sampled_from("ab"), st.builds(ModelCounters, st.integers(0, 50).map(float), COUNTS, COUNTS, COUNTS)
)
STEPS = st.lists(
    st.tuples(
        st.one_of(st.just(NAN), st.floats(0, 1e5)),
        st.one_of(st.just(NAN), st.floats(0, 900)),
        st.one_of(st.none(), st.builds(EngineCounters, st.just("vllm"), MODELS, st.sampled_from([NAN, 0.0, 3.0]))),
    ),
    max_size=12,
)


@given(STEPS)
def test_models_idle_and_the_rest_add_up_to_the_engine(steps):
    book, spent = EngineBook(), []
    for at_s, (energy_j, g_per_kwh, seen) in enumerate(steps):
        book.spend(energy_j, g_per_kwh, GOOD)
        spent.append(0.0 if math.isnan(energy_j) else energy_j)
        if seen is not None:
            book.observe(seen, float(at_s))
        assert sums(book) == pytest.approx(math.fsum(spent), rel=1e-9, abs=1e-9)
        assert book.total.energy_j == pytest.approx(math.fsum(spent), rel=1e-9, abs=1e-9)
        for model in book.models.values():
            assert model.requests >= 0 and not model.prompt_tokens < 0 and not model.output_tokens < 0


def test_models_share_by_their_tokens():
    book = observed((0.0, counters(a=(0, 0, 0), b=(0, 0, 0))), (100.0, counters(a=(1, 40, 30), b=(2, 0, 60))))
    work = {"a": 40 * PROMPT_WEIGHT + 30, "b": 60.0}
    for name, weight in work.items():
        assert book.models[name].energy_j == pytest.approx(100.0 * weight / sum(work.values()))
    per = book.per_unit("b", 1.0)
    assert per.output_token_j == pytest.approx(1.0)
    assert per.request_j == pytest.approx(30.0)
    assert per.request_g == pytest.approx(30.0 * 360 / 3.6e6)


def test_models_that_count_no_tokens_share_by_computing_time_then_by_requests():
    timed = observed(
        (0.0, counters(a=(0, NAN, NAN, 0.0), b=(0, NAN, NAN, 0.0))),
        (8.0, counters(a=(1, NAN, NAN, 3.0), b=(9, NAN, NAN, 1.0))),
    )
    assert timed.models["a"].energy_j == pytest.approx(6.0)
    assert math.isnan(timed.per_unit("a", 1.0).token_j)
    counted = observed((0.0, counters(a=(0,), b=(0,))), (8.0, counters(a=(1,), b=(3,))))
    assert counted.models["b"].energy_j == pytest.approx(6.0)


def test_what_came_before_the_first_look_is_no_models():
    book = observed((500.0, counters(a=(10, 100, 1000))))
    assert book.models == {} and book.unattributed.energy_j == 500.0


def test_a_restart_counts_for_no_model():
    book = observed(
        (0.0, counters(a=(10, 100, 1000))),
        (50.0, counters(a=(11, 110, 1100))),
        (70.0, counters(a=(1, 5, 20))),  # it has started again
        (30.0, counters(a=(2, 10, 40))),
    )
    assert book.restarts == 1
    assert book.unattributed.energy_j == 70.0
    assert book.models["a"].energy_j == 80.0 and book.models["a"].output_tokens == 120.0


def test_an_engine_that_does_not_answer_keeps_its_joules_for_the_tokens_of_that_time():
    book = EngineBook()
    book.observe(counters(a=(0, 0, 0)), 0.0)
    for energy_j in (10.0, 20.0):
        book.spend(energy_j, 1.0, GOOD)
    book.observe(counters(a=(1, 0, 60)), 2.0)
    assert book.per_unit("a", 2.0).output_token_j == pytest.approx(0.5)


def test_a_silent_meter_takes_the_tokens_of_that_time_out_of_the_ratio():
    book = observed((0.0, counters(a=(0, 0, 0))), (NAN, counters(a=(1, 0, 60))), (30.0, counters(a=(2, 0, 120))))
    assert book.models["a"].output_tokens == 60.0
    assert book.per_unit("a", 2.0).output_token_j == pytest.approx(0.5)


def test_without_a_request_the_joules_are_the_idle_engines_and_with_one_they_wait():
    idle = observed((0.0, counters(0.0, a=(1, 1, 1))), (40.0, counters(0.0, a=(1, 1, 1))))
    assert (idle.idle.energy_j, idle.pending_j) == (40.0, 0.0)
    for active in (2.0, NAN):
        busy = observed((0.0, counters(active, a=(1, 1, 1))), (40.0, counters(active, a=(1, 1, 1))))
        assert (busy.idle.energy_j, busy.pending_j) == (0.0, 40.0)


def test_ratios_are_of_the_last_minutes_and_absent_where_nothing_is_known():
    book = EngineBook()
    for at_s in range(0, 700, 10):
        book.spend(10.0 if at_s < 350 else 20.0, NAN if at_s > 690 else 1.0, GOOD)
        book.observe(counters(a=(at_s, 0, at_s)), float(at_s))
    assert book.per_unit("a", 690.0).output_token_j == pytest.approx(2.0)
    assert math.isnan(book.per_unit("nothing", 690.0).output_token_j)
    book.spend(20.0, NAN, GOOD)
    book.observe(counters(a=(700, 0, 700)), 700.0)
    assert math.isnan(book.per_unit("a", 700.0).output_token_g)
    assert math.isnan(book.per_unit("a", 5000.0).output_token_j)


def test_models_beyond_a_number_are_one():
    many = {f"m{i}": (1, 1, 1) for i in range(3 * MAX_MODELS)}
    more = dict.fromkeys(many, (2, 2, 2))
    book = observed((0.0, counters(**many)), (600.0, counters(**more)))
    assert len(book.models) == MAX_MODELS and OTHER_MODELS in book.models
    assert math.fsum(model.energy_j for model in book.models.values()) == pytest.approx(600.0)
