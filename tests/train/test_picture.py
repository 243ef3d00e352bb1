"""The picture of a run's losses: every curve in it, whatever the losses were."""

import json
import math
import re
import xml.etree.ElementTree as ET

import pytest

from shardwise.svg import round_ticks
from shardwise.train.config import load_config
from shardwise.train.loop import _draw
from shardwise.train.picture import loss_svg, write_picture

SVG = "{http://www.w3.org/2000/svg}"


def metrics(losses, **more):
    """Return the lines of a run with these losses, rate 0.001; ``more`` are keys by step."""
    lines = []
    for step, loss in enumerate(losses, 1):
        lines.append({"step": step, "loss": loss, "lr": 0.001})
        lines += [{"step": step, name: of[step]} for name, of in more.items() if step in of]
    return [json.dumps(line) for line in lines]


def drawn(lines):
    return ET.fromstring(loss_svg(lines, "Loss of <runs> & more"))


def places(root, name):
    """Return the points of each line of one class."""
    return [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in line.attrib["points"].split())
        ]
        for line in root.iter(f"{SVG}polyline")
        if line.attrib["class"] == name
    ]


def titles(root, tag, name):
    found = [e for e in root.iter(f"{SVG}{tag}") if e.attrib.get("class") == name]
    return [title.text or "" for e in found for title in e.iter(f"{SVG}title")]


def labels(root):
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_points_lie_where_the_axes_say():
    root = drawn(metrics([4.0, 3.0, 2.0], eval_loss={3: 2.5}))
    (train,), (rate,) = places(root, "train"), places(root, "rate")
    assert [x for x, _ in train] == [x for x, _ in rate] == [74.0, 398.0, 722.0]
    ticks = {
        float(text.text or "nan"): float(text.attrib["y"]) - 4
        for text in root.iter(f"{SVG}text")
        if re.fullmatch(r"[234]\.0", text.text or "")
    }
    assert [y for _, y in train] == pytest.approx([ticks[4.0], ticks[3.0], ticks[2.0]], abs=0.1)
    assert titles(root, "circle", "train-fill") == ["step 1: 4", "step 2: 3", "step 3: 2"]
    assert titles(root, "circle", "held-fill") == ["step 3: 2.5"]
    assert {"loss, nats per token", "learning rate", "step", "training loss", "held out"} <= set(
        labels(root)
    )
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == "Loss of <runs> & more"
    assert root.findtext(f"{SVG}title") == "Loss of <runs> & more"
    assert root.findtext(f"{SVG}desc") == (
        "Training loss from 4 at step 1 to 2 at step 3, lowest 2 at step 3; held out from 2.5 at "
        "step 3 to 2.5 at step 3, lowest 2.5 at step 3; learning rate at most 0.001."
    )
    assert "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")


def test_one_point_and_equal_points_have_an_axis_around_them():
    for losses in ([5.5], [5.5, 5.5, 5.5], [0.0]):
        root = drawn(metrics(list(losses)))
        (train,) = places(root, "train")
        assert len(train) == len(titles(root, "circle", "train-fill")) == len(losses)
        assert all(78 < y < 318 for _, y in train)
        assert len(set(labels(root))) == len(labels(root))  # no tick stands there twice


def test_steps_without_a_number_are_gaps_with_marks():
    losses = [3.0, 2.9, None, None, 2.8, None]
    root = drawn(metrics(losses))
    assert [len(piece) for piece in places(root, "train")] == [2, 1]
    said = "training loss: not a number at step"
    assert sorted(titles(root, "line", "bad")) == [f"{said} 3", f"{said} 4", f"{said} 6"]
    assert "no number at 3 steps, first at step 3" in (root.findtext(f"{SVG}desc") or "")
    nothing = drawn(metrics([None]))
    assert not places(nothing, "train") and titles(nothing, "line", "bad") == [f"{said} 1"]
    for text in ("nan", "inf"):
        assert text not in " ".join(labels(root) + labels(nothing))


def test_many_points_become_columns_that_keep_a_spike_in_sight():
    losses = [2 + math.exp(-step / 500) for step in range(20_000)]
    calm = loss_svg(metrics(losses), "calm")
    assert len(calm) < 40_000
    losses[9_999] = 4.0  # a little above: inside the axis, and seen in the band alone
    root = drawn(metrics(losses))
    (band,) = [e for e in root.iter(f"{SVG}polygon") if e.attrib["class"] == "train-fill"]
    heights = [float(pair.split(",")[1]) for pair in band.attrib["points"].split()]
    assert min(heights) < min(y for _, y in places(root, "train")[0]) - 20
    assert not titles(root, "path", "train-fill")

    losses[9_999], losses[15_000] = 1e6, 5e5  # far away: the axis stays with the others
    root = drawn(metrics(losses))
    assert titles(root, "path", "train-fill") == [
        "step 10,000: 1e+06, above what is shown",
        "step 15,001: 5e+05, above what is shown",
    ]
    (curve,) = places(root, "train")
    assert max(y for _, y in curve) - min(y for _, y in curve) > 100
    assert "above the axis" in labels(root)


def test_where_a_run_was_resumed_is_marked(tmp_path):
    lines = metrics([3.0, 2.0, 1.0], load_s={2: 0.5})
    assert titles(drawn(lines), "line", "resumed") == ["resumed after step 2"]
    path, target = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
    assert not write_picture(path, target)
    path.write_text('{"step": 1, "load_s": 1}\nno line\n[3]\n{"step": null, "loss": 1}\n')
    assert not write_picture(path, target) and not target.exists()
    path.write_text("\n".join(lines) + '\n{"step": 4, "loss')  # a kill cut it short
    assert write_picture(path, target)
    assert ET.fromstring(target.read_text()).findtext(f"{SVG}title") == f"Loss of {tmp_path}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.svg", "metrics.jsonl"]


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


def test_a_picture_that_cannot_be_drawn_is_told_of_and_ends_no_run(tmp_path):
    config = load_config(None, {"output": tmp_path})
    path, said = tmp_path / "metrics.jsonl", []
    path.write_text(f'{{"step": 1, "loss": 1{"0" * 400}}}\n')  # a number, and no float
    assert _draw(config, said.append) is None
    path.write_text("\n".join(metrics([2.0])))
    (tmp_path / "loss.svg").mkdir()
    assert _draw(config, said.append) is None
    assert len(said) == 2 and all(f"{tmp_path / 'loss.svg'} could not be" in s for s in said)
