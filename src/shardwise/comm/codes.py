"""Blocks of numbers as codes of 8 or 4 bits and a scale, and back.

Note [Codes and scales]
The scale of a block is its largest magnitude times 1/127 (int8), 1/448 (fp8, e4m3) or 1/7 (int4),
in float32 and no smaller than the smallest normal number; codes are the quotients, rounded to the
nearest, ties to even. That factor is multiplied by 1 - 2^-22 and rounded once to float32, so that
no finite value becomes infinite on the way. A block with a NaN or an infinity has the scale NaN and
arrives as NaN, all of it: what is not finite never arrives as a number. Zeros stay zeros, and so do
denormals (int8: below half the smallest normal number). What arrives is code times scale in
float32, cast to the dtype of computation.

Two codes of 4 bits share a byte: element i of a block is the low half of byte i, and element
i + half the high half, where half is that of the block's elements, rounded up. They are stored
plus 8.
"""

import torch

_LEVELS = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_LESS = 1 - 2.0**-22
_SMALLEST = 2.0**-126
_HALVES = 2.0**8


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> None:
    """Encode blocks.

    **Shapes** ``values`` [n, width], ``codes`` [n, bytes of a block] uint8, ``scales`` [n, 1].

    **Cost** two temporary copies of the values in float32.
    """
    values = values.float()
    scale = values.abs().amax(dim=-1, keepdim=True).mul_(_LESS / _LEVELS[kind])
    scale.clamp_(min=_SMALLEST)
    scales.copy_(scale.masked_fill_(~scale.isfinite(), torch.nan))
    quotients = torch.div(values, scale)
    if kind == "fp8":
        codes.view(torch.float8_e4m3fn).copy_(quotients)
    elif kind == "int8":
        codes.view(torch.int8).copy_(quotients.round_())
    else:
        half, rest = codes.shape[-1], values.shape[-1] - codes.shape[-1]
        quotients.round_().add_(8)
        codes.copy_(quotients[:, :half])
        codes[:, :rest].add_(quotients[:, half:].mul_(16).to(torch.uint8))


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    scratch: torch.Tensor | None = None,
) -> None:
    """Write what blocks stand for into ``out``.

    **Shapes** ``out`` [..., n, width], ``codes`` [..., n, bytes of a block] uint8, ``scales``
    [..., n, 1]; ``scratch`` float32, flat, as long as ``out``.

    **Cost** with ``scratch`` it is cast once, in the end; without, ``out`` is written twice. The
    bits are the same: every code is a number of every floating-point dtype.
    """
    values = out if scratch is None else scratch[: out.numel()].view(out.shape)
    if kind == "fp8" and codes.device.type == "cpu":
        values.copy_(_as_halves(codes))
        scales = scales * _HALVES
    elif kind == "fp8":
        values.copy_(codes.view(torch.float8_e4m3fn))
    elif kind == "int8":
        values.copy_(codes.view(torch.int8))
    else:
        half, rest = codes.shape[-1], out.shape[-1] - codes.shape[-1]
        values[..., :half].copy_(codes & 15)
        values[..., half:].copy_(codes[..., :rest] >> 4)
        values.sub_(8)
    values.mul_(scales)
    if values is not out:
        out.copy_(values)


def _as_halves(codes: torch.Tensor) -> torch.Tensor:
    """Return numbers of e4m3 as float16, 2^-8 times as large; torch's own cast takes 20 x as long.

    Both have the sign first; four bits of exponent with a bias of 7 are the last of five with 15.
    The code of NaN becomes a number, but only blocks whose scale is NaN have it.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16)  # there the sign was, too
