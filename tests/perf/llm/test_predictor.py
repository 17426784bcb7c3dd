"""Predictions of a made-up engine, and of the measured runs where the data set is."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.llm.errors import Distance
from joulery.perf.llm.predictor import ENERGY, POWER, TOKEN_TIME, LlmPredictor
from joulery.perf.llm.runs import LlmRun
from tests.perf.llm.made_up import MODELS, point, runs, truth

PREDICTOR = LlmPredictor(runs())


@pytest.mark.parametrize(
    ("asked", "distance", "basis"),
    [
        (point(batch=8), Distance.MEASURED, "measured"),
        (point(batch=24), Distance.INSIDE, "fitted"),
        (point(batch=200), Distance.BEYOND, "fitted"),
        (point(batch=24, gpus=2), Distance.CONFIGURATION, "transferred"),
        (point(batch=24, task="code"), Distance.CONFIGURATION, "transferred"),
        (point("Qwen/Qwen3-VL-8B-Instruct", batch=24), Distance.MODEL, "transferred"),
        (point("meta-llama/Llama-3.1-8B", batch=24), Distance.ARCHITECTURE, "transferred"),
        (point(gpu="H200", batch=24), Distance.GPU, "transferred"),
    ],
)
def test_every_prediction_says_what_it_stands_on(asked, distance, basis):
    (found,) = PREDICTOR.predict([asked])
    assert (found.distance, found.basis) == (distance, basis)
    assert {ENERGY, TOKEN_TIME, POWER, "itl_p50", "itl_p99"} == set(found.bands)
    assert all(0 < band.typical_ratio <= band.p90_ratio < math.inf for band in found.bands.values())


@pytest.mark.parametrize(("measured", "asked"), [("", "chat"), ("chat", "")])
def test_runs_that_state_no_task_stand_for_any_and_points_without_one_for_the_only_one(measured, asked):
    stated = [truth(point(batch=load, task=measured)) for load in (8, 16, 64)]
    found = LlmPredictor(stated).predict([point(batch=load, task=asked) for load in (16, 30)])
    assert [each.basis for each in found] == ["measured", "fitted"]
    assert found[0].throughput_tps == truth(point(batch=16)).throughput_tps
    assert found[0].point.task == asked


def test_a_measured_load_is_answered_with_its_measurement():
    (found,) = PREDICTOR.predict([point(batch=32)])
    measured = truth(point(batch=32))
    assert found.throughput_tps == measured.throughput_tps
    assert found.energy_per_token_j == measured.energy_per_token_j


@pytest.mark.parametrize(("batch", "most"), [(12, 0.02), (48, 0.02), (256, 0.1), (4, 0.1)])
def test_a_made_up_engine_is_met_between_and_beyond_its_loads(batch, most):
    (found,) = PREDICTOR.predict([point(batch=batch)])
    wanted = truth(point(batch=batch))
    assert found.throughput_tps == pytest.approx(wanted.throughput_tps, rel=most)
    assert found.power_w == pytest.approx(wanted.power_w, rel=most)
    assert found.itl_p99_s == pytest.approx(wanted.itl_p99_s, rel=most)


def test_joules_a_token_are_watts_over_tokens_a_second():
    for found in PREDICTOR.predict([point(batch=b) for b in (4, 8, 20, 300)]):
        assert found.energy_per_token_j == pytest.approx(found.power_w / found.throughput_tps, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([*MODELS, "google/gemma-3-27b-it"]), st.sampled_from(["H100", "B200", "MI300X"]))
def test_throughput_and_token_times_are_monotone_over_the_load(model, gpu):
    found = PREDICTOR.predict([point(model, gpu, batch) for batch in (2, 5, 8, 13, 32, 77, 128, 500)])
    for figure in ("throughput_tps", "itl_p50_s", "itl_p99_s"):
        values = [getattr(each, figure) for each in found]
        assert values == sorted(values), figure


def test_farther_questions_have_wider_errors():
    near, far = PREDICTOR.predict([point(batch=24), point("meta-llama/Llama-3.1-8B", "MI300X", 24)])
    assert near.bands[ENERGY].p90_ratio < far.bands[ENERGY].p90_ratio


def test_an_answer_does_not_depend_on_what_else_is_asked():
    alone = PREDICTOR.predict([point(batch=24)])[0].bands[ENERGY]
    assert PREDICTOR.predict([point(batch=24), point(MODELS[1], batch=3)])[0].bands[ENERGY] == alone


def test_runs_without_power_are_predicted_without():
    bare = [LlmRun(run.point, run.throughput_tps) for run in runs()]
    (found,) = LlmPredictor(bare).predict([point(batch=24)])
    assert found.throughput_tps == pytest.approx(truth(point(batch=24)).throughput_tps, rel=0.02)
    assert found.power_w is found.energy_per_token_j is found.itl_p99_s is None


@pytest.mark.parametrize("few", [[], runs()[:1]])
def test_fewer_than_two_runs_are_no_curve(few):
    with pytest.raises(DataError, match="too few"):
        LlmPredictor(few)


def test_a_model_that_does_not_fit_is_said_so():
    (found,) = PREDICTOR.predict([point("meta-llama/Llama-3.1-70B-Instruct")])
    assert not found.fits_memory
