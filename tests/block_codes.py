"""What an encoded message must give, said number by number: the oracle of the tests.

Written from docs/numerics.md in plain Python and numpy; it shares no line with the package.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import torch

ODD_SHAPES = {  # which no number of ranks divides
    "one_row": (1, 35),
    "none": (0, 8),
    "wide": (5, 33),
    "deep": (3, 2, 7),
    "even": (24, 16),
}
LEVELS = {"int8": 127, "fp8": 448, "int4": 7}
SMALLEST = np.float32(2.0**-126)


def fp8_numbers():
    """All finite numbers of e4m3 that are not negative: 4 bits of exponent, 3 of fraction."""
    found = [fraction * 2.0**-9 for fraction in range(8)]  # below the smallest normal one
    for exponent in range(1, 16):
        found += [(1 + f / 8) * 2.0 ** (exponent - 7) for f in range(8 if exponent < 15 else 7)]
    return found


_FP8 = fp8_numbers()


def nearest_fp8(value):
    """Return the nearest number of e4m3; of two as near, that with an even fraction."""
    size = abs(value)
    above = next((i for i, number in enumerate(_FP8) if number >= size), len(_FP8) - 1)
    below = max(above - 1, 0)
    down, up = size - _FP8[below], _FP8[above] - size
    is_above = size >= _FP8[-1] or up < down or (up == down and above % 2 == 0)
    chosen = above if is_above else below
    return math.copysign(_FP8[chosen], value)


def nearest_whole(value):
    """Return the nearest whole number; of two as near, the even one."""
    return float(round(value))


def decoded_block(values, kind):
    """Return what arrives of one block, in float32."""
    block = np.asarray(values, dtype=np.float32)
    if not np.isfinite(block).all():
        return np.full(len(block), np.nan, dtype=np.float32)
    factor = np.float32(1 / LEVELS[kind] * (1 - 2.0**-22))
    scale = max(np.float32(np.max(np.abs(block), initial=0) * factor), SMALLEST)
    rounded = nearest_fp8 if kind == "fp8" else nearest_whole
    quotients = [rounded(float(np.float32(value / scale))) for value in block]
    return np.array([np.float32(np.float32(q) * scale) for q in quotients], dtype=np.float32)


def decoded(values, kind, block, cuts=()):
    """Return what arrives of one parameter, flat; ``cuts`` are where another rank's part begins."""
    ends = sorted({*range(0, len(values), block), *cuts, len(values)})
    parts = [decoded_block(values[lo:hi], kind) for lo, hi in pairwise(ends) if hi > lo]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def wire_bytes(numel, kind, block, cuts=()):
    """Return the bytes of codes and scales of one parameter."""
    ends = sorted({*range(0, numel, block), *(c for c in cuts if 0 < c < numel), numel})
    sizes = [hi - lo for lo, hi in pairwise(ends) if hi > lo]
    return sum(4 + (-(-size // 2) if kind == "int4" else size) for size in sizes)


def cuts_of(layout, shapes, num_ranks):
    """Say where other ranks' parts begin in each parameter, from what the layouts promise."""
    if layout == "matrices":  # whole, and what is none, laid out flat
        others = {n: s for n, s in shapes.items() if len(s) != 2}
        return {n: [] for n in shapes} | cuts_of("flat", others, num_ranks)
    if layout == "rows":
        rows = {n: -(-(s[0] if s else 1) // num_ranks) * prod(s[1:]) for n, s in shapes.items()}
        return {
            n: [r * rows[n] for r in range(1, num_ranks) if r * rows[n] < prod(s)]
            for n, s in shapes.items()
        }
    ends = list(accumulate(prod(s) for s in shapes.values()))
    share = -(-ends[-1] // num_ranks)
    begins = dict(zip(shapes, [0, *ends[:-1]], strict=True))
    return {
        n: [
            r * share - begins[n]
            for r in range(1, num_ranks)
            if 0 < r * share - begins[n] < prod(s)
        ]
        for n, s in shapes.items()
    }


def of_rows(value, kind, num_ranks, block=16, dim=0):
    """Return what arrives of a parameter cut along a dim, evenly if that is not the first.

    One of fewer than two dims is what was sent.
    """
    if value.dim() < 2:
        return value
    if dim:
        rows = torch.stack([c.reshape(-1) for c in value.chunk(num_ranks, dim=dim)])
        shape = (*value.shape[:dim], -1, *value.shape[dim + 1 :])
        return torch.cat([p.view(shape) for p in of_rows(rows, kind, num_ranks, block)], dim=dim)
    cuts = cuts_of("rows", {"": tuple(value.shape)}, num_ranks)[""]
    flat = decoded(value.reshape(-1).numpy(), kind, block, cuts)
    return torch.from_numpy(np.ascontiguousarray(flat)).view(value.shape)
