import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from joulery.ui.reports.papers.charts import Axes, Dot, Line, Series, bars, lines, points, ticks

SCENARIO = """\
scenario: 1
name: small
kind: training-figures
seeds: 1
cluster: {nodes: 4}
day:
  trace: {kind: synthetic, jobs_per_day: 40, days: 1, mix: day}
year:
  trace: {kind: synthetic, jobs_per_day: 30, days: 2}
  frontier_days: 1
regions:
  - {name: GB, carbon: {kind: typical, zone: GB}}
  - {name: DE, carbon: {kind: typical, zone: DE}}
"""


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "joulery", "simulate", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


def test_one_command_draws_every_figure_and_table(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    page = tmp_path / "green.html"
    done = simulate(tmp_path / "s.yaml", "--html", page, "--json")
    assert done.returncode == 0, done.stderr
    text, document = page.read_text(), json.loads(done.stdout)
    for figure in ("Fig. 8", "Fig. 9a", "Fig. 9b", "Fig. 10", "Fig. 11", "Fig. 12", "Fig. 13a", "Fig. 13b", "Table 2",
                   "Table 3", "Table 4", "Grams against completion time", "simulated"):  # fmt: skip
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


def test_pictures_are_for_one_kind_of_scenario_alone(tmp_path: Path) -> None:
    examples = Path(__file__).resolve().parents[3] / "examples"
    done = simulate(examples / "green-day.yaml", "--html", tmp_path / "x.html")
    assert done.returncode == 2 and "has no pictures" in done.stderr and not (tmp_path / "x.html").exists()
    done = simulate(examples / "green-figures.yaml", "--data", tmp_path)
    assert done.returncode == 2 and "lacks green/testbed_day_791.csv" in done.stderr
    done = simulate(examples / "green-figures.yaml", "--days", "none")
    assert done.returncode == 2 and "--days needs a whole number" in done.stderr


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (950, 1700, [1000, 1200, 1400, 1600]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_bars_stand_on_the_axis_and_are_as_high_as_their_values() -> None:
    drawn = ET.fromstring(bars(["a", "b"], [Series("x", "red", np.array([1.0, 2.0]))], Axes("", "y"), line_at=1.0))
    one, two = drawn.findall("rect")
    assert float(two.get("height", 0)) == pytest.approx(2 * float(one.get("height", 0)), abs=0.2)
    feet = {round(float(each.get("y", 0)) + float(each.get("height", 0)), 0) for each in (one, two)}
    assert len(feet) == 1
    gap = ET.fromstring(bars(["a", "b"], [Series("x", "red", np.array([1.0, np.nan]))], Axes("", "y")))
    assert len(gap.findall("rect")) == 1


def test_steps_hold_their_value_and_labels_keep_apart() -> None:
    line = Line("p", "red", np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, 2.0]), steps=True)
    path = ET.fromstring(lines([line], Axes("t", "y"))).findall("path")[-1].get("d", "")
    marks = [tuple(map(float, pair.split())) for pair in path.lstrip("M").split("L")]
    assert len(marks) == 5 and marks[0][1] == marks[1][1] and marks[1][0] == marks[2][0]
    dots = [Dot(f"dot {n}", 5.0 + n / 1000, 5.0, "red") for n in range(3)]
    dots += [Dot("far", 9.0, 1.0, "red", True), Dot("near", 1.0, 9.0, "red")]
    texts = [t for t in ET.fromstring(points(dots, [], Axes("x", "y"))).findall("text") if "dot" in (t.text or "")]
    spots = [(float(t.get("x", 0)), float(t.get("y", 0))) for t in texts]
    assert len(spots) == 3
    for at, (x, y) in enumerate(spots):
        for other in spots[at + 1 :]:
            assert abs(x - other[0]) > 30 or abs(y - other[1]) > 9
