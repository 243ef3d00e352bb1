"""The encoded gather of one storage: slices to bytes on the wire, and bytes to the full copy.

Note [What every rank reads]
Every rank decodes the shares of all ranks, its own included, so the full copy has the same bits
everywhere. A single rank encodes and decodes too, so it computes as many ranks would. The gather
only reads the slices that the optimizer steps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardwise.codes.reduce import decode, encode
from shardwise.comm.pending import GatherItem, Pending
from shardwise.layout.wire import CPU_CHUNK_NUMEL, DEVICE_CHUNK_NUMEL, SCALE_BYTES, BlockRun, Wire
from shardwise.unit.home import Home


class _Blocks(NamedTuple):
    """Views of blocks: codes, scales, and the elements to encode or decode."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


class CodedGather:
    """The wire of one storage. Its memory is allocated from `start` until `finish`.

    **Cost** a byte (half a byte: 4 bits) per element of the full copy, and the scales; while it
    encodes or decodes, copies of some elements in float32.
    """

    def __init__(self, wire: Wire, rank: int, full: torch.Tensor) -> None:
        self._wire, self._rank, self._full = wire, rank, full
        self._kind = wire.coding.format
        self._most = CPU_CHUNK_NUMEL if full.device.type == "cpu" else DEVICE_CHUNK_NUMEL
        self._bytes = torch.empty(wire.num_bytes, dtype=torch.uint8, device=full.device)
        self._shares = self._lay_out_shares(self._bytes, rank, wire.layout.num_ranks)
        self.items = [
            GatherItem(
                segment,
                share,
                self._bytes[segment.full_offset :][: segment.shard_numel * wire.layout.num_ranks],
                True,
            )
            for segment, share in zip(wire.segments, self._shares, strict=True)
        ]
        self._arriving, self._plain = self._lay_out_arriving()
        self._is_arriving = False
        self._own: list[_Blocks] = []  # of slices that are not offloaded
        self._own_plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._staged: torch.Tensor | None = None
        self._free()

    @torch.no_grad()
    def start(self, slices: torch.Tensor, home: Home | None) -> Pending | None:
        """Encode this rank's slices into its shares; return their copy from home, if any."""
        self._bytes.untyped_storage().resize_(self._bytes.numel())
        self._is_arriving = True
        if home is None:
            if not self._own and not self._own_plain:
                self._own, self._own_plain = self._lay_out_own(slices, self._shares)
            self._encode(self._own, self._own_plain)
            return None
        self._staged = home.allocate(self._wire.share_bytes, torch.uint8)
        staged = self._lay_out_shares(self._staged, 0, 1)
        self._encode(*self._lay_out_own(slices, staged))
        return home.start_fetch(self._shares, staged)

    @torch.no_grad()
    def finish(self) -> None:
        """Decode arrived bytes into the full copy; do nothing if no gather was started."""
        if not self._is_arriving:
            return
        self._is_arriving, self._staged = False, None
        with torch._C._DisableFuncTorch():
            scratch = self._make_scratch()
            for codes, scales, values in self._arriving:
                decode(codes, scales, values, self._kind, scratch)
            if self._plain:
                torch._foreach_copy_([to for to, _ in self._plain], [by for _, by in self._plain])
        self._free()

    @property
    def memory(self) -> torch.Tensor:
        """The memory of arriving bytes; empty between gathers."""
        return self._bytes

    def _free(self) -> None:
        self._bytes.untyped_storage().resize_(0)

    def _make_scratch(self) -> torch.Tensor | None:
        """Return memory for float32 values before their cast; only the CPU is faster with it."""
        full = self._full
        if full.dtype == torch.float32 or full.device.type != "cpu" or not self._arriving:
            return None
        most = max(blocks.values.numel() for blocks in self._arriving)
        return torch.empty(most, dtype=torch.float32, device=full.device)

    def _encode(
        self, blocks: list[_Blocks], plain: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for codes, scales, values in blocks:
            encode(values, codes, scales, self._kind)
        if plain:
            torch._foreach_copy_([to for to, _ in plain], [values for _, values in plain])

    # -- views, which outlive the memory under them
    def _lay_out_shares(self, memory: torch.Tensor, rank: int, ranks: int) -> list[torch.Tensor]:
        """Return views of a rank's shares in memory for ``ranks`` ranks."""
        begins = [
            segment.shard_offset * ranks + segment.shard_numel * rank
            for segment in self._wire.segments
        ]
        sizes = [segment.shard_numel for segment in self._wire.segments]
        return [memory[begin:][:size] for begin, size in zip(begins, sizes, strict=True)]

    def _lay_out_own(
        self, slices: torch.Tensor, shares: list[torch.Tensor]
    ) -> tuple[list[_Blocks], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the blocks of this rank's slices, and (place, elements) of unencoded ones."""
        found, plain = [], []
        for number, place in enumerate(shares):
            share = self._wire.share(number, self._rank)
            for run in share.coded:
                for num, begin in self._parts(run, 1):
                    elements = slices[run.shard + begin * run.width :][: num * run.width]
                    codes, scales = self._blocks_at(place, run, 1, begin, num)
                    found.append(_Blocks(codes[0], scales[0], elements.view(num, run.width)))
            for each in share.plain:
                sent = self._plain_at(place, each)
                plain.append((sent, slices[each.shard :][: each.numel]))
        return found, plain

    def _lay_out_arriving(self) -> tuple[list[_Blocks], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the blocks of all ranks, and (elements, place) of unencoded elements."""
        found, plain = [], []
        for number, item in enumerate(self.items):
            size = item.segment.shard_numel
            for first, ranks, run in self._wire.runs_of_all(number):
                place = item.full[first * size : (first + ranks) * size]
                for num, begin in self._parts(run, ranks):
                    at = run.full + begin * run.width
                    shape, stride = (ranks, num, run.width), (run.num * run.width, run.width, 1)
                    values = self._full.as_strided(shape, stride, at)
                    found.append(_Blocks(*self._blocks_at(place, run, ranks, begin, num), values))
            for rank in range(self._wire.layout.num_ranks):
                place = item.full[rank * size : (rank + 1) * size]
                for each in self._wire.share(number, rank).plain:
                    to = self._full[each.full :][: each.numel]
                    plain.append((to, self._plain_at(place, each)))
        return found, plain

    def _parts(self, run: BlockRun, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield (number, first) of the blocks that are encoded or decoded at a time."""
        most = max(self._most // (run.width * ranks), 1)
        for begin in range(0, run.num, most):
            yield min(most, run.num - begin), begin

    def _blocks_at(
        self, place: torch.Tensor, run: BlockRun, ranks: int, begin: int, num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and scales of blocks in ``place``, of one or several ranks."""
        size, share = self._wire.coding.code_bytes(run.width), place.numel() // ranks
        origin = place.storage_offset()
        shape, stride = (ranks, num, size), (share, size, 1)
        codes = place.as_strided(shape, stride, origin + run.codes + begin * size)
        at = (origin + run.scales) // SCALE_BYTES + begin
        whole = place.as_strided((place.untyped_storage().nbytes(),), (1,), 0)
        numbers = whole.view(torch.float32)
        scales = numbers.as_strided((ranks, num, 1), (share // SCALE_BYTES, 1, 1), at)
        return codes, scales

    def _plain_at(self, place: torch.Tensor, plain: BlockRun) -> torch.Tensor:
        num_bytes = plain.numel * self._full.element_size()
        return place[plain.codes :][:num_bytes].view(self._full.dtype)
