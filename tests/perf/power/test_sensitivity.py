import json

import numpy as np
import pytest

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.domain.quality import Quality
from joulery.domain.trace.operators import OperationCost
from joulery.perf.catalog.architectures import operations_of, published_latency_s
from joulery.perf.catalog.clock_models import A100, H100, clock_model
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.sensitivity import (
    MeasuredCurve,
    emulated_profile,
    measured_profile,
    supported_clocks,
)

GEMM = OperationCost("gemm", 1e12, 1.0, phase="prefill", output_bytes=10.0)
EMPTY = OperationCost("empty", 0.0, 0.0, count=50.0, phase="decode", output_bytes=30.0)


def gpt2() -> ClockProfile:
    return emulated_profile("GPT2-large", operations_of("GPT2-large"), V100, latency_s=0.832)


def test_the_anchor_of_figure_2() -> None:
    profile = gpt2()
    at = {float(clock): index for index, clock in enumerate(profile.clocks_mhz)}
    assert profile.latency_s[at[1380.0]] == pytest.approx(0.832)
    assert profile.latency_s[at[800.0]] == pytest.approx(0.949, abs=0.02)
    assert profile.power_w[[at[1300.0], at[800.0]]] == pytest.approx([214, 120], abs=3)
    assert profile.score == pytest.approx(0.53, abs=0.005)
    assert profile.quality is Quality.MODELLED
    assert profile.calibration_ratio == pytest.approx(0.986, abs=0.001)


@pytest.mark.parametrize(
    ("name", "score"), [("ResNet-50", 1.67), ("BERT-base", 1.80), ("OPT-1.3b", 0.80), ("Switch-base-32", 0.25)]
)
def test_scores_of_whole_models(name: str, score: float) -> None:
    profile = emulated_profile(name, operations_of(name), V100, latency_s=published_latency_s(name))
    assert profile.score == pytest.approx(score, abs=0.01)


def test_phases_and_their_shares() -> None:
    profile = emulated_profile("two", [GEMM, EMPTY], V100)
    assert profile.phases == ("prefill", "decode")
    assert profile.phase_score("prefill") == pytest.approx(2.0)
    assert profile.phase_score("decode") == 0.0
    gemm_s, empty_s = 1e12 / (0.6 * 14.13e12), 50 * 10e-6
    assert profile.phase_share("prefill") == pytest.approx(gemm_s / (gemm_s + empty_s))
    assert profile.phase_share("prefill") + profile.phase_share("decode") == pytest.approx(1.0)
    assert profile.score == pytest.approx(2.0 * gemm_s / (gemm_s + empty_s))
    with pytest.raises(KeyError):
        profile.phase_score("training")


def test_a_measured_curve_is_kept_and_labelled() -> None:
    curve = MeasuredCurve(
        "gpu:0",
        np.array([690.0, 1380.0]),
        np.array([3.0, 2.0]),
        np.array([np.nan, np.nan]),
        np.array([np.nan, np.nan]),
        "20 passes at each clock",
    )
    profile = measured_profile("two", [GEMM, EMPTY], V100, curve)
    assert profile.quality is Quality.MEASURED
    assert profile.score == pytest.approx(1.0)  # half as slow again at half the clock
    assert sum(operator.time_s for operator in profile.operators) == pytest.approx(2.0)
    assert "scores of operators modelled" in profile.source


def test_json_and_back() -> None:
    profile = gpt2()
    document = json.loads(json.dumps(profile.as_dict()))
    again = ClockProfile.from_dict(document)
    assert again.as_dict() == profile.as_dict()
    for broken in ({}, {**document, "schema": "joulery.clocks/9"}, [], {**document, "curve": {}}):
        with pytest.raises(DataError):
            ClockProfile.from_dict(broken)
    missing = {**document, "operators": [{**document["operators"][0], "score": float("nan")}]}
    with pytest.raises(DataError, match="a score of nan"):
        ClockProfile.from_dict(missing)


@pytest.mark.parametrize("operations", [[], [OperationCost("never", 1.0, 1.0, count=0.0)]])
def test_an_empty_model_is_refused(operations: list[OperationCost]) -> None:
    with pytest.raises(DataError, match="void has no operators"):
        emulated_profile("void", operations, V100)


def test_curves_that_do_not_fit() -> None:
    operators = (ScoredOperator(GEMM, 2.0, 1.0),)
    with pytest.raises(DataError, match="two or more ascending clocks"):
        ClockProfile("m", "d", Quality.MODELLED, "", operators, [1.0, 1.0], [1, 1], [1, 1], [1, 1])
    with pytest.raises(DataError, match="finite and above 0"):
        ClockProfile("m", "d", Quality.MODELLED, "", operators, [1.0, 2.0], [1, 0], [1, 1], [1, 1])


def test_gpus_of_the_catalog() -> None:
    assert (clock_model("a100"), clock_model("H100"), clock_model("V100")) == (A100, H100, V100)
    assert (A100.quality, V100.quality) == (Quality.ASSUMED, Quality.MODELLED)
    assert (A100.max_mhz, H100.max_mhz, A100.peak_bandwidth, H100.peak_flops) == (1410, 1980, 1555e9, 67e12)
    for gpu in (A100, H100):
        assert gpu.busy_power_w(gpu.max_mhz)[0] < gpu.cap_w
        gemm, stream = operators_of(gpu)
        assert gemm == pytest.approx(2.0)
        assert 0.85 <= stream <= 1.1
    assert emulated_profile("two", [GEMM], H100).quality is Quality.ASSUMED
    with pytest.raises(ConfigError, match="no such emulated GPU"):
        clock_model("B200")
    assert supported_clocks(V100).tolist() == [*range(200, 1301, 100), 1380]


def operators_of(gpu) -> list[float]:
    stream = OperationCost("stream", 1.0, 1e9)
    return [each.score for each in emulated_profile("pure", [GEMM, stream], gpu).operators]
