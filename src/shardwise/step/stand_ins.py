"""Steps of optimizers over the DTensors of ``fully_shard``, taken on ShardTensors in their place.

Note [Steps over DTensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Operations on torch's DTensors lack strategies that optimizers need, write norms in place that are
partial, and answer `.item()` of a sum with this rank's part (D-Adaptation, Prodigy). A
`ShardTensor` over the same memory answers, gathers or refuses. So an optimizer that is not known to
be elementwise gets, for its step, a copy of itself in which ShardTensors stand for the parameters,
their gradients and their state. All share memory with the DTensors, and values that the step has
replaced are handed back as DTensors. A stand-in stays the same object from step to step, as
optimizers key their own tables by it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.layout.placements import local_of
from shardwise.step.local_step import Args, Kwargs, is_elementwise, optimizer_like, run_last
from shardwise.tensor.cut import Cut
from shardwise.tensor.plain_state import GATHERS, owner_of
from shardwise.tensor.replaced import params_of
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.param import ShardedParam, ShardTensorForm
from shardwise.unit.unit import Unit

_STAND_INS = "_shardwise_stand_ins"  # on an optimizer: its `_StandIns`
# Packages, and the class in them or None for all, that compile their steps for DTensors or gather
# them by themselves, or are right over DTensors and need whole tensors: these keep DTensors unless
# they are `optim.gathering`.
_KEEP_DTENSORS = {
    "torchao": None,
    "heavyball": None,
    "adam_mini": None,
    "galore_torch": "GaLoreAdamW",
    "apollo_torch": "GaLoreAdamW",
}


@cache
def step_on_shard_tensors() -> None:
    """Let optimizers step `fully_shard`'s parameters as ShardTensors, from now on.

    See Note [Steps over DTensors].
    """
    torch_optimizer.register_optimizer_step_pre_hook(_prepare)


def _prepare(optimizer: Optimizer, *_: object) -> None:
    """Make the last hook before a step create the copy, and the first hook after it hand back."""
    if torch.compiler.is_compiling() or is_elementwise(optimizer):
        return
    params = params_of(optimizer)
    if GATHERS not in vars(optimizer) and _keeps_dtensors(type(optimizer), params):
        return
    if hasattr(optimizer, "optimizers") or not any(_has_stand_in(param) for param in params):
        return
    if _STAND_INS not in vars(optimizer):
        stand_ins = vars(optimizer)[_STAND_INS] = _StandIns()
        stand_ins.hook = optimizer.register_step_post_hook(_hand_back).id
    run_last(optimizer, _substitute)
    after = cast(OrderedDict[int, object], optimizer._optimizer_step_post_hooks)
    after.move_to_end(vars(optimizer)[_STAND_INS].hook, last=False)


def _keeps_dtensors(kind: type[Optimizer], params: list[torch.Tensor]) -> bool:
    if kind is torch.optim.Muon:
        # torch raises in the middle of the step if a matrix has fewer rows than there are ranks.
        return all(param.shape[0] >= _num_slices(param) for param in params if param.ndim)
    package = kind.__module__.partition(".")[0]
    return package in _KEEP_DTENSORS and _KEEP_DTENSORS[package] in (None, kind.__name__)


def _num_slices(param: torch.Tensor) -> int:
    if not isinstance(param, DTensor):
        return 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard(0))


def _has_stand_in(param: torch.Tensor) -> bool:
    owner = None if isinstance(param, ShardTensor) else owner_of(param)
    return owner is not None and owner.has_cut


def _substitute(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    stand_ins: _StandIns | None = vars(optimizer).get(_STAND_INS)
    if stand_ins is None or torch.compiler.is_compiling():
        return None
    if stand_ins.step is not None and stand_ins.step.copy is optimizer:
        return None  # the copy calls its base class's step
    stand_ins.step = _Step(stand_ins, optimizer)
    return (stand_ins.step.copy, *args[1:]), kwargs


def _hand_back(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    stand_ins: _StandIns = vars(optimizer)[_STAND_INS]
    if stand_ins.step is not None and args and args[0] is not optimizer:
        stand_ins.step.hand_back()
        stand_ins.step = None


class _Place:
    """The owner of a stand-in: the DTensor in the model, with its gradient."""

    def __init__(self, param: ShardedParam) -> None:
        self.param = param
        self.of: Any = param.sharded
        self.local = local_of(self.of)
        self.sharded: nn.Parameter | None = None
        made = ShardTensor.wrap(self.local, param.cut, self)
        self.sharded = nn.Parameter(made, requires_grad=self.of.requires_grad)
        self._grads: tuple[torch.Tensor, ShardTensor] | None = None

    @property
    def name(self) -> str:
        return self.param.name

    @property
    def unit(self) -> Unit:
        return self.param.unit

    @property
    def cut(self) -> Cut:
        return self.param.cut

    @property
    def has_cut(self) -> bool:
        return True

    @property
    def form(self) -> ShardTensorForm:
        return ShardTensorForm(self.param.cut, self.of.requires_grad)

    @property
    def gradient(self) -> _Place:
        return self

    @property
    def full(self) -> torch.Tensor:
        return self.param.full

    def use_full(self) -> torch.Tensor:
        return self.param.use_full()

    def in_use(self) -> bool:
        return self.param.in_use()

    def set_requires_grad(self, requires_grad: bool) -> None:
        self.of.requires_grad_(requires_grad)

    def read(self) -> torch.Tensor | None:
        """Return the DTensor's gradient as a ShardTensor, the same object while it is the same."""
        grad = self.of.grad
        if grad is None or self._grads is None or self._grads[0] is not grad:
            self._grads = None if grad is None else (grad, self.stand_in_of(grad))
        return None if self._grads is None else self._grads[1]

    def write(self, value: torch.Tensor | None) -> None:
        """Replace the DTensor's gradient; a full tensor is cut."""
        cut = self.param.cut
        if value is None:
            self.of.grad = None
        elif isinstance(value, DTensor):
            self.of.grad = self.param.form.wrap(local_of(value))
        else:
            self.of.grad = self.param.form.wrap(cut.slice_of(value).clone())

    def add_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        return self.of.register_post_accumulate_grad_hook(hook)

    def note_alias(self, elements: torch.Tensor) -> None:
        pass  # the DTensor keeps its memory, and so do all that share it

    @torch.no_grad()
    def assign(self, value: torch.Tensor) -> None:
        """Write values that are assigned to ``p.data`` into the DTensor's memory."""
        cut = self.param.cut
        is_alike = isinstance(value, ShardTensor) and value._cut.matches(cut)
        new = local_of(value) if is_alike else cut.slice_of(_whole_of(value))
        if new.data_ptr() != self.local.data_ptr():
            self.local.copy_(new)

    def stand_in_of(self, value: torch.Tensor) -> ShardTensor:
        """Return a ShardTensor over the memory of a DTensor that is cut as the parameter is."""
        return ShardTensor.wrap(local_of(value), self.param.cut)


class _StandIns:
    """The stand-ins of one optimizer's parameters, and its step under way."""

    def __init__(self) -> None:
        self.hook = 0
        self.step: _Step | None = None
        self._places: dict[int, _Place] = {}  # by the id of the parameter in the model
        # Of each value of a state, by optimizer, parameter and key: the DTensor, and its stand-in.
        self.values: dict[tuple[int, int, object], tuple[object, object]] = {}

    def place_of(self, param: Any) -> _Place | None:
        """Return the place of a parameter, if a stand-in takes it."""
        if not _has_stand_in(param):
            return None
        place = self._places.get(id(param))
        if place is None or place.of is not param or place.local is not local_of(param):
            place = self._places[id(param)] = _Place(owner_of(param))
        return place


class _Step:
    """The copies of an optimizer, and of optimizers inside it, for one step."""

    def __init__(self, stand_ins: _StandIns, optimizer: Optimizer) -> None:
        self._stand_ins = stand_ins
        self._copies: dict[int, tuple[Optimizer, Optimizer]] = {}
        # By the id of the original, as wrappers share groups with the optimizer inside.
        self._groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._states: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self._originals: dict[int, _Place] = {}  # by the id of the stand-in
        self._replaced: set[tuple[int, str]] = set()  # attributes of copies, by the copy's id
        self.copy = self._copy_of(optimizer)
        vars(self.copy).pop("step", None)

    def _stand_in(self, param: Any) -> Any:
        """Return the stand-in of a parameter, or the parameter if it has none."""
        place = self._stand_ins.place_of(param)
        if place is None:
            return param
        self._originals[id(place.sharded)] = place
        return place.sharded

    def _copy_of(self, optimizer: Optimizer) -> Optimizer:
        if id(optimizer) in self._copies:
            return self._copies[id(optimizer)][1]
        groups = [self._group(group) for group in optimizer.param_groups]
        made = optimizer_like(optimizer, groups, self._state(optimizer))
        self._copies[id(optimizer)] = optimizer, made
        for name, value in vars(optimizer).items():
            if isinstance(value, Optimizer):
                vars(made)[name] = inner = self._copy_of(value)
                vars(inner).pop("step", None)  # a scheduler's, which steps the original
            elif name not in ("param_groups", "state") and _holds(value, _has_stand_in):
                vars(made)[name] = _changed(value, _has_stand_in, self._stand_in)  # of L-BFGS
                self._replaced.add((id(made), name))
        return made

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) not in self._groups:
            made = {**group, "params": [self._stand_in(param) for param in group["params"]]}
            self._groups[id(group)] = group, made
        return self._groups[id(group)][1]

    def _state(self, optimizer: Optimizer) -> dict[Any, Any]:
        held = cast("dict[Any, Any]", optimizer.state)
        if id(held) in self._states:
            return self._states[id(held)][1]
        made: dict[Any, Any] = defaultdict(dict)
        for param, values in held.items():
            place = self._stand_ins.place_of(param)
            if place is None:
                made[param] = values
            else:
                given = {key: self._given(held, place, key, v) for key, v in values.items()}
                made[self._stand_in(param)] = given
        self._states[id(held)] = held, made
        return made

    def _given(self, state: object, place: _Place, key: object, value: object) -> object:
        held = self._stand_ins.values.get((id(state), id(place.of), key))
        if held is not None and held[0] is value:  # nearly always
            return held[1]
        return _changed(value, place.param.form.has_same_cut, place.stand_in_of)

    def hand_back(self) -> None:
        """Write states, options and attributes of the copies back."""
        for state, made in self._states.values():
            state.clear()
            for param, values in made.items():
                place = self._originals.get(id(param))
                if place is None:
                    state[param] = values
                else:
                    kept = {key: self._kept(state, place, key, v) for key, v in values.items()}
                    state[place.of] = kept
        for group, made in self._groups.values():
            group.update({key: value for key, value in made.items() if key != "params"})
        for optimizer, copy in self._copies.values():
            for name, value in vars(copy).items():
                is_copied = name in ("param_groups", "state", _STAND_INS)
                is_copied |= isinstance(value, Optimizer) or (id(copy), name) in self._replaced
                if not is_copied:
                    vars(optimizer)[name] = value

    def _kept(self, state: object, place: _Place, key: object, value: object) -> object:
        values, where = self._stand_ins.values, (id(state), id(place.of), key)
        held = values.get(where)
        if held is not None and held[1] is value:
            return held[0]
        cut, form = place.param.cut, place.param.form

        def is_alike(each: Any) -> bool:
            return isinstance(each, ShardTensor) and each._cut.matches(cut)

        found = _changed(value, is_alike, lambda each: form.wrap(local_of(each)))
        if isinstance(value, ShardTensor):
            values[where] = (found, value)
        return found


def _whole_of(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself, or the whole of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _changed(
    value: Any, is_meant: Callable[[Any], bool], change: Callable[[Any], object]
) -> object:
    """Replace some tensors of a value of the state, in lists and dicts too."""
    if isinstance(value, torch.Tensor):
        return change(value) if is_meant(value) else value
    if type(value) is dict:
        return {key: _changed(each, is_meant, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(each, is_meant, change) for each in value)
    return value


def _holds(value: Any, is_meant: Callable[[Any], bool]) -> bool:
    """Tell whether a list, tuple or dict holds a tensor that is meant."""
    if isinstance(value, torch.Tensor):
        return is_meant(value)
    members = value.values() if type(value) is dict else value
    is_held = type(value) in (list, tuple, dict)
    return is_held and any(_holds(each, is_meant) for each in members)
