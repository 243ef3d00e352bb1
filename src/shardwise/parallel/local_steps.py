"""Replicas that step separately and synchronise every few steps: local SGD and DiLoCo.

Note [Steps of replicas]
~~~~~~~~~~~~~~~~~~~~~~~~
Each replica (one row of the mesh (replicate, shard)) trains by itself: its gradients are means over
its ranks, and nothing crosses the replicate axis between synchronisations. Every ``every``
steps the parameters are made equal, in one of two ways:

- "average": each parameter becomes its mean over the replicas. Nothing is kept for it.
- `Outer`: every rank keeps the parameters of the last synchronisation, the *anchor*, in float32.
  The outer gradient is the anchor minus the mean of the replicas' parameters, taken as the mean of
  the differences. SGD with Nesterov momentum steps the anchor, and all replicas continue from it.

The optimizer of the inner steps keeps its state, which differs between replicas. Anchor and
momentum are cut as the parameters are: each rank has those of its slices, at stage 0 of all.

With ``streams`` the units form that many groups. Each group is synchronised every ``every`` steps.
The groups do it at different steps, so that the largest message is so many times smaller.

All arithmetic is elementwise, in float32 (float64 for float64 parameters), and sums run in rank
order, so a run has the bits of a plain program with the same loop, on any shards.

**Source** local SGD: "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767).
DiLoCo: arXiv 2311.08105, algorithm 1. Groups of layers at staggered steps: "Streaming DiLoCo"
(arXiv 2501.18512), section 2.1; its overlap of communication and its mixing are not offered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from shardwise.codes.means import coded_mean
from shardwise.comm.pending import GatherItem
from shardwise.engine.agreement import agree, find_difference, refusal_facts
from shardwise.errors import ConfigError, StateError
from shardwise.layout.segments import even_segment
from shardwise.optim.codes import Scratch, decode, encode
from shardwise.outer import BLOCK, Outer, OuterName, StateFormat, Windows, outer_of
from shardwise.parallel.parts import Model, Parts
from shardwise.precisions import Coding
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit


class LocalSteps:
    """Let the replicas of a sharded model step separately; synchronise them every few steps.

    Call `step` after each ``optimizer.step()``, on all ranks::

        model = shard(model, mesh=Axes(dp_replicate=4))
        optimizer = torch.optim.AdamW(model.parameters())
        local = LocalSteps(model, every=50, outer="nesterov")
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()

    ``outer`` is "average", "nesterov" (an `Outer` with its defaults) or an `Outer`. ``streams``
    groups of units are synchronised at different steps. See Note [Steps of replicas].

    From now on gradients are means over the shard axis. This lasts as long as the model. For
    synchronous steps again, save a checkpoint at a synchronisation and load it into another model.

    **State** no accumulation window is open, and no gradient is kept. Parameters are the same on
    all replicas.

    **Cost** one small exchange. With an `Outer`, 4 bytes per element of this rank's slices, and 4
    more for the momentum (1.02 in int8), where the slices are.

    **Raises** ConfigError, on all ranks, for a model without a replicate axis, settings that differ
    between ranks, or trained parameters other than plain floating-point slices.
    """

    def __init__(
        self, model: Model, *, every: int, outer: Outer | OuterName = "average", streams: int = 1
    ) -> None:
        parts = Parts(model)
        self._parts = parts
        self.num_steps = 0
        self._groups: list[list[UnitSlices]] = []
        refusal = None
        try:
            self.windows = Windows(every, outer_of(outer), streams)
            self._check()
        except ConfigError as error:
            refusal = error
        facts = [*refusal_facts(refusal), f"every={every}, outer={outer}, streams={streams}"]
        agree(parts.all_ranks, facts, "LocalSteps()", "Give the same values on every rank")
        if refusal is not None:
            raise refusal
        parts.finish_pending_work("LocalSteps()")
        for unit in parts.units:
            sums = unit.grads.sum_settings
            replicas = _replicas_of(unit)
            unit.grads.sum_settings = replace(
                sums, over_replicas=False, divisor=sums.divisor / replicas
            )
        for engine in parts.engines:
            engine.status.local_steps = self
        slices = [UnitSlices(unit, self.outer) for unit in parts.units]
        slices = [unit_slices for unit_slices in slices if unit_slices.params]
        axis = parts.comm.axes.replicate
        assert axis is not None
        self._axis = axis
        self._groups = [slices[first::streams] for first in range(streams)]
        self._steps_seen = self._optimizer_steps
        self.num_synced = [0] * streams  # the step of the last synchronisation of each group
        parts.add_pass_check(self._check_called)

    def _check(self) -> None:
        parts = self._parts
        if parts.replicas_differ:
            raise ConfigError("LocalSteps(): this model has one already; use that")
        without = [unit for unit in parts.units if unit.comm.axes.replicate is None]
        if without:
            raise ConfigError(
                f"LocalSteps(): unit '{without[0].name or '(root)'}' has no replicate axis, so "
                "there are no replicas to step separately. Give shard() a mesh with one: "
                "mesh=shardwise.Axes(dp_replicate=2), or "
                "init_device_mesh(device, (2, shards), mesh_dim_names=('replicate', 'shard'))"
            )
        if parts.has_stages:
            raise ConfigError(
                "LocalSteps(): this model is a stage of a pipeline, whose replicas cannot step "
                "separately; take pp=1"
            )
        if parts.is_in_window or parts.suspended:
            raise ConfigError(
                "LocalSteps(): this is inside of gathered() or an accumulation window; make it "
                "before the first step, or after optimizer.step() and zero_grad()"
            )
        for unit in parts.units:
            for param in trained_of(unit):
                local = local_of(param)
                if type(local) is not torch.Tensor or not local.is_floating_point():
                    raise ConfigError(
                        f"LocalSteps(): parameter '{param.name}' is trained and is a "
                        f"{type(local).__name__} of {local.dtype}, and means are taken of plain "
                        "floating-point numbers; freeze it, or train without LocalSteps"
                    )

    @property
    def every(self) -> int:
        """Steps between synchronisations."""
        return self.windows.every

    @property
    def streams(self) -> int:
        """Number of groups of units that are synchronised at separate steps."""
        return self.windows.streams

    @property
    def outer(self) -> Outer | None:
        """The outer step; None averages."""
        return self.windows.outer

    @property
    def _optimizer_steps(self) -> int:
        return self._parts.first.rank_checks.num_steps

    def _check_called(self) -> None:
        """Raise StateError if the optimizer has made a window of steps without a call of `step`."""
        num = self._optimizer_steps - self._steps_seen
        if num > self.every * max(len(self._parts.first.rank_checks.optimizers), 1):
            raise StateError(
                f"LocalSteps: the optimizer has made {num} steps since the last call of "
                f"LocalSteps.step(), and replicas synchronise every {self.every}; call it after "
                "each optimizer.step()"
            )

    # -- steps
    def step(self) -> None:
        """Count a step; synchronise the groups of units whose turn it is. All ranks call it.

        **Cost** nothing in most steps. In a synchronisation 2 x (replicas - 1) / replicas x 4 bytes
        per element of this rank's slices, or 1.02 with ``send="int8"``; memory for three copies of
        one unit's slices; an exchange of 16 bytes.

        **Raises** StateError, on all ranks, if they have called it differently often, or stepped
        their optimizers differently often; on this rank, inside of `gathered` or an accumulation
        window.
        """
        self._check_moment("LocalSteps.step()")
        self.num_steps += 1
        self._steps_seen = self._optimizer_steps
        due = [number for number in range(self.streams) if self._is_due(number)]
        if due:
            self._synchronize(due)

    def synchronize(self) -> None:
        """Synchronise all groups that have stepped since their last synchronisation.

        All ranks call it, before evaluation, an export, or the end of a run. Then all replicas have
        the same parameters.
        """
        self._check_moment("LocalSteps.synchronize()")
        due = [n for n in range(self.streams) if self.num_synced[n] < self.num_steps]
        self._synchronize(due)

    def _is_due(self, number: int) -> bool:
        turn = -(-(number + 1) * self.every // self.streams)
        return (self.num_steps - turn) % self.every == 0

    def _check_moment(self, what: str) -> None:
        self._parts.check_usable(f"{what}: ")
        if self._parts.suspended:
            raise StateError(f"{what} inside gathered(): leave that context first")
        if self._parts.is_in_window:
            raise StateError(
                f"{what} inside of an accumulation window; call it after optimizer.step()"
            )

    @torch.no_grad()
    def _synchronize(self, due: Sequence[int]) -> None:
        parts = self._parts
        facts = [
            f"{self.num_steps} calls of LocalSteps.step(), groups {list(due)} of {self.streams}",
            f"{self._optimizer_steps} steps of optimizers",
            str(self.windows),
        ]
        difference = find_difference(parts.all_ranks, facts, "LocalSteps: a synchronisation")
        if difference is not None:
            why = f"LocalSteps: the ranks have taken different steps: {difference}"
            parts.refuse(f"{why}. load() a checkpoint")
            raise StateError(
                f"{why}. Every rank calls step() after each optimizer.step(); start again, or "
                "from a checkpoint that was saved before"
            )
        parts.finish_pending_work("LocalSteps.step()")
        for number in due:
            for slices in self._groups[number]:
                slices.check_trained()
        for number in due:
            for slices in self._groups[number]:
                slices.synchronize()
            self.num_synced[number] = self.num_steps

    # -- checkpoints
    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self._axis.rank

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._axis.size

    def states(self) -> "Iterator[UnitSlices]":
        """Yield the slices of every unit with trained parameters."""
        for group in self._groups:
            yield from group

    @property
    def num_kept(self) -> int:
        """Number of tensors that are kept for each parameter: anchor, momentum."""
        return 0 if self.outer is None else 1 + bool(self.outer.momentum)

    def restore(self, num_steps: int, num_synced: Sequence[int]) -> None:
        """Set the counts of a checkpoint; with other ``streams``, all groups are synchronised."""
        self.num_steps = num_steps
        self._steps_seen = self._optimizer_steps
        has_same_groups = len(num_synced) == self.streams
        self.num_synced = list(num_synced) if has_same_groups else [num_steps] * self.streams

    # -- figures
    @property
    def is_synchronized(self) -> bool:
        """Tell whether all replicas have the same parameters now."""
        return all(synced == self.num_steps for synced in self.num_synced)

    @property
    def state_bytes(self) -> int:
        """Bytes of anchor and momentum on this rank."""
        return sum(slices.state_bytes for group in self._groups for slices in group)


def _replicas_of(unit: Unit) -> int:
    axis = unit.comm.axes.replicate
    assert axis is not None
    return axis.size


def trained_of(unit: Unit) -> list[ShardedParam]:
    """Return the parameters of a unit that the optimizer may change."""
    return [param for param in unit.params if param.sharded.requires_grad]


def local_of(param: ShardedParam) -> torch.Tensor:
    """Return this rank's slice of a parameter."""
    sharded: torch.Tensor = param.sharded.detach()
    return sharded._local_tensor if isinstance(sharded, DTensor) else sharded


class UnitSlices:
    """The slices of one unit's trained parameters, and their outer state, flat.

    ``anchor`` has the parameters of the last synchronisation; ``momentum`` may be encoded.
    """

    def __init__(self, unit: Unit, outer: Outer | None) -> None:
        self.unit = unit
        self.params = trained_of(unit)
        self._outer = outer
        self.anchor: torch.Tensor | None = None
        self.momentum: _Momentum | None = None
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Set the anchor to the current parameters, and the momentum to zero."""
        if self._outer is None or not self.params:
            return
        self.anchor = self._values(self._home)
        if self._outer.momentum:
            self.momentum = _Momentum(self.anchor, self._outer.state)

    @property
    def _home(self) -> torch.device:
        return local_of(self.params[0]).device

    def _values(self, device: torch.device) -> torch.Tensor:
        """Return a flat copy of the slices on ``device``, in float32 or wider."""
        slices = [local_of(param).reshape(-1) for param in self.params]
        dtype = torch.float32
        for values in slices:
            dtype = torch.promote_types(dtype, values.dtype)
        return torch.cat([values.to(device, dtype) for values in slices])

    def check_trained(self) -> None:
        """Raise StateError for a parameter that was frozen at the start and is trained now."""
        known = {id(param) for param in self.params}
        for param in trained_of(self.unit):
            if id(param) not in known:
                raise StateError(
                    f"LocalSteps: parameter '{param.name}' is trained now and was frozen when "
                    "LocalSteps was made, so replicas differ in it; train it from the start"
                )

    def synchronize(self) -> None:
        """Make the replicas' parameters equal. **Cost** three copies of the slices."""
        device = self.unit.comm.device
        values = self._values(device)
        if self._outer is None:
            self._write(self._mean(values))
            return
        assert self.anchor is not None
        anchor = self.anchor.to(device)
        step = self._mean(torch.sub(anchor, values, out=values))
        if self.momentum is not None:
            momentum = self.momentum.read(device).mul_(self._outer.momentum).add_(step)
            step.add_(momentum, alpha=self._outer.momentum)
            self.momentum.write(momentum)
        anchor.add_(step, alpha=-self._outer.lr)
        self._write(anchor)
        self.anchor.copy_(anchor)

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over replicas. At stage 0 each rank of a replica sends its share only."""
        unit = self.unit
        comm = unit.comm
        if unit.settings.stage.shards_state or comm.axes.shard.size == 1:
            return self._mean_of_share(values)
        axis = comm.axes.shard
        share = even_segment(values.numel(), axis.size).shard_numel
        padded = values.new_zeros(share * axis.size)
        padded[: values.numel()].copy_(values)
        mine = padded[axis.rank * share :][:share]
        mine.copy_(self._mean_of_share(mine))
        item = GatherItem(even_segment(padded.numel(), axis.size), mine, padded, True)
        collective = comm.collective_id("all_gather", unit.name, unit.index)
        comm.start_all_gather([item], axis, collective).wait()
        return padded[: values.numel()]

    def _mean_of_share(self, values: torch.Tensor) -> torch.Tensor:
        unit = self.unit
        comm = unit.comm
        axis = comm.axes.replicate
        assert axis is not None
        if not values.numel():
            return values
        collective = comm.collective_id("all_reduce", unit.name, unit.index)
        with comm.tracer.span("synchronize", unit.name):
            if self._outer is not None and self._outer.send == "int8":
                coding = Coding("int8", BLOCK)
                return coded_mean(comm, values, axis, collective, coding)
            comm.all_reduce(values, axis, collective, axis.size)
        return values

    def flats(self) -> dict[str, torch.Tensor]:
        """Return the outer state by key, flat; decoded momentum is a copy."""
        state = {} if self.anchor is None else {"anchor": self.anchor}
        if self.momentum is not None:
            state["momentum"] = self.momentum.read(self._home, copy=False)
        return state

    def split(self, flat: torch.Tensor) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
        """Yield each parameter with its part of a flat tensor, in its slice's shape."""
        parts = flat.split([local_of(param).numel() for param in self.params])
        for param, part in zip(self.params, parts, strict=True):
            yield param, part.view(local_of(param).shape)

    def finish_load(self, flats: Mapping[str, torch.Tensor]) -> None:
        """Encode the momentum from `flats`, into which a checkpoint was loaded."""
        if self.momentum is not None:
            self.momentum.write(flats["momentum"])

    def _write(self, values: torch.Tensor) -> None:
        """Write new values into the slices; full copies become stale."""
        slices = [local_of(param) for param in self.params]
        parts = values.split([local.numel() for local in slices])
        for local, part in zip(slices, parts, strict=True):
            local.copy_(part.view(local.shape))
        if self.unit.settings.full_between_calls:
            self.unit.reshard()

    @property
    def state_bytes(self) -> int:
        """Bytes of anchor and momentum."""
        anchor = 0 if self.anchor is None else self.anchor.nbytes
        return anchor + (0 if self.momentum is None else self.momentum.nbytes)


class _Momentum:
    """The momentum of a flat tensor, in its dtype or in codes of 8 bits."""

    def __init__(self, like: torch.Tensor, format: StateFormat) -> None:
        self._like = like.new_empty(0)  # has the dtype
        self._format = format
        self._numel = like.numel()
        self._tensors: tuple[torch.Tensor, ...] = (torch.zeros_like(like),)
        if format == "int8":
            num_blocks = -(-like.numel() // BLOCK)
            codes = torch.zeros(num_blocks * BLOCK, dtype=torch.uint8, device=like.device)
            scales = torch.zeros(num_blocks, dtype=torch.float32, device=like.device)
            self._tensors = (codes, scales)

    def read(self, device: torch.device, *, copy: bool = True) -> torch.Tensor:
        """Return a decoded copy on ``device``; without ``copy``, perhaps the momentum itself."""
        if self._format == "fp32":
            return self._tensors[0].to(device, copy=copy)
        codes, scales = (tensor.to(device) for tensor in self._tensors)
        out = torch.empty(codes.numel(), dtype=torch.float32, device=device)
        decode(codes, scales, True, out, Scratch())
        return out[: self._numel].to(self._like.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Keep new values."""
        if self._format == "fp32":
            self._tensors[0].copy_(values)
            return
        codes, scales = self._tensors
        padded = torch.zeros(codes.numel(), dtype=torch.float32, device=values.device)
        padded[: self._numel].copy_(values)
        new_codes = torch.empty_like(codes, device=values.device)
        new_scales = torch.empty_like(scales, device=values.device)
        encode(padded, True, new_codes, new_scales, Scratch())
        codes.copy_(new_codes)
        scales.copy_(new_scales)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(tensor.nbytes for tensor in self._tensors)
