"""Stochastic rounding from float32 to bfloat16, the same in every run.

Note [Rounding by chance]
``exp_avg_sq`` changes by a thousandth of itself in a step (``beta2`` = 0.999), and bfloat16 has
eight significant bits: rounded to the nearest it would never change. Stochastic rounding adds 16
random bits to the bits that will be cut off, so the result is right on average. Source:
"Revisiting BFloat16 Training", arXiv 2010.06192, section 4.

The bits of an element depend only on its place in the whole parameter and on the step: not on the
sharding, the threads or earlier calls. So a run is bit-identical on any number of ranks, and after
a resume. The bits are a fixed table, indexed by the place in a row of `ROW` elements, xored with a
key of the row and the step. The keys are uniform, so the bits of each element are.
"""

from functools import cache

import torch

from shardwise.optim.kinds import ROW

_MASK = (1 << 64) - 1
_CUT_OFF = 16  # bits of a float32 that a bfloat16 lacks


def _mixed(number: int) -> int:
    """Return 64 bits that look random. Source: the finalizer of SplitMix64 (Steele et al. 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


@cache
def _table(which: int, device: torch.device) -> torch.Tensor:
    """Return 16 random bits for each place in a row, shape [ROW], for moment ``which``."""
    bits = [_mixed(place) >> (_CUT_OFF * which) & 0xFFFF for place in range(ROW)]
    return torch.tensor(bits, dtype=torch.int32, device=device)


def random_bits(begin: int, end: int, step: int, which: int, out: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits for elements [begin, end) of a parameter.

    They are written to ``out``, int32, with room for all elements of the rows that contain them.
    """
    rows = range(begin // ROW, -(-end // ROW))
    keys = [_mixed(_mixed(step) ^ (row + 1)) >> (_CUT_OFF * which) & 0xFFFF for row in rows]
    table, first = _table(which, out.device), rows.start * ROW
    if len(rows) == 1:
        inside = table[begin - first : end - first]
        return torch.bitwise_xor(inside, keys[0], out=out[: end - begin])
    column = torch.tensor(keys, dtype=torch.int32, device=out.device)[:, None]
    torch.bitwise_xor(table, column, out=out[: len(rows) * ROW].view(len(rows), ROW))
    return out[begin - first : end - first]


def round_by_chance(values: torch.Tensor, random: torch.Tensor, out: torch.Tensor) -> None:
    """Write float32 values as bfloat16 and overwrite the values. See Note [Rounding by chance].

    Infinities and torch's NaN are unchanged.
    """
    bits = values.view(torch.int32)
    bits.add_(random).bitwise_and_(-1 << _CUT_OFF)
    out.copy_(values)  # exact, as the low bits are zero
