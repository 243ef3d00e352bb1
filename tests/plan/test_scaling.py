"""The scaling table against numbers worked out by hand; the picture against its own geometry."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.timing.scaling import (
    ScalingRow,
    scaling_rows,
    scaling_svg,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_efficiency_is_throughput_per_rank_beside_the_smallest() -> None:
    rows = scaling_rows([ScalingRow(32, 2.5, 32_000, 0.5, 7), ScalingRow(8, 2.0, 8_000)])
    assert rows == (
        ScalingRow(8, 2.0, 8_000, efficiency=1.0),
        ScalingRow(32, 2.5, 32_000, 0.5, 7, efficiency=0.8),
    )
    assert [(row.tokens_per_s, row.exposed) for row in rows] == [(4000.0, 0.0), (12800.0, 0.2)]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "at least one"),
        ([ScalingRow(8, 1, 1), ScalingRow(8, 2, 1)], "8 ranks are there twice"),
        ([ScalingRow(0, 1, 1)], "num_ranks=0"),
        ([ScalingRow(1, float("nan"), 1)], "step_s=nan"),
        ([ScalingRow(1, 1, -1)], "tokens_per_step=-1"),
    ],
)
def test_points_that_cannot_be_are_refused(points: list[ScalingRow], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaling_rows(points)


def texts_of(root: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """Return where each text begins and ends, its line, and what it says (7 units a letter)."""
    boxes = []
    for text in root.iter(f"{SVG}text"):
        words = text.text or ""
        x, width = float(text.attrib["x"]), 7.0 * len(words)
        x -= {"end": width, "middle": width / 2}.get(text.get("text-anchor", "start"), 0.0)
        boxes.append((x, x + width, float(text.attrib["y"]), words))
    return boxes


curves = st.lists(
    st.tuples(st.integers(1, 65536), st.floats(1e-3, 1e3)),
    min_size=1,
    max_size=14,
    unique_by=lambda p: p[0],
)


@settings(max_examples=60, deadline=None)
@given(curves)
def test_any_curve_is_drawn_inside_the_picture_without_labels_on_labels(
    points: list[tuple[int, float]],
) -> None:
    rows = scaling_rows(ScalingRow(n, step_s, 1000 * n) for n, step_s in points)
    root = ElementTree.fromstring(scaling_svg(rows))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for line in root.iter(f"{SVG}polyline"):
        for place in line.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 70 <= x <= width - 50 and 60 <= y <= height - 60
    assert len(list(root.iter(f"{SVG}circle"))) == len(rows)
    on_axis = sorted(box for box in texts_of(root) if box[2] > 390 and box[3] != "ranks")
    for (_, end, _, _), (begin, _, _, _) in pairwise(on_axis):
        assert end <= begin + 4


def test_the_picture_tells_readers_who_do_not_see_it_what_it_shows() -> None:
    rows = scaling_rows([ScalingRow(8, 1, 8000), ScalingRow(16, 1.25, 16000)])
    root = ElementTree.fromstring(scaling_svg(rows, title="a <b> & c"))
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "a <b> & c"
    assert root.findtext(f"{SVG}title") == "a <b> & c"
    assert "16 ranks 1.28e+04 tokens/s, 80% of ideal" in (root.findtext(f"{SVG}desc") or "")
    assert {"100%", "80%"} <= {words for *_, words in texts_of(root)}
    assert "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")
