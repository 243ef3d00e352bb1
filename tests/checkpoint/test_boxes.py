"""Integers: a flat range as the fewest boxes, and who owns it, against brute force with numpy."""

from collections import Counter
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.boxes import OwnedRange, boxes_of_range, owners_of
from shardwise.layout.segments import Layout, build_layout

KINDS = ("rows", "flat")
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def shape_and_range(draw):
    shape = draw(shapes)
    lo = draw(st.integers(0, prod(shape)))
    return shape, lo, draw(st.integers(lo, prod(shape)))


@st.composite
def layout_and_range(draw):
    all_shapes = draw(st.lists(shapes, min_size=1, max_size=5))
    index = draw(st.integers(0, len(all_shapes) - 1))
    layout = build_layout(draw(st.sampled_from(KINDS)), all_shapes, draw(st.integers(1, 9)))
    lo = draw(st.integers(0, prod(all_shapes[index])))
    return layout, index, lo, draw(st.integers(lo, prod(all_shapes[index])))


def elements(values, shape, box):
    """Return a box's elements as numpy slices them out of the tensor, in its order."""
    assert len(box.offsets) == len(box.lengths) == len(shape)
    assert all(o + n <= s for o, n, s in zip(box.offsets, box.lengths, shape, strict=True))
    slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
    return values.reshape(shape)[slices].ravel()


@given(shape_and_range())
def test_the_boxes_of_a_range_hold_its_elements_in_flat_order(case):
    shape, lo, hi = case
    found = []
    for box in boxes_of_range(shape, lo, hi):
        inside = elements(np.arange(prod(shape)), shape, box).tolist()
        assert inside == list(range(box.lo, box.hi)) != []
        found += inside
    assert found == list(range(lo, hi))


@cache
def all_contiguous_boxes(shape):
    """Try every box of a tensor; return the ends, by begin, of those without gaps."""
    ends = {}
    whole = np.arange(prod(shape)).reshape(shape)
    cuts = [[(o, e) for o in range(n) for e in range(o + 1, n + 1)] for n in shape]
    for bounds in product(*cuts):
        inside = whole[tuple(slice(o, e) for o, e in bounds)].ravel()
        if inside[-1] - inside[0] + 1 == len(inside):
            ends.setdefault(int(inside[0]), set()).add(int(inside[-1]) + 1)
    return ends


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (5,), (4, 3), (3, 1, 4), (1, 3, 2), (2, 3, 4), (2, 2, 1, 3), (2, 3, 2, 2)],
    ids=str,
)
def test_no_other_cut_of_any_range_has_fewer_boxes(shape):
    ends = all_contiguous_boxes(shape)
    numel = prod(shape)
    for lo in range(numel):
        fewest = {lo: 0}  # end: boxes, over every way to get there
        for begin in range(lo, numel):
            for end in ends[begin]:
                fewest[end] = min(fewest.get(end, numel), fewest[begin] + 1)
        for hi in range(lo + 1, numel + 1):
            assert len(boxes_of_range(shape, lo, hi)) == fewest[hi], (lo, hi)


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (0, 0), (4, 1)], ids=str)
def test_an_empty_range_has_no_boxes_and_no_owners(shape):
    for at in {0, prod(shape)}:
        assert boxes_of_range(shape, at, at) == ()
        for kind, num_ranks in product(KINDS, (1, 3)):
            assert owners_of(build_layout(kind, [shape], num_ranks), 0, at, at) == []


@pytest.mark.parametrize("lo, hi", [(-1, 2), (2, 7), (4, 3), (7, 7)])
def test_a_range_outside_the_tensor_is_refused(lo, hi):
    message = f"expected 0 <= lo <= hi <= 6, got lo {lo} and hi {hi}"
    with pytest.raises(ValueError, match=message):
        boxes_of_range((2, 3), lo, hi)
    with pytest.raises(ValueError, match=message):
        owners_of(build_layout("flat", [(2, 3), (5,)], 3), 0, lo, hi)


@given(layout_and_range())
def test_the_owners_of_a_range_are_those_that_asking_every_rank_finds(case):
    layout, index, lo, hi = case
    pieces = [layout.piece(index, rank) for rank in range(layout.num_ranks)]
    meets = [(rank, max(lo, p.lo), min(hi, p.hi)) for rank, p in enumerate(pieces)]
    assert owners_of(layout, index, lo, hi) == [OwnedRange(*m) for m in meets if m[1] < m[2]]


@pytest.mark.parametrize("reading_ranks", [3, 9_999])
@pytest.mark.parametrize("kind", KINDS)
def test_planning_over_ten_thousand_ranks_works_only_on_the_overlaps(
    kind, reading_ranks, monkeypatch
):
    all_shapes = [(41 + index % 7, 16) for index in range(1_000)]
    saved = build_layout(kind, all_shapes, 10_000)
    reading = build_layout("flat", all_shapes, reading_ranks)
    wanted = [reading.piece(index, reading_ranks // 2) for index in range(1_000)]
    calls = Counter()
    piece = Layout.piece

    def counted_piece(self, index, rank):
        calls[index] += 1
        return piece(self, index, rank)

    monkeypatch.setattr(Layout, "piece", counted_piece)
    num_overlaps = 0
    for index, mine in enumerate(wanted):
        overlaps = owners_of(saved, index, mine.lo, mine.hi)
        assert sum(o.hi - o.lo for o in overlaps) == mine.numel
        assert calls[index] <= len(overlaps)
        num_overlaps += len(overlaps)
    assert 0 < num_overlaps < 20_000  # of 10,000 ranks x 1,000 tensors
