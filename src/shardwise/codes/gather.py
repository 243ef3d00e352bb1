"""The encoded gather of one storage: slices to bytes on the wire, and bytes to the full copy.

Note [What every rank reads]
Every rank decodes the shares of all ranks, also the one that it has encoded, so the full copy has
the same bits on all ranks. A single rank encodes and decodes too, so it computes as many ranks
would. The gather only reads the slices that the optimizer steps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardwise.codes.reduce import decode, encode
from shardwise.comm.pending import GatherItem, Pending
from shardwise.layout.wire import CPU_CHUNK_NUMEL, DEVICE_CHUNK_NUMEL, SCALE_BYTES, BlockRun, Wire
from shardwise.unit.home import Home


class _BlockViews(NamedTuple):
    """Views of blocks: codes, scales, and the elements to encode or decode."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


_Pair = tuple[torch.Tensor, torch.Tensor]  # the target and the source of a copy


class CodedGather:
    """The wire of one storage. Its memory is allocated from `start` until `finish`.

    **Cost** a byte (half a byte: 4 bits) per element of the full copy, and the scales; while it
    encodes or decodes, copies of some elements in float32.
    """

    def __init__(self, wire: Wire, rank: int, full: torch.Tensor) -> None:
        self._wire = wire
        self._rank = rank
        self._full = full  # the full copy that `finish` writes
        self._kind = wire.coding.format
        self._max_numel = CPU_CHUNK_NUMEL if full.device.type == "cpu" else DEVICE_CHUNK_NUMEL
        # All ranks' encoded shares. The views of it below stay valid when it is freed and resized.
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
        self._received, self._received_plain = self._lay_out_received()
        self._is_started = False
        self._sent: list[_BlockViews] = []  # of slices that are not offloaded
        self._sent_plain: list[_Pair] = []
        self._staged: torch.Tensor | None = None  # encoded in host memory, until `finish`
        self._free()

    @torch.no_grad()
    def start(self, slices: torch.Tensor, home: Home | None) -> Pending | None:
        """Encode this rank's slices into its shares; return their copy from home, if any."""
        self._bytes.untyped_storage().resize_(self._bytes.numel())
        self._is_started = True
        if home is None:
            if not self._sent and not self._sent_plain:
                self._sent, self._sent_plain = self._lay_out_sent(slices, self._shares)
            self._encode(self._sent, self._sent_plain)
            return None
        self._staged = home.allocate(self._wire.share_bytes, torch.uint8)
        staged = self._lay_out_shares(self._staged, 0, 1)
        self._encode(*self._lay_out_sent(slices, staged))
        return home.start_fetch(self._shares, staged)

    @torch.no_grad()
    def finish(self) -> None:
        """Decode the received bytes into the full copy; do nothing if no gather was started."""
        if not self._is_started:
            return
        self._is_started = False
        self._staged = None
        with torch._C._DisableFuncTorch():
            scratch = self._make_scratch()
            for codes, scales, values in self._received:
                decode(codes, scales, values, self._kind, scratch)
            if self._received_plain:
                _copy_pairs(self._received_plain)
        self._free()

    @property
    def memory(self) -> torch.Tensor:
        """The memory of received bytes; empty between gathers."""
        return self._bytes

    def _free(self) -> None:
        self._bytes.untyped_storage().resize_(0)

    def _make_scratch(self) -> torch.Tensor | None:
        """Return memory for float32 values before their cast; only the CPU is faster with it."""
        full = self._full
        if full.dtype == torch.float32 or full.device.type != "cpu" or not self._received:
            return None
        numel = max(blocks.values.numel() for blocks in self._received)
        return torch.empty(numel, dtype=torch.float32, device=full.device)

    def _encode(self, blocks: list[_BlockViews], plain: list[_Pair]) -> None:
        for codes, scales, values in blocks:
            encode(values, codes, scales, self._kind)
        if plain:
            _copy_pairs(plain)

    # -- views
    def _lay_out_shares(self, memory: torch.Tensor, rank: int, ranks: int) -> list[torch.Tensor]:
        """Return views of a rank's shares in memory for ``ranks`` ranks."""
        begins = [
            segment.shard_offset * ranks + segment.shard_numel * rank
            for segment in self._wire.segments
        ]
        sizes = [segment.shard_numel for segment in self._wire.segments]
        return [memory[begin:][:size] for begin, size in zip(begins, sizes, strict=True)]

    def _lay_out_sent(
        self, slices: torch.Tensor, shares: list[torch.Tensor]
    ) -> tuple[list[_BlockViews], list[_Pair]]:
        """Return the blocks of this rank's slices, and (place, elements) of unencoded ones."""
        coded = []
        plain = []
        for number, place in enumerate(shares):
            share = self._wire.share(number, self._rank)
            for run in share.coded:
                for num, begin in self._parts(run, 1):
                    elements = slices[run.shard + begin * run.width :][: num * run.width]
                    codes, scales = self._blocks_at(place, run, 1, begin, num)
                    coded.append(_BlockViews(codes[0], scales[0], elements.view(num, run.width)))
            for run in share.plain:
                sent = self._plain_at(place, run)
                plain.append((sent, slices[run.shard :][: run.numel]))
        return coded, plain

    def _lay_out_received(
        self,
    ) -> tuple[list[_BlockViews], list[_Pair]]:
        """Return the blocks of all ranks, and (elements, place) of unencoded elements."""
        coded = []
        plain = []
        for number, item in enumerate(self.items):
            size = item.segment.shard_numel
            for first, ranks, run in self._wire.runs_of_all(number):
                place = item.full[first * size : (first + ranks) * size]
                for num, begin in self._parts(run, ranks):
                    values = self._full.as_strided(
                        size=(ranks, num, run.width),
                        stride=(run.num * run.width, run.width, 1),
                        storage_offset=run.full + begin * run.width,
                    )
                    codes, scales = self._blocks_at(place, run, ranks, begin, num)
                    coded.append(_BlockViews(codes, scales, values))
            for rank in range(self._wire.layout.num_ranks):
                place = item.full[rank * size : (rank + 1) * size]
                for run in self._wire.share(number, rank).plain:
                    elements = self._full[run.full :][: run.numel]
                    plain.append((elements, self._plain_at(place, run)))
        return coded, plain

    def _parts(self, run: BlockRun, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield (number, first) of the blocks that are encoded or decoded at a time."""
        max_blocks = max(self._max_numel // (run.width * ranks), 1)
        for begin in range(0, run.num, max_blocks):
            yield min(max_blocks, run.num - begin), begin

    def _blocks_at(
        self, place: torch.Tensor, run: BlockRun, ranks: int, begin: int, num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and scales of blocks in ``place``, of one or several ranks."""
        block_bytes = self._wire.coding.code_bytes(run.width)
        share_bytes = place.numel() // ranks
        origin = place.storage_offset()
        codes = place.as_strided(
            size=(ranks, num, block_bytes),
            stride=(share_bytes, block_bytes, 1),
            storage_offset=origin + run.codes + begin * block_bytes,
        )
        whole = place.as_strided((place.untyped_storage().nbytes(),), (1,), 0)
        scales = whole.view(torch.float32).as_strided(
            size=(ranks, num, 1),
            stride=(share_bytes // SCALE_BYTES, 1, 1),
            storage_offset=(origin + run.scales) // SCALE_BYTES + begin,
        )
        return codes, scales

    def _plain_at(self, place: torch.Tensor, plain: BlockRun) -> torch.Tensor:
        """Return the unencoded elements of a run in ``place``."""
        num_bytes = plain.numel * self._full.element_size()
        return place[plain.codes :][:num_bytes].view(self._full.dtype)


def _copy_pairs(pairs: list[_Pair]) -> None:
    """Copy the second tensor of each pair into the first."""
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
