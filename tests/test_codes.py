"""Blocks as codes and scales: to the bit against `block_codes`, and within each format's bound."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_codes import decoded_block, wire_bytes
from shardwise.codes.reduce import decode, encode
from shardwise.layout.segments import build_layout
from shardwise.layout.wire import Wire
from shardwise.precisions import Coding

KINDS = ("int8", "fp8", "int4")
LARGEST = float(np.finfo(np.float32).max)
EXTREMES = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 1e-30, 1.0, -3e38, LARGEST])
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-4, 4, width=32), EXTREMES
)
BLOCKS = st.lists(NUMBERS, min_size=1, max_size=33)


def there_and_back(values, kind, dtype=torch.float32):
    block = torch.tensor([values], dtype=torch.float32)
    codes = torch.empty(1, Coding(kind, 16).code_bytes(len(values)), dtype=torch.uint8)
    scales, out = torch.empty(1, 1), torch.empty(1, len(values), dtype=dtype)
    encode(block, codes, scales, kind)
    decode(codes, scales, out, kind)
    by_scratch = torch.empty_like(out)
    decode(codes, scales, by_scratch, kind, torch.empty(200))
    assert torch.equal(out.isnan(), by_scratch.isnan())
    assert torch.equal(out.nan_to_num(), by_scratch.nan_to_num())
    return out[0]


def bits(values):
    return values.view(torch.int32).tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(values=BLOCKS)
def test_what_arrives_is_what_the_page_says_to_the_bit(kind, values):
    """And is the same by both ways of decoding, in every dtype of computation."""
    wanted = torch.from_numpy(decoded_block(values, kind))
    assert bits(there_and_back(values, kind) + 0.0) == bits(wanted + 0.0)  # zeros of any sign
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(there_and_back(values, kind, dtype), wanted.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@settings(max_examples=30, deadline=None)
@given(values=BLOCKS, place=st.integers(0, 40))
def test_a_block_with_one_number_that_is_not_finite_has_none(kind, bad, values, place):
    values = [*values]
    values[place % len(values)] = bad
    assert there_and_back(values, kind).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_of_fp8_stand_for_what_torchs_own_cast_gives(dtype):
    """All but those of NaN, which are in blocks whose scale is NaN alone."""
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).to(dtype)
    out = torch.empty(1, 256, dtype=dtype)
    decode(codes[None], torch.ones(1, 1), out, "fp8")
    there = ~wanted.isnan()
    assert int(there.sum()) == 254
    assert torch.equal(out[0][there], wanted[there])
    decode(codes[None], torch.full((1, 1), torch.nan), out, "fp8")
    assert out.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(
        st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5
    ),
    num_ranks=st.integers(1, 7),
    layout=st.sampled_from(["rows", "flat"]),
    block=st.sampled_from([16, 32, 256]),
)
def test_shares_cover_every_element_once_and_nothing_overlaps(
    kind, shapes, num_ranks, layout, block
):
    wire = Wire(build_layout(layout, shapes, num_ranks), Coding(kind, block), 2)
    seen = np.zeros(wire.layout.full_numel, dtype=int)
    for number, segment in enumerate(wire.segments):
        longest = 0
        for rank in range(num_ranks):
            share = wire.share(number, rank)
            taken = np.zeros(share.num_bytes, dtype=int)
            for run in share.coded:
                assert run.scales % 4 == 0
                seen[run.full : run.full + run.num * run.width] += 1
                taken[run.scales : run.scales + 4 * run.num] += 1
                size = run.num * Coding(kind, block).code_bytes(run.width)
                taken[run.codes : run.codes + size] += 1
            for plain in share.plain:
                seen[plain.full : plain.full + plain.numel] += 1
                taken[plain.codes : plain.codes + 2 * plain.numel] += 1
            assert taken.max(initial=0) <= 1
            assert (taken == 0).sum() < 4  # between elements and scales
            lo, hi = segment.bounds(rank)
            assert hi - lo >= share.num_bytes
            longest = max(longest, share.num_bytes)
        assert longest <= segment.shard_numel < longest + 8
    assert seen.sum() == wire.layout.numel
    assert seen.max(initial=0) <= 1


@pytest.mark.parametrize(
    ("kind", "ratio"), [("int8", 0.5078125), ("fp8", 0.5078125), ("int4", 0.2578125)]
)
def test_blocks_of_256_take_these_parts_of_bf16(kind, ratio):
    shapes = [(1024, 512), (512, 1024)]
    wire = Wire(build_layout("rows", shapes, 4), Coding(kind, 256), 2)
    assert wire.num_bytes == ratio * 2 * wire.layout.full_numel
    assert wire.num_bytes == 2 * wire_bytes(1024 * 512, kind, 256)
