"""Charts of lines: points lie where the axes say, and ticks are round."""

import xml.etree.ElementTree as ET

import pytest

from shardwise.charts import lines_chart
from shardwise.svg import Curve, Point, round_ticks

SVG = "{http://www.w3.org/2000/svg}"


def drawn(losses):
    """Return a chart of losses, None where a step has none."""
    points = [Point(step, x, x, x) for step, x in enumerate(losses, 1) if x is not None]
    gaps = [step for step, x in enumerate(losses, 1) if x is None]
    return ET.fromstring(lines_chart("Loss of <runs> & more", [Curve("train", "a", points, gaps)]))


def test_points_lie_where_the_axes_say_and_have_titles():
    root = drawn([4.0, 3.0, 2.0])
    (line,) = [e for e in root.iter(f"{SVG}polyline") if e.attrib["class"] == "train"]
    ys = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    ticks = {e.text: float(e.attrib["y"]) - 4 for e in root.iter(f"{SVG}text")}
    assert ys == pytest.approx([ticks["4.0"], ticks["3.0"], ticks["2.0"]], abs=0.1)
    titles = [title.text for e in root.iter(f"{SVG}circle") for title in e]
    assert titles == ["step 1: 4", "step 2: 3", "step 3: 2"]
    assert root.attrib["aria-label"] == "Loss of <runs> & more"


@pytest.mark.parametrize("losses", [[5.5], [5.5, 5.5, 5.5], [0.0]])
def test_one_point_and_equal_points_have_an_axis_around_them(losses):
    root = drawn(losses)
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert len(set(labels)) == len(labels)  # no tick stands there twice
    ys = [float(e.attrib["cy"]) for e in root.iter(f"{SVG}circle")]
    assert len(ys) == len(losses) and all(34 < y < 168 for y in ys)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.0, 3.0, [1.0, 1.5, 2.0, 2.5, 3.0]),
        (0.0, 3e-4, [0.0, 1e-4, 2e-4, 3e-4]),
        (-7.0, 95.0, [-20.0, 0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
        (5.0, 5.0, [5.0]),
        (1.0, 1e6, [0.0, 2e5, 4e5, 6e5, 8e5, 1e6]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, ticks):
    found = round_ticks(low, high, 7 if high != 3e-4 else 4)
    assert found == pytest.approx(ticks)
    assert found[0] <= low and high <= found[-1] * (1 + 1e-12)
