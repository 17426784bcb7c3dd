import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from joulery.config.scenario import SyntheticTrace, TrainingCluster
from joulery.ui.cli import main as joulery
from reproduce.__main__ import main
from reproduce.green import command
from reproduce.green.evaluation import GreenEvaluation

SMALL = GreenEvaluation(
    cluster=TrainingCluster(nodes=4),
    day=SyntheticTrace(kind="synthetic", jobs_per_day=40, days=1, mix="day"),
    year=SyntheticTrace(kind="synthetic", jobs_per_day=30, days=2),
    frontier_days=1,
    regions=("GB", "DE"),
)


def test_one_command_draws_every_figure_and_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "GreenEvaluation", lambda: SMALL)
    page = tmp_path / "green.html"
    assert main(["green", "--seeds", "1", "--html", str(page), "--json"]) == 0
    text, document = page.read_text(), json.loads(capsys.readouterr().out)
    for figure in ("Fig. 8", "Fig. 9a", "Fig. 9b", "Fig. 10", "Fig. 11", "Fig. 12", "Fig. 13a", "Fig. 13b", "Table 2",
                   "Table 3", "Table 4", "Carbon against completion time", "simulated"):  # fmt: skip
        assert figure in text, figure
    assert not re.search(r"<script|https?://", text), "it needs nothing else"
    pictures = re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 13
    for picture in pictures:
        ET.fromstring(picture)
        assert "nan" not in picture.lower().replace("finance", "")
    named = {claim["figure"] for claim in document["claims"]}
    assert named >= {"Fig. 8", "Fig. 9", "Fig. 11", "Fig. 12", "Fig. 13a", "Fig. 13b", "Table 2", "Table 3", "Table 4"}
    assert {row["region"] for row in document["results"]} == {"GB", "DE"}
    assert len(document["bound"]) == len(document["bound_without_waiting"]) == 11
    least = {row["figure"] for row in document["results"]}
    assert least == {"fig8", "fig11", "fig12", "fig13a", "fig13b", "table4", "frontier"}


def test_a_data_folder_without_its_files_names_the_first(tmp_path, capsys):
    assert main(["green", "--data", str(tmp_path)]) == 2
    assert "green/testbed_day_791.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scenario", "paper"),
    [
        ("scenario: 1\nkind: training-figures\nseeds: 3\n", "reproduce green"),
        ("scenario: 1\nkind: training-figures\nday: {trace: {kind: synthetic}}\n", "reproduce green"),
    ],
)
def test_the_former_scenario_names_the_command(tmp_path, capsys, scenario, paper):
    (tmp_path / "s.yaml").write_text(scenario)
    assert joulery(["simulate", str(tmp_path / "s.yaml")]) == 2
    assert paper in capsys.readouterr().err


def test_the_evaluation_states_where_its_inputs_come_from(tmp_path):
    assert "synthetic" in SMALL.source
    assert "Electricity Maps" in replace(SMALL, data=tmp_path).source
