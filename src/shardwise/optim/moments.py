"""Storage of moments between steps: full precision, bfloat16, or 8-bit codes.

A kind of moments reads and writes a *span* of a slice in float32, so that a step decodes only as
much as fits in a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.optim.codes import Scratch, decode, encode, random_bits, round_by_chance
from shardwise.optim.kinds import ROW, check_kind
from shardwise.optim.slices import Place

MOMENTS = ("exp_avg", "exp_avg_sq")
Held = Mapping[str, torch.Tensor]  # the flat state of one moment, by the endings of its keys


@dataclass(frozen=True)
class Span:
    """Elements [lo, hi) of a slice, which begins at element ``first`` of the whole, at a step."""

    first: int
    lo: int
    hi: int
    step: int


class Moments(Protocol):
    """Storage of a moment; ``which`` is 0 for ``exp_avg`` and 1 for ``exp_avg_sq``."""

    @property
    def is_values(self) -> bool:
        """Return True if the state is one tensor of values with the parameter's shape."""

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of the state's keys, after the moment's name."""

    def empty(self, place: Place, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a moment of zeros with as many elements as ``like``."""

    def fits(self, held: Held, place: Place, like: torch.Tensor) -> bool:
        """Return True if a state has this kind and as many elements as ``like``."""

    def part(self, held: Held, span: Span) -> dict[str, torch.Tensor]:
        """Return the memory of a span, which begins at the slice or at a multiple of `ROW`."""

    def read(self, held: Held, span: Span, which: int, scratch: Scratch) -> torch.Tensor:
        """Return the flat values of a span: the memory itself if it is in full precision."""

    def write(
        self, values: torch.Tensor, held: Held, span: Span, which: int, scratch: Scratch
    ) -> None:
        """Store the values of a span, and overwrite them; the result of `read` needs no copy."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a step's arithmetic: float32, or a wider one."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class AsTheyAre:
    """Moments in the dtype that the step computes in."""

    is_values = True
    endings = ("",)

    def empty(self, place: Place, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros."""
        return {"": like.new_zeros(like.numel(), dtype=computed_in(like.dtype))}

    def fits(self, held: Held, place: Place, like: torch.Tensor) -> bool:
        """Compare dtype, device and size."""
        return _is(held.get(""), computed_in(like.dtype), like.numel(), like.device)

    def part(self, held: Held, span: Span) -> dict[str, torch.Tensor]:
        """Return the elements."""
        return {"": held[""][span.lo : span.hi]}

    def read(self, held: Held, span: Span, which: int, scratch: Scratch) -> torch.Tensor:
        """Return the memory itself."""
        return held[""][span.lo : span.hi]

    def write(
        self, values: torch.Tensor, held: Held, span: Span, which: int, scratch: Scratch
    ) -> None:
        """Copy, unless the values are in that memory."""
        target = held[""][span.lo : span.hi]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


@dataclass(frozen=True)
class InBfloat16:
    """Moments in bfloat16. See Note [Rounding by chance] in `rounding`."""

    is_values = True
    endings = ("",)

    def empty(self, place: Place, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros."""
        return {"": like.new_zeros(like.numel(), dtype=torch.bfloat16)}

    def fits(self, held: Held, place: Place, like: torch.Tensor) -> bool:
        """Compare dtype, device and size."""
        return _is(held.get(""), torch.bfloat16, like.numel(), like.device)

    def part(self, held: Held, span: Span) -> dict[str, torch.Tensor]:
        """Return the elements."""
        return {"": held[""][span.lo : span.hi]}

    def read(self, held: Held, span: Span, which: int, scratch: Scratch) -> torch.Tensor:
        """Return them as float32."""
        return scratch.converted(f"moment {which}", held[""][span.lo : span.hi], torch.float32)

    def write(
        self, values: torch.Tensor, held: Held, span: Span, which: int, scratch: Scratch
    ) -> None:
        """Round up or down by chance."""
        begin, end = span.first + span.lo, span.first + span.hi
        room = -(-end // ROW) * ROW - begin // ROW * ROW
        memory = scratch.take("bits", room, torch.int32, values.device)
        bits = random_bits(begin, end, span.step, which, memory)
        numbers = scratch.converted(f"moment {which}", values, torch.float32)
        round_by_chance(numbers, bits, held[""][span.lo : span.hi])


@dataclass(frozen=True)
class InBlocks:
    """Moments as 8-bit codes, with a scale per block; see Note [Dynamic codes] in `codes`.

    Blocks are counted from the start of the whole parameter. The first and last block of a slice
    may be partly on another rank; all others do not depend on the sharding.
    """

    block: int
    is_values = False
    endings = ("_codes", "_scales")

    def num_blocks(self, place: Place, numel: int) -> int:
        """Return the number of blocks that a slice overlaps."""
        end = place.first + numel
        return -(-end // self.block) - place.first // self.block if numel else 0

    def empty(self, place: Place, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros."""
        numel = like.numel()
        return {
            "_codes": like.new_zeros(numel, dtype=torch.uint8),
            "_scales": like.new_zeros(self.num_blocks(place, numel), dtype=torch.float32),
        }

    def fits(self, held: Held, place: Place, like: torch.Tensor) -> bool:
        """Compare dtypes, devices and sizes."""
        numel, device = like.numel(), like.device
        return _is(held.get("_codes"), torch.uint8, numel, device) and _is(
            held.get("_scales"), torch.float32, self.num_blocks(place, numel), device
        )

    def part(self, held: Held, span: Span) -> dict[str, torch.Tensor]:
        """Return the codes, and the scales of their blocks."""
        codes = held["_codes"][span.lo : span.hi]
        return {"_codes": codes, "_scales": held["_scales"][self._blocks(span)[1]]}

    def read(self, held: Held, span: Span, which: int, scratch: Scratch) -> torch.Tensor:
        """Decode."""
        before, blocks, numel = self._blocks(span)
        codes = held["_codes"][span.lo : span.hi]
        if numel != len(codes):
            codes = _padded(codes, before, numel)
        out = scratch.take(f"moment {which}", numel, torch.float32, codes.device)
        decode(codes, held["_scales"][blocks], which == 0, out, scratch)
        return out[before : before + span.hi - span.lo]

    def write(
        self, values: torch.Tensor, held: Held, span: Span, which: int, scratch: Scratch
    ) -> None:
        """Encode."""
        before, blocks, numel = self._blocks(span)
        codes, inside = held["_codes"][span.lo : span.hi], slice(before, before + len(values))
        numbers = scratch.converted(f"moment {which}", values, torch.float32)
        if numel != len(values):
            numbers, target = _padded(numbers, before, numel), codes.new_empty(numel)
            encode(numbers, which == 0, target, held["_scales"][blocks], scratch)
            codes.copy_(target[inside])
        else:
            encode(numbers, which == 0, codes, held["_scales"][blocks], scratch)

    def _blocks(self, span: Span) -> tuple[int, slice, int]:
        """Return the elements before the span in its first block, the blocks, and their numel."""
        begin, end = span.first + span.lo, span.first + span.hi
        first, last, zero = begin // self.block, -(-end // self.block), span.first // self.block
        blocks = slice(first - zero, last - zero)
        return begin - first * self.block, blocks, (last - first) * self.block


def kind_of(moments: str, block: int) -> Moments:
    """Return a kind of moments by name. **Raises** ConfigError for an unknown one."""
    check_kind(moments, block)
    if moments == "8bit":
        return InBlocks(block)
    return AsTheyAre() if moments == "fp32" else InBfloat16()


def _is(held: torch.Tensor | None, dtype: torch.dtype, numel: int, device: torch.device) -> bool:
    return held is not None and (held.dtype, held.numel(), held.device) == (dtype, numel, device)


def _padded(values: torch.Tensor, before: int, numel: int) -> torch.Tensor:
    """Return values padded with zeros on both sides."""
    made = values.new_zeros(numel)
    made[before : before + len(values)] = values
    return made
