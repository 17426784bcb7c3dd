"""Eqs. 1-11 against the published predictions, and the laws they obey."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.perf.catalog import names, profile
from joulery.perf.catalog.synthetic_t4 import synthetic_t4
from joulery.perf.interference.model import Neighbourhood, clock_mhz, colocated_latency, demand_w, solo
from tests.data_folder import data_folder

V100 = profile("v100")
MODELS = sorted(V100.models)
process = st.tuples(st.sampled_from(MODELS), st.integers(1, 32), st.integers(1, 40).map(lambda n: 2.5 * n))


def together(processes, coefficients=V100):
    """Predicted times of every process of a GPU."""
    solos = [solo(coefficients[model], batch, share) for model, batch, share in processes]
    around = Neighbourhood()
    for each in solos:
        around = around.with_process(each)
    return [
        colocated_latency(coefficients.gpu, coefficients[model], batch, own, around)
        for (model, batch, _), own in zip(processes, solos, strict=True)
    ], around


def published_predictions():
    with (data_folder("igniter") / "fig11_13_prediction.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_twenty_published_predictions():
    rows = published_predictions()
    assert len(rows) == 20
    for row in rows:
        own = (row["model"], int(row["batch"]), float(row["r_pct"]))
        if row["fig"] == "13":
            others = [(model, 3, 25.0) for model in MODELS if model != row["model"]]
        else:
            model, batch, share = row["co_located(model:batch:r)"].split(":")
            others = [(model, int(batch), float(share))]
        times, _ = together([own, *others])
        assert times[0].total_ms == pytest.approx(float(row["iGniter_pred_ms"]), abs=1e-4), row


@pytest.mark.parametrize("name", ["app12", "example3"])
def test_the_published_plan_in_every_digit(name):
    truth = json.loads((data_folder("igniter") / "ground_truth_v100.json").read_text())[name]
    for gpu in truth["gpus"]:
        rows = [truth["workloads"][who] for who, _, _ in gpu]
        times, around = together(
            [(row["model"], batch, share) for row, (_, share, batch) in zip(rows, gpu, strict=True)]
        )
        for row, predicted, (_, _, batch) in zip(rows, times, gpu, strict=True):
            assert predicted.total_ms == pytest.approx(row["t_inf"], abs=1e-3)
            assert predicted.gpu_ms == pytest.approx(row["t_gpu"], rel=1e-6)
            assert predicted.schedule_ms == pytest.approx(row["t_sch"], rel=1e-6)
            assert predicted.active_ms == pytest.approx(row["t_act"], rel=1e-6)
            assert predicted.load_ms == pytest.approx(row["t_load"], rel=1e-6)
            assert predicted.feedback_ms == pytest.approx(row["t_fb"], rel=1e-6)
            assert predicted.throughput_rps(batch) == pytest.approx(row["thr"], rel=1e-6)
            assert clock_mhz(V100.gpu, around) == pytest.approx(row["freq"], rel=1e-6)
            assert demand_w(V100.gpu, around) == pytest.approx(row["p_demand"], rel=1e-6)


def test_a_process_alone_feels_nothing():
    times, around = together([("alexnet", 1, 20.0)])
    assert around.processes == 1
    assert times[0].schedule_ms == V100["alexnet"].launch_ms
    assert times[0].active_ms == solo(V100["alexnet"], 1, 20.0).active_ms
    assert times[0].gpu_ms == times[0].schedule_ms + times[0].active_ms


@given(st.lists(process, min_size=1, max_size=8), process)
def test_a_neighbourhood_is_the_sum_of_its_processes(processes, one_more):
    _, around = together(processes)
    model, batch, share = one_more
    own = solo(V100[model], batch, share)
    more = around.with_process(own)
    assert more.processes == around.processes + 1
    assert more.power_w == pytest.approx(around.power_w + own.power_w)
    assert more.cache_percent == pytest.approx(around.cache_percent + own.cache_percent)


@given(st.lists(process, min_size=1, max_size=6), process)
def test_a_neighbour_more_never_helps(processes, one_more):
    before, _ = together(processes)
    after, _ = together([*processes, one_more])
    assert all(b.total_ms <= a.total_ms for b, a in zip(before, after, strict=False))


@given(st.lists(process, min_size=1, max_size=6), st.data())
def test_a_share_more_helps_its_owner_alone_and_no_neighbour(processes, data):
    at = data.draw(st.integers(0, len(processes) - 1))
    model, batch, share = processes[at]
    grown = [*processes[:at], (model, batch, share + 2.5), *processes[at + 1 :]]
    before, _ = together(processes)
    after, _ = together(grown)
    assert solo(V100[model], batch, share + 2.5).active_ms < solo(V100[model], batch, share).active_ms
    assert all(b.total_ms <= a.total_ms for i, (b, a) in enumerate(zip(before, after, strict=True)) if i != at)


@given(st.lists(process, min_size=1, max_size=40))
def test_times_are_never_negative_and_the_clock_never_above_its_maximum(processes):
    times, around = together(processes)
    assert clock_mhz(V100.gpu, around) <= V100.gpu.clock_max_mhz
    assert all(each.gpu_ms > 0 and each.total_ms >= each.gpu_ms for each in times)


def test_a_demand_that_leaves_no_clock_takes_for_ever():
    around = Neighbourhood(2, 5000.0, 10.0)
    assert colocated_latency(V100.gpu, V100["vgg19"], 1, solo(V100["vgg19"], 1, 50.0), around).gpu_ms == float("inf")


def test_an_unknown_model_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match="model 'yolo' on V100") as caught:
        V100["yolo"]
    assert caught.value.expected == "alexnet, resnet50, ssd, vgg19"
    assert "did you mean" not in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        V100["alexnett"]
    assert caught.value.hint.startswith("did you mean alexnet?")


def test_the_catalog_names_what_it_holds():
    assert "v100" in names()
    with pytest.raises(ConfigError, match="no GPU type 'h200'"):
        profile("h200")
    with pytest.raises(ConfigError) as caught:
        profile("v100-calibratd")
    assert caught.value.hint.startswith("did you mean v100-calibrated?")


def test_the_catalog_equals_the_published_coefficients():
    document = json.loads((data_folder("igniter") / "coefficients_v100.json").read_text())
    hardware = document["hardware"]
    assert (V100.gpu.power_cap_w, V100.gpu.clock_max_mhz, V100.gpu.idle_w) == (
        hardware["P"],
        hardware["F"],
        hardware["p_idle"],
    )
    assert V100.gpu.clock_mhz_per_w == hardware["alpha_f"]
    for name, model in document["models"].items():
        assert V100[name].k1 == model["k1"]
        assert V100[name].launch_ms == model["t_sch_solo_total"]
        assert V100[name].cache_sensitivity == model["alpha_cache"]


def test_the_synthetic_t4_equals_the_one_of_the_data_set_and_says_what_it_is():
    document = json.loads((data_folder("igniter") / "synthetic_t4.json").read_text())
    t4 = synthetic_t4(document["s"])
    assert "synthetic" in t4.source
    assert "synthetic" in t4.gpu.name
    assert t4.gpu.clock_mhz_per_w == pytest.approx(document["hardware"]["alpha_f"], rel=1e-6)
    for name, model in document["models"].items():
        mine = t4[name]
        assert (mine.kernels, mine.load_bytes) == (model["n_k"], model["d_load"])
        assert mine.k2 == pytest.approx(model["k2"], rel=1e-6)
        assert mine.k5 == pytest.approx(model["k5"], rel=1e-6)
        assert mine.power_slope == pytest.approx(model["alpha_power"], rel=1e-6)
        assert mine.power_offset_w == pytest.approx(model["beta_power"], rel=1e-6)
        assert mine.cache_slope == pytest.approx(model["alpha_cacheutil"], rel=1e-6)
