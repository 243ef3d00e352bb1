"""The collectives of the engine: which transport, and the few that both transports share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from itertools import count
from typing import Protocol
from zlib import crc32

import torch
import torch.distributed as dist

# Its default arguments take hold of the world group where it is imported; dynamo does that in the
# first optimizer step, and gloo's threads then outlive destroy_process_group and abort at exit.
import torch.distributed.nn.functional

from shardwise.comm import coalesced, point_to_point
from shardwise.comm.control import Control, SoloControl, control_over
from shardwise.comm.pending import (
    CollectiveId,
    GatherItem,
    Pending,
    ReduceItem,
    blocking_collective,
    key_of,
)
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.device import time_of
from shardwise.layout.segments import Segment, even_segment
from shardwise.mesh import Axis, DataAxes
from shardwise.precisions import Coding
from shardwise.trace import Tracer, Traffic

# Message tags have 31 bits: model, unit, kind (2) and piece (8).
_MODELS = 1 << 9
_UNITS_PER_MODEL = 1 << 12
_TIED_TAG = 9  # gloo's; a pipeline schedule's own messages have tag 0
# A dtype of the same size that every backend sends; gloo knows no float8 and no unsigned integers.
_BITS_OF = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_NUMBERS = count(1)  # so that no tag is 0, the default of torch's own sends


def next_number() -> int:
    """Return this rank's count of sharded models, which may differ from other ranks'."""
    return next(_NUMBERS)


class Transport(Protocol):
    """Makes gathers: one of the two modules, in place, or a user's own."""

    def start_all_gather(
        self, items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
    ) -> Pending:
        """Start gathering segments along ``axis`` into place."""


class AllToAll(Protocol):
    """An all-to-all of bytes, by either transport."""

    def __call__(
        self,
        received: tuple[torch.Tensor, Sequence[int]],
        sent: tuple[torch.Tensor, Sequence[int]],
        axis: Axis,
        collective: CollectiveId,
        traffic: Traffic,
        finish: Callable[[], None],
        keep: object,
    ) -> Pending:
        """Send each rank its bytes, which lie in rank order, and receive this one's from each.

        A rank's own sizes are 0.
        """


class UnitTransport(Transport, Protocol):
    """Makes all collectives of units: `point_to_point` or `coalesced`."""

    def start_reduce_scatter(
        self,
        items: Sequence[ReduceItem],
        axis: Axis,
        collective: CollectiveId,
        traffic: Traffic,
        divisor: float,
    ) -> Pending:
        """Start reducing segments along ``axis``."""

    start_all_to_all: AllToAll


class Comm:
    """The collectives over the axes of one sharded model, with counts of the bytes sent.

    ``control`` carries small exchanges on a group apart from training's, which ``make_control``
    makes when it is first asked for; without one, this rank stands for itself.
    """

    def __init__(
        self,
        axes: DataAxes,
        device: torch.device,
        make_control: Callable[[], Control] = SoloControl,
    ) -> None:
        self.axes = axes
        self.device = device
        self._make_control = make_control
        self._control: Control | None = None
        self.time = time_of(device)
        self.traffic = Traffic()
        self.tracer = Tracer()
        self.number = 0  # of the model, the same on all ranks
        # Called before the next collective of a unit; returns what to call before its wait.
        self.before_next: Callable[[CollectiveId], Callable[[], Exception | None]] | None = None

    @cached_property
    def _transports(self) -> dict[str, UnitTransport]:
        return {axis.name: _transport(axis, self.device) for axis in self.axes.all}

    @property
    def _nearby_transport(self) -> UnitTransport:
        """The transport among neighbours on the shard axis: the same as along all of it."""
        return self._transports[self.axes.shard.name]

    @property
    def control(self) -> Control:
        """The small exchanges over all ranks of the axes, which meet in the first call.

        Python 3.11's `cached_property` has one lock for all models of a process: ranks that are
        threads would wait for each other inside it.
        """
        if self._control is None:
            self._control = self._make_control()
        return self._control

    def agree_on_number(self) -> None:
        """Take rank 0's count of sharded models as this one's number, for `collective_id`."""
        number = torch.tensor([next_number()], device=self.device)
        self.broadcast(number, CollectiveId("broadcast", "(number)", 0))
        self.number = int(number.item())

    def refuse_failed(self, what: str) -> None:
        """Refuse ``what`` where an earlier collective over one of the axes has failed."""
        for axis in self.axes.all:
            FAILED_GROUPS.refuse(what, axis.group)

    def collective_id(self, kind: str, unit: str, index: int) -> CollectiveId:
        """Name a collective. Its index keeps messages of different units and models apart.

        A model that is dropped in the middle of a step leaves messages that no rank receives.
        They must not be taken for those of the next model.
        """
        return CollectiveId(
            kind, unit, (self.number % _MODELS) * _UNITS_PER_MODEL + index % _UNITS_PER_MODEL
        )

    def start_all_gather(
        self,
        items: Sequence[GatherItem],
        axis: Axis,
        collective: CollectiveId,
        transport: Transport | None = None,
    ) -> Pending:
        """Start gathering segments along ``axis``; the transport's docstring has the cost."""
        by: Transport = transport or self._transports.get(axis.name) or self._nearby_transport
        finish = self._begin(collective)
        pending = by.start_all_gather(items, axis, collective, self.traffic)
        return self._follow(pending, axis, collective, finish)

    def start_reduce_scatter(
        self, items: Sequence[ReduceItem], axis: Axis, collective: CollectiveId, divisor: float
    ) -> Pending:
        """Start reducing segments along ``axis``: sums in rank order, divided by ``divisor``.

        If any part is encoded, all travel as bytes, by `codes`, which is not part of the core.
        """
        by, asked = self._transports[axis.name], (items, axis, collective, self.traffic, divisor)
        finish = self._begin(collective)
        pending: Pending
        if any(coding is not None for item in items for coding in item.codings):
            codes = import_module("shardwise.codes.reduce")
            pending = codes.start_reduce_scatter(*asked, by.start_all_to_all)
        else:
            pending = by.start_reduce_scatter(*asked)
        return self._follow(pending, axis, collective, finish)

    def _begin(self, collective: CollectiveId) -> Callable[[], Exception | None] | None:
        begin, self.before_next = self.before_next, None
        return None if begin is None else begin(collective)

    def _follow(
        self,
        pending: Pending,
        axis: Axis,
        collective: CollectiveId,
        finish: Callable[[], Exception | None] | None,
    ) -> Pending:
        if finish is not None:
            pending.wait_first(finish, self.control.group)
        return self.follow(pending, axis, collective)

    def follow(self, pending: Pending, axis: Axis, collective: CollectiveId) -> Pending:
        """Report a collective, and its end, to the recorder if there is one."""
        if (recorder := self.tracer.detailed) is not None:
            kind, unit = f"{axis.name}.{collective.kind}", collective.unit
            pending.follow(recorder, kind, unit, self.traffic.last_bytes)
        return pending

    def all_reduce(
        self,
        buffer: torch.Tensor,
        axis: Axis,
        collective: CollectiveId,
        divisor: float,
        codings: Sequence[tuple[int, int, Coding]] = (),
    ) -> None:
        """Replace a flat buffer by its sum over ``axis``, divided by ``divisor``.

        ``codings`` are (begin, end, how), ascending: elements that are encoded to be summed. The
        sums travel as they are.

        **Cost** sends 2 x numel x (ranks - 1) / ranks; one share of temporary memory per peer.
        """
        segment = even_segment(buffer.numel(), axis.size)
        share = segment.shard_numel
        padded = buffer
        if share * axis.size != buffer.numel() and not self.sends_uneven:
            padded = buffer.new_zeros(share * axis.size)
            padded[: buffer.numel()].copy_(buffer)
        out = buffer.new_empty(share)
        cuts, at = list[tuple[int, int, Coding | None]](), 0
        for begin, end, coding in (*codings, (padded.numel(), padded.numel(), None)):
            cuts += [(at, begin, None)] if begin > at else []
            cuts += [(begin, end, coding)] if end > begin else []
            at = end
        parts = tuple((begin, padded[begin:end]) for begin, end, _ in cuts)
        item = ReduceItem(segment, parts, out, tuple(coding for _, _, coding in cuts))
        self.start_reduce_scatter([item], axis, collective, divisor).wait()
        lo, hi = segment.bounds(axis.rank)
        padded[lo:hi].copy_(out[: hi - lo])
        own = padded[axis.rank * share : (axis.rank + 1) * share]
        self.start_all_gather([GatherItem(segment, own, padded, True)], axis, collective).wait()
        if padded is not buffer:
            buffer.copy_(padded[: buffer.numel()])

    @property
    def sends_uneven(self) -> bool:
        """Tell whether shares may differ in length, and so lie in place in any buffer."""
        return all(t is point_to_point for t in self._transports.values())

    def sum_in_rank_order(
        self, values: torch.Tensor, axis: Axis, collective: CollectiveId
    ) -> torch.Tensor:
        """Return the elementwise sum of a small tensor over ``axis``, the same bits everywhere."""
        return self.gather_rows(values, axis, collective).sum(dim=0)

    def max(self, values: torch.Tensor, axis: Axis, collective: CollectiveId) -> torch.Tensor:
        """Return the elementwise maximum of a small tensor over ``axis``."""
        return self.gather_rows(values, axis, collective).amax(dim=0)

    def gather_rows(
        self, values: torch.Tensor, axis: Axis, collective: CollectiveId
    ) -> torch.Tensor:
        """Return the ranks' tensors of one shape, stacked in rank order.

        On gloo a tensor is never taken for one of another name, shape or dtype: both ranks wait.
        """
        if axis.size == 1:
            return values[None]
        self.traffic.add(f"{axis.name}.scalars", collective.unit, values.nbytes * (axis.size - 1))
        here = values.to(self.device).contiguous()  # tensors on the host are sent from the device
        rows = here.new_empty((axis.size, *here.shape))
        segment = even_segment(rows.numel(), axis.size)
        item = GatherItem(segment, here.view(-1), rows.view(-1), False)
        self._gather_small(
            item, axis, collective, values, lambda: dist.all_gather(list(rows), here, axis.group)
        )
        return rows.to(values.device)

    def _gather_small(
        self,
        item: GatherItem,
        axis: Axis,
        collective: CollectiveId,
        values: torch.Tensor,
        gather: Callable[[], object],
    ) -> None:
        """Gather by ``gather``; on gloo by messages tagged by name, shape and dtype.

        gloo's own collectives match by their order alone: tensors of one size would be taken for
        each other, and with different sizes it aborts the process.
        """
        with self.tracer.span("exchange", collective.unit):
            if _transport(axis, self.device) is point_to_point:
                about = f"{collective.about} {tuple(values.shape)} {values.dtype}".strip()
                number = crc32(about.encode()) % (_MODELS * _UNITS_PER_MODEL)
                tagged = replace(collective, index=number, about=about)
                point_to_point.start_all_gather([item], axis, tagged, Traffic()).wait()
            else:
                with blocking_collective(key_of(collective, axis)):
                    gather()

    def from_owner(
        self, values: torch.Tensor, axis: Axis, owner: int, collective: CollectiveId
    ) -> torch.Tensor:
        """Return a copy of what rank ``owner`` of ``axis`` has, on all of its ranks.

        Other ranks pass a tensor of the same shape and dtype.
        """
        is_here = axis.rank == owner
        sent = values.nbytes * (axis.size - 1) if is_here else 0
        self.traffic.add(f"{axis.name}.scalars", collective.unit, sent)
        here = torch.empty_like(values, device=self.device)
        if is_here:
            here.copy_(values)
        flat = here.view(-1)
        item = GatherItem(Segment(flat.numel(), flat.numel(), 0, 0, owner), flat, flat, True)
        self._gather_small(
            *(item, axis, collective, values),
            lambda: dist.broadcast(here, group=axis.group, group_src=owner),
        )
        return here.to(values.device)

    def hand_over(
        self,
        own: torch.Tensor,
        places: Sequence[torch.Tensor],
        takers: Collection[int],
        axis: Axis,
        collective: CollectiveId,
        source: int | None = None,
    ) -> None:
        """Send this rank's elements to the ``takers`` along ``axis``, which receive all ranks'.

        **Shapes** ``own`` is flat and contiguous, perhaps empty. On takers ``places[r]`` is as long
        as rank r's, and is written. ``source``: the only rank that has elements, if it is known.

        **Cost** sends ``own`` to each other taker; a broadcast if one rank has all and all take.
        """
        me, others = axis.rank, [rank for rank in takers if rank != axis.rank]
        self.traffic.add(f"{axis.name}.stream", collective.unit, own.nbytes * len(others))
        with (
            self.tracer.span("exchange", collective.unit),
            blocking_collective(key_of(collective, axis)),
        ):
            if source is not None and len(takers) == axis.size > 1:
                sent = own if me == source else places[source]
                dist.broadcast(sent, group=axis.group, group_src=source)
            else:
                works: list[dist.P2POp] = []
                for step in range(1, axis.size):
                    to, sender = (me + step) % axis.size, (me - step) % axis.size
                    if me in takers and places[sender].numel():
                        arrives = places[sender]
                        works.append(
                            dist.P2POp(dist.irecv, arrives, group=axis.group, group_peer=sender)
                        )
                    if to in others and own.numel():
                        works.append(dist.P2POp(dist.isend, own, group=axis.group, group_peer=to))
                for work in dist.batch_isend_irecv(works) if works else []:
                    work.wait()
        if me in takers and own.numel():
            places[me].copy_(own)

    def exchange_with(
        self, peers: Sequence[int], mine: torch.Tensor, axis: Axis, name: str
    ) -> dict[int, torch.Tensor]:
        """Return each peer's tensor, of the shape of ``mine``, by its rank along ``axis``.

        Each of them calls it with the others as peers: pipeline stages that share a parameter.

        **Cost** sends ``mine`` to each peer.
        """
        here = mine.to(self.device).contiguous()  # tensors on the host are sent from the device
        received = {peer: torch.empty_like(here) for peer in peers}
        self.traffic.add(f"{axis.name}.tied", name, here.nbytes * len(received))
        if here.numel() and received:
            messages = []
            for peer, tensor in received.items():
                other = dist.get_global_rank(axis.group, peer)
                messages.append(dist.P2POp(dist.irecv, tensor, other, axis.group, _TIED_TAG))
                messages.append(dist.P2POp(dist.isend, here, other, axis.group, _TIED_TAG))
            with blocking_collective(key_of(CollectiveId("exchange", name, 0), axis)):
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
        return {peer: tensor.to(mine.device) for peer, tensor in received.items()}

    def broadcast(
        self,
        tensor: torch.Tensor,
        collective: CollectiveId,
        source: int = 0,
        also: Sequence[Axis] = (),
    ) -> None:
        """Overwrite ``tensor`` by that of rank ``source`` of the shard axis, first replica.

        With further axes, by that of their first rank.
        """
        bits = _BITS_OF.get(tensor.itemsize, tensor.dtype)
        sent = tensor if tensor.dtype == bits else tensor.detach().view(bits)
        for axis in reversed((*self.axes.all, *also)):
            if axis.size > 1:
                with blocking_collective(key_of(collective, axis)):
                    first = source if axis is self.axes.shard else 0
                    dist.broadcast(sent, group=axis.group, group_src=first)


def make_comm(axes: DataAxes, device: torch.device) -> Comm:
    """Return the collectives over axes whose ranks all call this; ``control`` is made when asked.

    **Cost** one small broadcast.
    """
    made = Comm(axes, device, lambda: control_over(axes))
    made.agree_on_number()
    return made


def _transport(axis: Axis, device: torch.device) -> UnitTransport:
    """Return the transport for the backend that serves ``device``."""
    try:
        backend = axis.group._get_backend(torch.device(device.type)).name().lower()
    except RuntimeError:  # a group of threads, as torch's own tests use
        return coalesced
    return point_to_point if backend == "gloo" else coalesced


def all_reduce_scalars(
    values: Sequence[float], group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the sums of a few numbers over the ranks of ``group``, in float64."""
    group = group or dist.group.WORLD
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_gloo = accelerator is None or "gloo" in str(dist.get_backend(group))
    device = torch.device("cpu") if is_gloo else accelerator
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()
