import xml.etree.ElementTree as ET

import numpy as np
import pytest

from joulery.ui.kit.charts import Axes, Dot, Line, Series, bars, lines, points, ticks


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
