"""Block quantisation to 8-bit codes: the value of each code, and the nearest code of a value.

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
"""

from functools import cache

import torch

from shardwise.optim.scratch import Scratch

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
