"""Moments in fewer bits: block quantisation to 8-bit codes, stochastic rounding to bfloat16.

Note [Dynamic codes]
A code has a decade and a fraction; a smaller decade has fewer bits for the fraction. With ``bits``
bits, decade E (of 10^-E) has 2^(bits - 1 - E) values, evenly spaced up to 10^-E itself. Each block
is divided by its largest element, and 1 is a code, so that element is exact. Signed codes have 7
such bits and a sign (10^-6 to 1), unsigned ones 8 (10^-7 to 1); code 0 is zero. Source: "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861, sections 1.2 and 2.1; its fractions are
half a step lower.

The nearest code is looked up by a number's float16 bits (11 significant bits), so a number within
2^-11 of the midpoint of two codes may get either. A code is at least seven times as far from such a
midpoint. So a decoded value encodes to the same code: encoding a decoded block changes no bit.

An unsigned number of at least 2^-39 of the block's largest never becomes zero. It is a
denominator's square: zero would make a step larger, and rounding up to 10^-7 makes it smaller.

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


class Scratch:
    """Buffers by name: a second request returns the same memory, with its old contents."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory, shape [numel]."""
        key = name, dtype, device
        if key not in self._held or self._held[key].numel() < numel:
            self._held[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._held[key][:numel]

    def converted(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return flat values in a dtype, copied to memory of this name if they have another."""
        if values.dtype == dtype:
            return values
        return self.take(name, values.numel(), dtype, values.device).copy_(values)


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


_SHIFT = 2.0**15  # scales numbers up to 1 to where float16 has 11 significant bits
_LEAST_SCALE = 2.0**-100  # smaller blocks become zeros: far below eps, and no subnormals
_FEW_THREADS = 2


def _magnitudes(bits: int) -> list[float]:
    """Return the values of the codes of ``bits`` bits, ascending; code 0 is zero."""
    values = [0.0]
    for decade in reversed(range(bits)):
        steps = 2 ** (bits - 1 - decade)
        values += [10.0**-decade * (0.1 + 0.9 * (i + 1) / steps) for i in range(steps)]
    return values


@cache
def meanings(is_signed: bool, device: torch.device) -> torch.Tensor:
    """Return the value of each code, shape [256]; in signed codes the upper bit is the sign."""
    if not is_signed:
        return torch.tensor(_magnitudes(8), dtype=torch.float32, device=device)
    positive = torch.tensor(_magnitudes(7), dtype=torch.float32, device=device)
    return torch.cat([positive, -positive])


@cache
def nearest(is_signed: bool, device: torch.device) -> torch.Tensor:
    """Return the code of each float16 number divided by 2^15, by its bits; shape [65536]."""
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    numbers = (bits.view(torch.float16).double() / _SHIFT).nan_to_num(nan=0.0)
    means = meanings(is_signed, torch.device("cpu")).double()
    known = means[:128] if is_signed else means
    codes = torch.bucketize(numbers, (known[1:] + known[:-1]) / 2).to(torch.uint8)
    if is_signed:
        negative = torch.where(codes > 0, codes + 128, codes)  # one code for both zeros
    else:
        codes[1:].clamp_(min=1)
        codes[numbers == 0] = 0  # NaN too: its block's scale is not finite
        negative = torch.zeros_like(codes)
    return torch.cat([codes, negative]).to(device)


def decode(
    codes: torch.Tensor, scales: torch.Tensor, is_signed: bool, out: torch.Tensor, scratch: Scratch
) -> None:
    """Write the values of codes. Shapes: codes and out [blocks x block], scales [blocks]."""
    index = scratch.take("index", codes.numel(), torch.int64, codes.device).copy_(codes)
    _look_up(meanings(is_signed, codes.device), index, out)
    out.view(len(scales), -1).mul_(scales[:, None])


def encode(
    values: torch.Tensor,
    is_signed: bool,
    codes: torch.Tensor,
    scales: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Write codes [blocks x block] and scales [blocks] of float32 values; see Note [Dynamic codes].

    A block with an infinity or a NaN decodes to NaN.
    """
    device, numel, by_block = values.device, values.numel(), (len(scales), -1)
    numbers = scratch.take("numbers", numel, torch.float32, device)
    halves = scratch.take("halves", numel, torch.float16, device)
    index = scratch.take("index", numel, torch.int64, device)
    sizes = torch.abs(values, out=numbers) if is_signed else values
    torch.amax(sizes.view(by_block), 1, out=scales)
    is_small = scales < _LEAST_SCALE
    factors = (_SHIFT / scales).masked_fill_(is_small, 0.0)
    scales.masked_fill_(is_small, 0.0)
    torch.mul(values.view(by_block), factors[:, None], out=numbers.view(by_block))
    index.copy_(halves.copy_(numbers).view(torch.uint16))
    _look_up(nearest(is_signed, device), index, codes)


def _look_up(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Write a table's elements, by torch's faster operation for the number of threads."""
    if index.device.type == "cpu" and torch.get_num_threads() <= _FEW_THREADS:
        torch.index_select(table, 0, index, out=out)
    else:
        torch.take(table, index, out=out)
