"""Each paper's headline from facts that ship with joulery: what a fresh clone without the data set can check.

The inputs are the example files and the catalog (``joulery.perf.catalog``), which state their sources. Smaragdine's
headline, energy by layer of BERT, is checked the same way in ``tests/e2e/test_paper_checks.py``.
"""

import contextlib
import io
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from joulery.ui.cli import main
from reproduce.__main__ import main as reproduce

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == exit_code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "gpus", "usd_per_hour"),
    [("igniter", 6, 18.36), ("ffd", 5, 15.30), ("gslice", 6, 18.36), ("best", 5, 15.30)],
)
def test_igniter_12_services(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str, gpus: int, usd_per_hour: float
) -> None:
    """Xu et al., TPDS 34(3), 2023, section 5.3: six V100 at $3.06 an hour keep every SLO, FFD+ on five does not."""
    plan = answer(
        capsys, "plan", str(EXAMPLES / "igniter-12.yaml"), "--preset", preset, exit_code=3 * (preset == "ffd")
    )
    assert len(plan["gpus"]) == gpus
    assert plan["cost_usd_per_hour"] == pytest.approx(usd_per_hour)
    assert bool(plan["violations"]) is (preset == "ffd")


@pytest.mark.slow
def test_clover_saves_three_quarters_of_the_carbon(capsys: pytest.CaptureFixture[str]) -> None:
    """Li et al., SC'23, section 5.2: more than 75 % saved by each application, 80 % on average.

    Most of it is consolidation from ten GPUs to two, as docs/papers/clover.md says: on the same GPUs it is a third.
    """
    played = answer(capsys, "simulate", str(EXAMPLES / "clover-48h.yaml"), "--policy", "base,clover", "--seeds", "2")
    saved, alike = defaultdict(list), defaultdict(list)
    for row in played["results"]:
        if row["scheme"] == "clover":
            saved[row["service"]].append(row["saving_ratio"])
            alike[row["service"]].append(row["saving_same_gpus_ratio"])
    assert set(saved) == {"yolo", "efficientnet", "albert"}
    assert all(fmean(each) > 0.75 for each in saved.values())
    assert fmean(map(fmean, saved.values())) == pytest.approx(0.81, abs=0.02)
    assert all(0.2 < fmean(each) < 0.45 for each in alike.values())


@pytest.fixture(scope="module")
def muserve() -> Any:
    """What ``python -m reproduce muserve`` prints: both simulations of mu-Serve and the verdicts on its claims."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert reproduce(["muserve", "--seeds", "2", "--json"]) == 0
    return json.loads(text.getvalue())


@pytest.mark.slow
def test_muserve_serves_with_less_power(muserve: Any) -> None:
    """Qiu et al., ATC'24, section 4.2: 1.2 to 2.6 times less power within the SLO, on emulated V100s."""
    rows = {(row["scheme"], row["slo_scale"]): row for row in muserve["clocks"]["results"]}
    for scale in (5.0, 10.0):
        ours, fixed = rows["predictive", scale], rows["fixed", scale]
        assert 1.2 <= ours["saving_ratio"] <= 2.6
        assert ours["attainment_ratio"] >= fixed["attainment_ratio"] - 0.01


def test_muserve_answers_sooner_in_order_of_predicted_length(muserve: Any) -> None:
    """Qiu et al., ATC'24, section 4.3: speculative shortest-job-first takes 30 % off the mean completion time."""
    mean_s = {row["policy"]: row["mean_jct_s"] for row in muserve["ordering"]["results"]}
    assert mean_s["oracle"] < mean_s["ssjf"] < 0.72 * mean_s["fcfs"]


def test_muserve_is_reproduced_as_documented(muserve: Any) -> None:
    found = {claim["what"]: claim for claim in muserve["claims"]}
    assert found["power, times less (predictive governor)"]["ours"] == "1.79 and 1.84"
    assert found["throughput"]["ours"] == "1.00 times" and found["throughput"]["verdict"] == "does not hold"
    assert found["SLO attainment under MIAD; at full clock"]["ours"].startswith("95.67 %")


def test_green_finishes_sooner_with_less_carbon(capsys: pytest.CaptureFixture[str]) -> None:
    """GREEN, NSDI'25, section 8: shorter completion times and 4 % less carbon than Tiresias on the testbed's day."""
    played = answer(capsys, "simulate", str(EXAMPLES / "green-day.yaml"), "--policy", "green,tiresias", "--seeds", "3")
    rows = defaultdict(list)
    for row in played["results"]:
        rows[row["policy"]].append(row)
    jct = fmean(row["mean_jct_s"] for row in rows["green"]) / fmean(row["mean_jct_s"] for row in rows["tiresias"])
    grams = [fmean(row["cluster_carbon_kg"] for row in rows[name]) for name in ("green", "tiresias")]
    assert jct < 0.65
    assert grams[0] < grams[1]
