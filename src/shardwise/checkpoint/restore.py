"""Put a checkpoint's values into a model and its optimizer: this rank's slices, read in place.

Note [Moments in a checkpoint]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint has ``exp_avg`` and ``exp_avg_sq`` as values: the 8-bit codes of
`shardwise.optim.AdamW` as float32, its bfloat16 moments as they are. So any AdamW can load them.
Ours encodes them in the form of its groups, which gives the saved codes again if the blocks are the
same. torch's takes them in the dtype of its parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.container import dtype_name, memory_of, torch_dtype
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.replicas import OUTER, SavedReplicas, is_of_replica, is_parameter
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.checkpoint.state import (
    clean_name,
    local_piece,
    names_of_params,
    param_names,
    persistent_buffers,
)
from shardwise.engine.adoption import innermost
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout.boxes import Region, full_region
from shardwise.offload.home import Home
from shardwise.optim.adamw import AdamW, Moment
from shardwise.optim.kinds import ARGUMENTS
from shardwise.optim.moments import MOMENTS, kind_of
from shardwise.parallel.local_steps import LocalSteps
from shardwise.parallel.parts import Model, StageOptimizers, modules_of
from shardwise.tensor.cut import Cut
from shardwise.tensor.inner import cut_by_rows, has_own_gather, inner_of, plain_parts
from shardwise.tensor.plain_state import PLAIN_SCALARS
from shardwise.tensor.replaced import params_of
from shardwise.unit.param import ShardedParam

_SHOWN = 5
_COMPARED_ELEMENTS = 1 << 22  # at once


@dataclass(frozen=True, eq=False)
class Place:
    """One parameter: all its names, and the memory of its elements [lo, hi).

    ``held`` is the tensor in the optimizer's groups. ``param`` and ``cut`` are None for a parameter
    that is not sharded, which has all elements. A parameter of several plain tensors has a place
    for each. The optimizer's state belongs to the first, with the ``suffixes`` of all of them.
    """

    names: tuple[str, ...]
    held: torch.Tensor
    shape: tuple[int, ...]
    lo: int
    hi: int
    data: torch.Tensor
    param: ShardedParam | None = None
    cut: Cut | None = None
    is_first: bool = True
    suffixes: tuple[str, ...] = ("",)

    @property
    def piece(self) -> Region:
        """The box of the parameter whose flattened elements [lo, hi) are in ``data``."""
        return full_region(self.shape) if self.cut is None else self.cut.piece

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements [lo, hi) that each rank of the shard axis works on."""
        if self.param is None or self.cut is None or self.cut.layout is None or self.param.dim > 0:
            return ((0, self.piece.numel),)
        return self.cut.ranges

    @property
    def of_own_class(self) -> torch.Tensor | None:
        """This rank's part of a parameter whose class defines its own gather; else None."""
        local: torch.Tensor = self.held if self.param is None else self.param.sharded._local_tensor
        return local if has_own_gather(local) else None

    def state_of_class(self, before: object) -> torch.Tensor:
        """Return memory for state of the parameter's own class: ``before``, if it fits."""
        local = self.of_own_class
        assert local is not None
        if isinstance(before, torch.Tensor) and before.shape == self.held.shape:
            inside = before._local_tensor if isinstance(before, DTensor) else before
            has_same_cut = self.param is None or self.param.form.has_same_cut(before)
            if has_same_cut and tuple(plain_parts(inside)) == self.suffixes:
                return before
        made = torch.zeros_like(local)
        return made if self.param is None else self.param.form.wrap(made)

    def state_like(self, dtype: torch.dtype, before: object) -> torch.Tensor:
        """Return memory for state that is cut as the parameter is: ``before``, if it fits."""
        held = before if isinstance(before, torch.Tensor) and before.dtype == dtype else None
        if self.param is None:
            is_plain = type(held) is torch.Tensor and held.device == self.data.device
            if held is not None and is_plain and tuple(held.shape) == self.shape:
                return held
            return torch.empty(self.shape, dtype=dtype, device=self.data.device)
        if held is not None and self.param.form.has_same_cut(held):
            return held
        shape, home = self.param.cut.local_shape, self.param.unit.home
        if isinstance(home, Home) and home.files.optimizer is not None:
            return self.param.form.wrap(
                home.in_file(home.files.optimizer, prod(shape), dtype).view(shape)
            )
        return self.param.form.wrap(torch.empty(shape, dtype=dtype, device=self.data.device))


def places_of_sharded(param: ShardedParam) -> list[Place]:
    """Return the places of a sharded parameter."""
    names, held = param_names(param), param.sharded
    parts = inner_of(held._local_tensor, param.cut, names[0])
    suffixes = tuple(part.suffix for part in parts)
    return [
        Place(
            tuple(name + part.suffix for name in names),
            held,
            part.cut.shape,
            part.cut.lo,
            part.cut.hi,
            part.local.detach(),
            param,
            part.cut,
            part is parts[0],
            suffixes,
        )
        for part in parts
    ]


def places_of_plain(model: Model) -> list[Place]:
    """Return the places of a model that is not sharded. **Raises** ConfigError on meta."""
    names: dict[nn.Parameter, list[str]] = {}
    for each in modules_of(model):
        for name, param in each.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(clean_name(name))
            if param.is_meta:
                raise ConfigError(
                    f"model: parameter '{name}' is on the meta device and has no memory to load "
                    "into; call model.to_empty(device=...) first"
                )
    places = []
    for param, of_param in names.items():
        parts = plain_parts(param)
        for number, (suffix, part) in enumerate(parts.items()):
            called = tuple(name + suffix for name in of_param)
            shape, count = tuple(part.shape), part.numel()
            kinds = None, None, number == 0, tuple(parts)
            places.append(Place(called, param, shape, 0, count, part.detach(), *kinds))
    return places


@dataclass(frozen=True)
class Target:
    """Elements [lo, hi) of a tensor of the checkpoint, or of a piece, to be read into ``data``.

    With ``fill`` it is called with them, and writes them to ``data`` in its form.
    """

    info: TensorInfo
    lo: int
    hi: int
    data: torch.Tensor
    piece: Region | None = None
    fill: Callable[[torch.Tensor], None] | None = None


class Restore:
    """The changes of a load of a model and its optimizer: decided and allocated before any is made.

    ``targets`` are what is read. Without ``strict``, ``missing`` are the names that the checkpoint
    lacks, ``unexpected`` those that only it has. ``prefix`` begins the names of the replica that is
    loaded (Note [Saved replicas]). ``names`` are the keys of parameters and buffers
    that are read, ``elsewhere`` the names that other ranks look for.

    **Raises** CheckpointError when the checkpoint does not fit, naming what differs.
    """

    def __init__(
        self,
        source: Checkpoint,
        model: Model,
        places: Sequence[Place],
        optimizer: StageOptimizers | None,
        strict: bool,
        cast: bool,
        elsewhere: Collection[str],
        prefix: str = "",
    ) -> None:
        self.targets: list[Target] = []
        self.found: dict[Place, str] = {}  # with the name under which each was saved
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._source, self._optimizer, self._cast = source, optimizer, cast
        self._prefix = prefix
        self._after: list[Callable[[], None]] = []
        self._groups: list[dict[str, object]] = []
        self._states: dict[Place, dict[str, object]] = {}
        self._match_model(model, places, strict, set(elsewhere))
        self.names = {target.info.key for target in self.targets}
        if optimizer is not None:
            self._match_groups(optimizer, places)
            self._make_states(optimizer)

    # -- parameters and buffers

    def _match_model(
        self, model: Model, places: Sequence[Place], strict: bool, used: set[str]
    ) -> None:
        """Find the saved tensor of each parameter and buffer."""
        source = self._source
        infos = {
            i.name: i for i in source.tensors if i.kind == "buffer" or is_parameter(i, self._prefix)
        }
        for place in places:
            # More than one name if weights are tied here and were not when saved.
            saved = dict.fromkeys(source.tied.get(name, name) for name in place.names)
            names = [name for name in saved if name in infos]
            if not names:
                self.missing.append(place.names[0])
                continue
            name, *others = names
            used |= {name, *place.names}
            for other in others:
                if tensors_differ(source, infos[name], infos[other]):
                    if strict:
                        self._refuse(
                            f"'{name}' and '{other}' are one parameter here, and two there with "
                            "other values. Load into a model that does not tie them, or pass "
                            f"strict=False to take '{name}' alone"
                        )
                    used.discard(other)
            self._check(infos[name], place.shape, place.data.dtype)
            self.targets.append(Target(infos[name], place.lo, place.hi, place.data, place.piece))
            self.found[place] = name
        for key, buffer in persistent_buffers(model):
            if key not in infos:
                self.missing.append(key)
                continue
            used.add(key)
            self._check(infos[key], tuple(buffer.shape), buffer.dtype)
            local, piece = local_piece(buffer.detach(), key)
            self.targets.append(Target(infos[key], 0, local.numel(), local, piece))
        self.unexpected = [name for name in infos if name not in used]
        if (strict or not self.found) and (self.missing or self.unexpected):
            differences = list_differences(self.missing, self.unexpected)
            both = "or pass strict=False to load what both have"
            self._refuse(
                f"the model and the checkpoint differ: {differences}. Load into the model that "
                f"was saved; {both if self.found else 'no name is in both'}"
            )

    def _check(self, info: TensorInfo, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if info.shape != tuple(shape):
            self._refuse(f"'{info.name}' has shape {info.shape} there and {tuple(shape)} here")
        if info.dtype != dtype_name(dtype, info.name) and not self._cast:
            self._refuse(
                f"'{info.name}' is {torch_dtype(info.dtype)} there and {dtype} here; shard with "
                "the same master dtype, or pass cast=True to convert"
            )

    # -- the optimizer

    def _match_groups(self, optimizer: StageOptimizers, places: Sequence[Place]) -> None:
        """Take the saved settings of each of the optimizer's groups."""
        source, info = self._source, self._source.optimizer
        if info is None or info.class_name not in ("", optimizer.name):
            class_name = info.class_name if info else "missing"
            self._refuse(
                f"the optimizer is {class_name} there and {optimizer.name} here; load with "
                "optimizer=None to take the parameters alone"
            )
        here = [
            {self.found[place] for place in group if place in self.found}
            for group in names_of_params([(p.held, p) for p in places if p.is_first], optimizer)
        ]
        # Tied parameters have one name; those that this model lacks (without strict) have none.
        known = {n: saved for place, saved in self.found.items() for n in (*place.names, saved)}
        listed = [[source.tied.get(n, n) for n in group["params"]] for group in info.groups]
        there = [{known[name] for name in names if name in known} for names in listed]
        if len(here) != len(there):
            self._refuse(f"the optimizer has {len(there)} groups there and {len(here)} here")
        for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
            if ours != theirs:
                name = min(ours ^ theirs)
                has, lacks = ("here", "there") if name in ours else ("there", "here")
                self._refuse(f"'{name}' is in group {number} of the optimizer {has}, not {lacks}")
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in info.groups]
        first = innermost(optimizer.optimizers[0])
        if isinstance(first, AdamW):
            try:
                self._groups = [first.loaded_settings(group) for group in self._groups]
            except ConfigError as error:
                self._refuse(str(error))

    def _make_states(self, optimizer: StageOptimizers) -> None:
        """Make each parameter's new state. Memory that the optimizer already has is reused.

        **Cost** the state's bytes of this rank, where it does not exist yet.
        """
        source, info = self._source, self._source.optimizer
        assert info is not None
        tensors: dict[str, list[TensorInfo]] = {}
        for tensor in source.tensors:
            if tensor.kind == "optimizer" and tensor.name and not is_of_replica(tensor):
                tensors.setdefault(source.tied.get(tensor.name, tensor.name), []).append(tensor)
        dtypes = {
            tensor.name: tensor.dtype
            for tensor in source.tensors
            if is_parameter(tensor, self._prefix)
        }
        in_optimizer = {
            id(p): {**group, **saved}
            for group, saved in zip(optimizer.param_groups, self._groups, strict=True)
            for p in group["params"]
        }
        is_ours = isinstance(innermost(optimizer.optimizers[0]), AdamW)
        for place, name in self.found.items():
            group = in_optimizer.get(id(place.held))
            if group is None or not place.is_first:
                continue
            state = self._states[place] = dict(info.state.get(name, {}))
            before = optimizer.state.get(place.held, {})
            of_name: Sequence[TensorInfo] = tensors.get(name, ())
            if place.of_own_class is not None:
                of_name = self._make_states_of_class(of_name, place, state, before)
            for tensor in of_name:
                key, dtype = tensor.state, torch_dtype(tensor.dtype)
                if not _is_cut(source, tensor, place):
                    # torch keeps step counts on the CPU, unless the step runs on the device.
                    on_device = group.get("fused") or group.get("capturable") or tensor.shape
                    device = place.data.device if on_device else torch.device("cpu")
                    data = state[key] = torch.empty(tensor.shape, dtype=dtype, device=device)
                    self.targets.append(Target(tensor, 0, tensor.numel, data))
                    continue
                part = tensor, place.lo, place.hi
                if is_ours and key in MOMENTS:
                    kind = kind_of(group["moments"], group["block"])
                    moment = Moment(place.held, kind, MOMENTS.index(key), before)
                    state.update(moment.state)
                    self.targets.append(Target(*part, moment.data, place.piece, moment.fill))
                    continue
                if dtype == torch.uint8 and source.ranges(tensor, place.piece) != place.ranges:
                    self._refuse(
                        f"optimizer state '{key}' of '{tensor.name}' is quantised in blocks of the "
                        f"slices that {source.manifest.num_shards} ranks had at stage "
                        f"{source.manifest.stage}, and the slices are others here. Load it with "
                        "as many ranks, the same layout and stage, or without the optimizer"
                    )
                # A moment of our AdamW may have another dtype than its parameter: not for others.
                is_reduced = key in MOMENTS and ARGUMENTS[0] in group
                if tensor.dtype == dtypes.get(name) or is_reduced:
                    dtype = place.data.dtype  # like the parameter's, which may have been cast
                value = state[key] = place.state_like(dtype, before.get(key))
                data = value.to_local() if isinstance(value, DTensor) else value
                self.targets.append(Target(*part, data, place.piece))

    def _make_states_of_class(
        self,
        tensors: Sequence[TensorInfo],
        place: Place,
        state: dict[str, object],
        before: Mapping[str, object],
    ) -> list[TensorInfo]:
        """Make the state that has the parameter's own class; return the tensors of other state."""
        by_state = {tensor.state: tensor for tensor in tensors}
        assert place.of_own_class is not None
        rest = [part.shape[1:] for part in plain_parts(place.of_own_class).values()]
        shapes, last = [(place.shape[0], *each) for each in rest], place.suffixes[-1]
        for key in [state.removesuffix(last) for state in by_state if state.endswith(last)]:
            infos = [by_state[key + s] for s in place.suffixes if key + s in by_state]
            if [info.shape for info in infos] != shapes:
                continue
            value = state[key] = place.state_of_class(before.get(key))
            local = value._local_tensor if isinstance(value, DTensor) else value
            for tensor, part in zip(infos, plain_parts(local).values(), strict=True):
                cut = None if place.param is None else cut_by_rows(tensor.shape, place.param.cut)
                begin, end = (0, tensor.numel) if cut is None else (cut.lo, cut.hi)
                self.targets.append(Target(tensor, begin, end, part.detach()))
                del by_state[tensor.state]
        return list(by_state.values())

    # -- the outer step of replicas that step separately

    def add_outer(
        self, steps: LocalSteps, places: Sequence[Place], saved: SavedReplicas | None
    ) -> None:
        """Load counts and the outer state of each unit; begin anew where they are not there."""
        infos = {(i.name, i.state): i for i in self._source.tensors if i.kind == "optimizer"}
        by_param = {id(place.param): place for place in places}
        for state in steps.states():
            flats, targets = state.flats(), list[Target]()
            for key, flat in flats.items():
                for param, part in state.split(flat):
                    place = by_param[id(param)]
                    info = infos.get((OUTER + place.names[0], key))
                    if info is None:
                        break
                    targets.append(Target(info, place.lo, place.hi, part, place.piece))
            if len(targets) == len(flats) * len(state.params):
                self.targets += targets
                self._after.append(partial(state.finish_load, flats))
            else:
                self._after.append(state.begin)
        num_steps, num_synced = (0, ()) if saved is None else (saved.num_steps, saved.num_synced)
        self._after.append(partial(steps.restore, num_steps, num_synced))

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._source.where}: {why}")

    # -- the changes

    def read(self) -> Iterator[int]:
        """Read every target; yield bytes as they come.

        Targets in CPU memory that need no cast are read in place, without a copy.
        """
        source, in_place, chunks = self._source, [], []
        for target in self.targets:
            data = target.data
            same = torch_dtype(target.info.dtype) == data.dtype and target.fill is None
            if same and data.device.type == "cpu" and data.is_contiguous():
                in_place.append(data)
                memory = memory_of(data)
                chunks += source.chunks(target.info, target.lo, target.hi, memory, target.piece)
            else:  # even without elements: every rank's full copy becomes stale
                with torch.no_grad():
                    read = source.read(target.info, target.lo, target.hi, target.piece)
                    if target.fill is not None:
                        target.fill(read)
                    else:
                        data.copy_(read.view(data.shape))
                yield data.nbytes
        try:
            yield from source.read_chunks(chunks)
        finally:
            for data in in_place:  # autograd, and units with full copies, must see the change
                torch.autograd.graph.increment_version(data)

    def drop_states(self) -> None:
        """Drop the optimizer's state, whose memory may be of two checkpoints."""
        for place in self._states:
            if self._optimizer is not None:
                self._optimizer.state.pop(place.held, None)

    def apply(self) -> None:
        """Give the optimizer its settings and its state, once all tensors are read."""
        for place in self.found:
            place.held.grad = None
        for finish in self._after:
            finish()
        for each in self._optimizer.optimizers if self._optimizer is not None else ():
            for group, saved in zip(each.param_groups, self._groups, strict=True):
                _apply_settings(group, saved)
            held = set(map(id, params_of(each)))
            for place, state in self._states.items():
                if id(place.held) in held:
                    if state:
                        each.state[place.held] = state
                    else:
                        each.state.pop(place.held, None)


def list_differences(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Describe which names only the model has, and which only the checkpoint."""
    parts = [
        f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if names[_SHOWN:] else ''})"
        for what, names in (("missing there", missing), ("unknown here", unexpected))
        if names
    ]
    return "; ".join(parts)


def tensors_differ(source: Source, a: TensorInfo, b: TensorInfo) -> bool:
    """Tell whether two saved tensors differ; reads all of both on every rank, if they do not.

    So all ranks find the same answer without an exchange.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return True
    for lo in range(0, a.numel, _COMPARED_ELEMENTS):
        hi = min(lo + _COMPARED_ELEMENTS, a.numel)
        first, second = (source.read(info, lo, hi).view(torch.uint8) for info in (a, b))
        if not torch.equal(first, second):
            return True
    return False


def _is_cut(source: Checkpoint, info: TensorInfo, place: Place) -> bool:
    """Tell whether a tensor of the optimizer is cut as its parameter is; else it is plain."""
    if info.shape != place.shape:
        return False
    # An imported tensor is whole in its file; for a scalar the shape does not decide then.
    return source.is_cut(info) or (source.is_imported and info.state not in PLAIN_SCALARS)


def _apply_settings(group: dict[str, object], saved: Mapping[str, object]) -> None:
    for key, value in saved.items():
        if key in ARGUMENTS and key not in group:  # of our AdamW's moments, for another AdamW
            continue
        before = group.get(key)
        if (
            isinstance(before, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and before.shape == value.shape
        ):
            before.copy_(value)  # a captured graph, or a schedule, holds this tensor
        else:
            group[key] = value
