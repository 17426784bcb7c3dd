import json

import pytest

from reproduce.__main__ import PAPERS, main
from reproduce.product import EXAMPLES


def claims_of(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["claims"]


def test_help_names_every_paper(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(paper in text for paper in PAPERS)
    for paper in PAPERS:
        assert main([paper, "--help"]) == 0


@pytest.mark.slow
def test_igniter_plans_what_the_paper_plans(capsys):
    found = {claim["what"]: claim for claim in claims_of(capsys, "igniter")}
    assert found["shares of one V100: A, R, V"]["ours"] == "10 %, 30 %, 37.5 %"
    assert found["12 services under igniter: GPUs, predicted violations"]["ours"] == "6, 0"
    assert found["its cost"]["ours"] == "$18.36/h"
    assert found["12 services under ffd: GPUs, predicted violations"]["ours"] == "5, 9"
    assert found["joulery's own planner (best), replicas allowed"]["ours"].startswith("5 GPUs, $15.30/h, 0 violations")


@pytest.mark.slow
def test_clover_prints_claim_figure_and_verdict(capsys, tmp_path):
    """On the smallest of its three services; tests/sim/serving/test_study.py has all of them."""
    page, scenario = tmp_path / "clover.html", tmp_path / "one.yaml"
    text = (EXAMPLES / "clover-48h.yaml").read_text().replace("file: ", f"file: {EXAMPLES}/")
    scenario.write_text(f"{text}\nservices: [albert]\n")
    found = claims_of(capsys, "clover", "--seeds", "1", "--scenario", str(scenario), "--html", str(page))
    verdicts = {claim["what"]: claim["verdict"] for claim in found}
    assert verdicts["configurations above the SLO once chosen"] == "holds"
    assert "Fig. 16" in page.read_text()
