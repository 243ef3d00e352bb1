"""Collectives of the engine: gathers and reductions by a transport, and small ones by torch."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from itertools import count
from typing import Protocol
from zlib import crc32

import torch
import torch.distributed as dist

# Imported early for its side effect. Its default arguments keep a reference to the world group if
# there is one at import. dynamo would import it in the first optimizer step; gloo's threads would
# then outlive destroy_process_group and abort at exit.
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
    """Interface of gathers: `point_to_point`, `coalesced`, or a user's own."""

    def start_all_gather(
        self, items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
    ) -> Pending:
        """Start gathering segments along ``axis`` into place."""


class AllToAll(Protocol):
    """Interface of an all-to-all of bytes, which both transports have."""

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
        """Send each rank its bytes and receive bytes from each; both are in rank order.

        The sizes of a rank's bytes for itself are 0.
        """


class UnitTransport(Transport, Protocol):
    """Interface of all collectives of units: `point_to_point` or `coalesced`."""

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

    - ``traffic``: the bytes that this rank has sent, by axis and kind.
    - ``number``: the number of the model, the same on all ranks; it separates message tags.
    - ``control``: small exchanges on a separate group. ``make_control`` makes it at its first use;
      the default is one rank without exchanges.
    - ``before_next``: called once before the next collective of a unit. It returns a function to
      call before the wait for that collective, see `Pending.wait_first`.
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
        self.number = 0
        self.before_next: Callable[[CollectiveId], Callable[[], Exception | None]] | None = None

    @cached_property
    def _transports(self) -> dict[str, UnitTransport]:
        return {axis.name: _transport(axis, self.device) for axis in self.axes.all}

    @property
    def _secondary_transport(self) -> UnitTransport:
        """The transport of gathers over a part of the shard axis, as of the whole axis."""
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
        """Set the model's number for `collective_id`: rank 0's count of sharded models."""
        number = torch.tensor([next_number()], device=self.device)
        self.broadcast(number, CollectiveId("broadcast", "(number)", 0))
        self.number = int(number.item())

    def refuse_failed(self, call: str) -> None:
        """Refuse ``call`` if an earlier collective over one of the axes has failed.

        **Raises** CollectiveError.
        """
        for axis in self.axes.all:
            FAILED_GROUPS.refuse(call, axis.group)

    def collective_id(self, kind: str, unit: str, index: int) -> CollectiveId:
        """Return the id of a collective. Its index differs by unit and model.

        A model that is dropped in the middle of a step leaves messages that no rank receives.
        The next model must not receive them.
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
        chosen: Transport = (
            transport or self._transports.get(axis.name) or self._secondary_transport
        )
        finish = self._begin(collective)
        pending = chosen.start_all_gather(items, axis, collective, self.traffic)
        return self._follow(pending, axis, collective, finish)

    def start_reduce_scatter(
        self, items: Sequence[ReduceItem], axis: Axis, collective: CollectiveId, divisor: float
    ) -> Pending:
        """Start reducing segments along ``axis``: sums in rank order, divided by ``divisor``.

        If any part is encoded, all parts are sent as bytes by `codes`, which is not in the core.
        """
        transport = self._transports[axis.name]
        finish = self._begin(collective)
        pending: Pending
        if any(coding is not None for item in items for coding in item.codings):
            codes = import_module("shardwise.codes.reduce")
            pending = codes.start_reduce_scatter(
                items, axis, collective, self.traffic, divisor, transport.start_all_to_all
            )
        else:
            pending = transport.start_reduce_scatter(items, axis, collective, self.traffic, divisor)
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

        ``codings`` are (begin, end, coding), ascending: ranges of elements that are encoded when
        they are sent to be summed. The sums are sent without encoding.

        **Cost** sends 2 x numel x (ranks - 1) / ranks; one share of temporary memory per peer.
        """
        segment = even_segment(buffer.numel(), axis.size)
        share = segment.shard_numel
        padded = buffer
        if share * axis.size != buffer.numel() and not self.sends_uneven:
            padded = buffer.new_zeros(share * axis.size)
            padded[: buffer.numel()].copy_(buffer)
        out = buffer.new_empty(share)
        ranges = _with_gaps(codings, padded.numel())
        item = ReduceItem(
            segment,
            parts=tuple((begin, padded[begin:end]) for begin, end, _ in ranges),
            out=out,
            codings=tuple(coding for _, _, coding in ranges),
        )
        self.start_reduce_scatter([item], axis, collective, divisor).wait()
        lo, hi = segment.bounds(axis.rank)
        padded[lo:hi].copy_(out[: hi - lo])
        source = padded[axis.rank * share : (axis.rank + 1) * share]
        gather = GatherItem(segment, source, padded, in_place=True)
        self.start_all_gather([gather], axis, collective).wait()
        if padded is not buffer:
            buffer.copy_(padded[: buffer.numel()])

    @property
    def sends_uneven(self) -> bool:
        """Tell whether shares may differ in length, so that buffers need no padding."""
        return all(transport is point_to_point for transport in self._transports.values())

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

        On gloo a rank never receives a tensor of another name, shape or dtype in place of the
        expected one: both ranks wait.
        """
        if axis.size == 1:
            return values[None]
        self.traffic.add(f"{axis.name}.scalars", collective.unit, values.nbytes * (axis.size - 1))
        local = values.to(self.device).contiguous()  # tensors on the host are sent from the device
        rows = local.new_empty((axis.size, *local.shape))
        segment = even_segment(rows.numel(), axis.size)
        item = GatherItem(segment, local.view(-1), rows.view(-1), in_place=False)
        self._gather_small(
            item, axis, collective, values, lambda: dist.all_gather(list(rows), local, axis.group)
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
        """Gather by ``gather``; on gloo by messages tagged with name, shape and dtype.

        gloo matches its collectives by their order alone. If ranks gather different tensors, it
        would mix up tensors of one size, and abort the process if the sizes differ.
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

    def broadcast_from_owner(
        self, values: torch.Tensor, axis: Axis, owner: int, collective: CollectiveId
    ) -> torch.Tensor:
        """Return a copy of the values of rank ``owner`` of ``axis``, on all ranks of the axis.

        Other ranks pass a tensor of the same shape and dtype.
        """
        is_owner = axis.rank == owner
        sent = values.nbytes * (axis.size - 1) if is_owner else 0
        self.traffic.add(f"{axis.name}.scalars", collective.unit, sent)
        copied = torch.empty_like(values, device=self.device)
        if is_owner:
            copied.copy_(values)
        flat = copied.view(-1)
        segment = Segment(flat.numel(), flat.numel(), full_offset=0, shard_offset=0, owner=owner)
        self._gather_small(
            GatherItem(segment, flat, flat, in_place=True),
            axis,
            collective,
            values,
            lambda: dist.broadcast(copied, group=axis.group, group_src=owner),
        )
        return copied.to(values.device)

    def gather_to(
        self,
        local: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        receivers: Collection[int],
        axis: Axis,
        collective: CollectiveId,
        source: int | None = None,
    ) -> None:
        """Gather the elements of all ranks along ``axis`` on the ranks ``receivers``.

        **Shapes** ``local`` is flat and contiguous, perhaps empty. On receivers ``outputs[r]`` has
        the length of rank r's elements, and is written. ``source``: the only rank that has
        elements, if it is known.

        **Cost** sends ``local`` to each other receiver; a broadcast if one rank has all elements
        and all ranks receive.
        """
        rank = axis.rank
        others = [receiver for receiver in receivers if receiver != rank]
        self.traffic.add(f"{axis.name}.stream", collective.unit, local.nbytes * len(others))
        with (
            self.tracer.span("exchange", collective.unit),
            blocking_collective(key_of(collective, axis)),
        ):
            if source is not None and len(receivers) == axis.size > 1:
                sent = local if rank == source else outputs[source]
                dist.broadcast(sent, group=axis.group, group_src=source)
            else:
                messages: list[dist.P2POp] = []
                for step in range(1, axis.size):
                    receiver = (rank + step) % axis.size
                    sender = (rank - step) % axis.size
                    if rank in receivers and outputs[sender].numel():
                        messages.append(
                            dist.P2POp(
                                dist.irecv, outputs[sender], group=axis.group, group_peer=sender
                            )
                        )
                    if receiver in others and local.numel():
                        messages.append(
                            dist.P2POp(dist.isend, local, group=axis.group, group_peer=receiver)
                        )
                for work in dist.batch_isend_irecv(messages) if messages else []:
                    work.wait()
        if rank in receivers and local.numel():
            outputs[rank].copy_(local)

    def exchange_with(
        self, peers: Sequence[int], tensor: torch.Tensor, axis: Axis, name: str
    ) -> dict[int, torch.Tensor]:
        """Return each peer's tensor, of the shape of ``tensor``, by its rank along ``axis``.

        Pipeline stages that share a parameter call it, each with the others as peers.

        **Cost** sends ``tensor`` to each peer.
        """
        local = tensor.to(self.device).contiguous()  # tensors on the host are sent from the device
        received = {peer: torch.empty_like(local) for peer in peers}
        self.traffic.add(f"{axis.name}.tied", name, local.nbytes * len(received))
        if local.numel() and received:
            messages = []
            for peer, output in received.items():
                other = dist.get_global_rank(axis.group, peer)
                messages.append(dist.P2POp(dist.irecv, output, other, axis.group, _TIED_TAG))
                messages.append(dist.P2POp(dist.isend, local, other, axis.group, _TIED_TAG))
            with blocking_collective(key_of(CollectiveId("exchange", name, 0), axis)):
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
        return {peer: output.to(tensor.device) for peer, output in received.items()}

    def broadcast(
        self,
        tensor: torch.Tensor,
        collective: CollectiveId,
        source: int = 0,
        also: Sequence[Axis] = (),
    ) -> None:
        """Overwrite ``tensor`` by the tensor of rank ``source`` of the shard axis, first replica.

        ``also``: further axes, over which the first rank's tensor is taken.
        """
        bits = _BITS_OF.get(tensor.itemsize, tensor.dtype)
        sent = tensor if tensor.dtype == bits else tensor.detach().view(bits)
        for axis in reversed((*self.axes.all, *also)):
            if axis.size > 1:
                with blocking_collective(key_of(collective, axis)):
                    first = source if axis is self.axes.shard else 0
                    dist.broadcast(sent, group=axis.group, group_src=first)


def make_comm(axes: DataAxes, device: torch.device) -> Comm:
    """Return the collectives over axes; all of their ranks must call it.

    **Cost** one small broadcast.
    """
    comm = Comm(axes, device, lambda: control_over(axes))
    comm.agree_on_number()
    return comm


def _with_gaps(
    codings: Sequence[tuple[int, int, Coding]], numel: int
) -> list[tuple[int, int, Coding | None]]:
    """Return ranges that cover all elements: those with a coding, and the gaps between them."""
    ranges: list[tuple[int, int, Coding | None]] = []
    end_before = 0
    for begin, end, coding in codings:
        if begin > end_before:
            ranges.append((end_before, begin, None))
        if end > begin:
            ranges.append((begin, end, coding))
        end_before = end
    if numel > end_before:
        ranges.append((end_before, numel, None))
    return ranges


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
    """Return the sums of some numbers over the ranks of ``group``, in float64."""
    group = group or dist.group.WORLD
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_gloo = accelerator is None or "gloo" in str(dist.get_backend(group))
    device = torch.device("cpu") if is_gloo else accelerator
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()
