"""The step of some of an optimizer's parameters as plain tensors, by a copy of the optimizer.

Note [Steps as plain tensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An elementwise optimizer of torch's computes the same from this rank's elements as from sharded
tensors, and each operation on sharded tensors costs the host more. So the last hook before the step
takes the step with plain tensors, and the optimizer's code receives a copy without parameters. The
hooks before it sum gradients of tied copies, and record when the step begins. The optimizer's code
steps as usual with a closure, which computes gradients later, and if a hook of the user's runs
before it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import is_
from typing import Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.offload.loads import MULTIPLE, cut_into_loads
from shardwise.offload.staging import Copies, DeviceLoad
from shardwise.tensor.plain_state import PLAIN_SCALARS, owner_of
from shardwise.tensor.shard_tensor import ShardTensor

Params = Sequence[tuple[int, torch.Tensor]]  # of an optimizer, with the numbers of their groups
Key = tuple[int, str]  # a parameter's id, and the name of a part of its state
State = Mapping[Key, torch.Tensor]  # this rank's elements of each
MakeHostMemory = Callable[[int, torch.dtype], torch.Tensor]
Mirror = Callable[[torch.Tensor], torch.Tensor | None]
OVERLAP = "_shardwise_overlap"  # on an optimizer whose steps run in the background
Args = tuple[object, ...]
Kwargs = dict[str, object]
BeforeStep = Callable[[Optimizer, Args, Kwargs], tuple[Args, Kwargs] | None]
V = TypeVar("V")
O = TypeVar("O", bound=Optimizer)  # noqa: E741 - a type


class PlainStep(Protocol):
    """The step of some parameters, which is taken once: by a call, or through a device."""

    def use_state(self, state: State) -> None:
        """Step with these tensors in place of some of the optimizer's state."""

    def __call__(self) -> State:
        """Step; return the tensors with which the optimizer has replaced some of `use_state`."""

    def loads(
        self, num_bytes: int, mirror: Mirror, make_memory: MakeHostMemory
    ) -> Iterator[DeviceLoad]:
        """Yield the step as loads of ``num_bytes`` for staging buffers.

        Call `write_back` when all are back.

        ``mirror`` returns the device memory that also receives a parameter's new values. It is
        called once per piece. ``make_memory`` is for new state.
        """

    def write_back(self) -> None:
        """Write what `loads` have computed into the caller's parameters and state."""


@runtime_checkable
class SteppedByParts(Protocol):
    """An optimizer with a method for the step of some parameters, as those of `optim`."""

    def part_of_step(self, params: Iterable[torch.Tensor]) -> PlainStep:
        """Return the step of some parameters, with their current gradients and settings."""

    def bytes_to_come(self, param: torch.Tensor) -> list[int]:
        """Return the bytes of each tensor that a parameter's first step creates."""


def part_of_step(optimizer: Optimizer, params: Params) -> tuple[PlainStep, list[DTensor]]:
    """Return the step of some parameters, given with their groups, and the tensors it uses."""
    part = (
        optimizer.part_of_step([param for _, param in params])
        if isinstance(optimizer, SteppedByParts)
        else OptimizerSubset(optimizer, params)
    )
    used: list[object] = []
    for _, param in params:
        used += [param, param.grad, *optimizer.state.get(param, {}).values()]
    return part, [value for value in used if isinstance(value, DTensor)]


@dataclass(slots=True)
class _ParamRow:
    """This rank's elements of one parameter, of its gradient and of its state.

    ``values`` is the state. ``new`` is state that steps on a device have created or replaced.
    """

    group: int
    param: torch.Tensor
    local: torch.Tensor
    grad: torch.Tensor
    values: dict[str, object]
    new: dict[str, object] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The parts of the state that are sharded like the parameter."""
        return {k: v for k, v in self.values.items() if _is_cut_like(v, k, self.local)}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that a step reads: parameter, gradient and state of the same shape."""
        return [self.local, self.grad, *self.state.values()]


class OptimizerSubset:
    """Some parameters of an optimizer, stepped as plain tensors by a copy of the optimizer."""

    def __init__(self, optimizer: Optimizer, params: Params) -> None:
        # Copied now, because a loss scaler sets attributes during its call only.
        self._like = optimizer_like(optimizer, [], {})
        self._state = optimizer.state
        self._given_state: State = {}
        self._options = [
            {key: _copy_option(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._rows = [
            _ParamRow(
                number,
                param,
                _local(param).detach(),
                _local(param.grad),  # type: ignore[arg-type]  # of parameters with a gradient
                {key: _local(v) for key, v in optimizer.state.get(param, {}).items()},
            )
            for number, param in params
        ]

    def use_state(self, state: State) -> None:
        """Step with these tensors in place of some of the optimizer's state."""
        self._given_state = state
        for row in self._rows:
            for key in row.values:
                if (id(row.param), key) in state:
                    row.values[key] = state[id(row.param), key]

    def __call__(self) -> State:
        """Step, and write the tensors that the optimizer has replaced into the caller's state.

        Return those that replace tensors of `use_state`; they are not written.
        """
        inputs = [(row, row.local, row.grad, dict(row.values)) for row in self._rows]
        states = self._step_on(inputs)
        # torch's fused kernels do not increment versions, so full copies would seem current.
        torch.autograd.graph.increment_version([row.local for row in self._rows])
        replaced: dict[Key, torch.Tensor] = {}
        for row, state in zip(self._rows, states, strict=True):
            same = map(is_, state.values(), row.values.values())
            if len(state) == len(row.values) and all(same):  # nearly always
                continue
            for key, value in state.items():
                if value is row.values.get(key):
                    continue
                if (id(row.param), key) in self._given_state and isinstance(value, torch.Tensor):
                    replaced[id(row.param), key] = value
                else:
                    self._write_state(row, key, value)
        return replaced

    def loads(
        self, num_bytes: int, mirror: Mirror, make_memory: MakeHostMemory
    ) -> Iterator[DeviceLoad]:
        """Yield the step as loads for staging buffers; see `PlainStep.loads`."""
        for row in self._rows:
            for key, value in row.state.items():
                if not value.is_contiguous():
                    row.new[key] = value.contiguous()
                    row.values[key] = row.new[key]
        sizes = [
            (row.local.numel(), sum(tensor.element_size() for tensor in row.tensors), 0)
            for row in self._rows
        ]
        for load in cut_into_loads(sizes, MULTIPLE, num_bytes):
            pieces = [_RowPiece(self._rows[row], lo, hi) for row, lo, hi in load]
            work = self._work_on(pieces, mirror, make_memory)
            yield DeviceLoad([piece.of(t) for piece in pieces for t in piece.row.tensors], work)

    def write_back(self) -> None:
        """Write the state that `loads` have created into the caller's state."""
        for row in self._rows:
            for key, value in row.new.items():
                old = row.values.get(key)
                if isinstance(old, torch.Tensor) and not _is_cut_like(old, key, row.local):
                    old.copy_(value)  # type: ignore[arg-type]  # a count
                else:
                    self._write_state(row, key, value)

    def _step_on(
        self, inputs: Iterable[tuple[_ParamRow, torch.Tensor, torch.Tensor, dict[str, object]]]
    ) -> list[dict[str, object]]:
        """Step these parameters, with their gradients and state; return the state of each."""
        groups: list[dict[str, object]] = [{**options, "params": []} for options in self._options]
        params: list[list[torch.Tensor]] = [[] for _ in groups]
        state: dict[torch.Tensor, dict[str, object]] = defaultdict(dict)
        stand_ins = []
        for row, local, grad, values in inputs:
            local.grad = grad
            params[row.group].append(local)
            state[local] = values
            stand_ins.append(local)
        for group, members in zip(groups, params, strict=True):
            group["params"] = members
        step_without_hooks(optimizer_like(self._like, groups, state))
        return [state[stand_in] for stand_in in stand_ins]

    def _work_on(
        self, pieces: Sequence[_RowPiece], mirror: Mirror, make_memory: MakeHostMemory
    ) -> Callable[[list[torch.Tensor]], Copies]:
        def work(fetched: list[torch.Tensor]) -> Copies:
            remaining = iter(fetched)
            inputs = []
            for piece in pieces:
                options = self._options[piece.row.group]
                counts_on_device = bool(options.get("fused") or options.get("capturable"))
                local, grad, values = piece.inputs_of(remaining, counts_on_device)
                inputs.append((piece.row, local, grad, values))
            states = self._step_on(inputs)
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            for piece, (_, local, _, _), state in zip(pieces, inputs, states, strict=True):
                copies += piece.copies_back(local, state, make_memory)
                device_copy = mirror(piece.row.param)
                if device_copy is not None:
                    copies.append((local, piece.of(device_copy)))
            return copies

        return work

    def _write_state(self, row: _ParamRow, key: str, value: object) -> None:
        owner = owner_of(row.param) if _is_cut_like(value, key, row.local) else None
        self._state[row.param][key] = value if owner is None else owner.form.wrap(value)


@dataclass(frozen=True)
class _RowPiece:
    """Elements [lo, hi) of one parameter, in one load through the device."""

    row: _ParamRow
    lo: int
    hi: int

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the piece's elements of a tensor."""
        return value.reshape(-1)[self.lo : self.hi]

    def inputs_of(
        self, fetched: Iterator[torch.Tensor], counts_on_device: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
        """Return parameter, gradient and state, from the next ``fetched`` tensors.

        Each piece gets a copy of the step counts, on the device if ``counts_on_device``.
        """
        local = next(fetched)
        grad = next(fetched)
        sharded = self.row.state
        state: dict[str, object] = {}
        for key, value in self.row.values.items():
            if key in sharded:
                state[key] = next(fetched)
            elif isinstance(value, torch.Tensor):
                count = value.clone()
                if counts_on_device:
                    count = count.to(local.device, non_blocking=True)
                state[key] = count
            else:
                state[key] = value
        return local, grad, state

    def copies_back(
        self, local: torch.Tensor, state: Mapping[str, object], make_memory: MakeHostMemory
    ) -> Copies:
        """Return the copies back to the host, and record new state."""
        row = self.row
        copies = [(local, self.of(row.local))]
        for key, value in state.items():
            if _is_cut_like(value, key, local):
                target = row.new.get(key, row.values.get(key))
                if not isinstance(target, torch.Tensor):
                    target = make_memory(row.local.numel(), value.dtype).view(row.local.shape)
                    row.new[key] = target
                copies.append((value, self.of(target)))
            elif self.hi == row.local.numel():  # the last piece; it is the same after every piece
                row.new[key] = value
                if isinstance(value, torch.Tensor) and value.device != row.local.device:
                    host_copy = make_memory(value.numel(), value.dtype).view(value.shape)
                    row.new[key] = host_copy
                    copies.append((value, host_copy))
        return copies


ELEMENTWISE = (
    "AdamW",
    "Adam",
    "SGD",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's units can be stepped one by one."""
    return type(optimizer) in _kinds() or isinstance(optimizer, SteppedByParts)


@cache
def _kinds() -> frozenset[type[Optimizer]]:
    return frozenset(getattr(torch.optim, name) for name in ELEMENTWISE)


@cache
def step_as_plain_tensors() -> None:
    """Let elementwise optimizers step plain tensors; see Note [Steps as plain tensors]."""
    torch_optimizer.register_optimizer_step_pre_hook(_prepare)


def _prepare(optimizer: Optimizer, *_: object) -> None:
    """Make the last hook before a step take it."""
    if type(optimizer) in _kinds() and not torch.compiler.is_compiling():
        run_last(optimizer, step_plainly)


def run_last(optimizer: Optimizer, hook: BeforeStep) -> None:
    """Let a hook run last before an optimizer's next step; register it once."""
    # torch types its ordered dict of hooks as a dict.
    hooks = cast(OrderedDict[int, object], optimizer._optimizer_step_pre_hooks)
    number = next((number for number, known in hooks.items() if known is hook), None)
    if number is None:
        number = optimizer.register_step_pre_hook(hook).id
    hooks.move_to_end(number)


def step_plainly(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Take the step, if all parameters are sharded tensors or plain; return an empty step."""
    if torch.compiler.is_compiling() or type(optimizer) not in _kinds():
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None or OVERLAP in vars(optimizer) or _has_other_hooks(optimizer):
        return None
    params = []
    any_sharded = False
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            return None
        for param in group["params"]:
            grad = param.grad
            is_sharded = type(param) is ShardTensor
            if is_sharded:
                owner = owner_of(param)
                if owner is None or owner.unit.home is not None:
                    return None
            elif isinstance(param, DTensor):
                return None
            any_sharded |= is_sharded
            if grad is not None:
                if type(grad) is not (ShardTensor if is_sharded else torch.Tensor):
                    return None
                params.append((number, param))
    if not any_sharded:
        return None
    with torch.no_grad():
        OptimizerSubset(optimizer, params)()
    return (optimizer_like(optimizer, [], defaultdict(dict)), *args[1:]), kwargs


def _has_other_hooks(optimizer: Optimizer) -> bool:
    """Return True if a hook that is not of this package runs before the optimizer's step."""
    everywhere = torch_optimizer._global_optimizer_pre_hooks
    hooks = chain(everywhere.values(), optimizer._optimizer_step_pre_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("shardwise.") for hook in hooks)


def optimizer_like(optimizer: O, groups: object, state: object) -> O:
    """Return a copy of an optimizer with other groups and another state."""
    copied: O = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    vars(copied).update(param_groups=groups, state=state)
    return copied


def copy_settings_back(optimizer: Optimizer, copied: Optimizer) -> None:
    """Give the optimizer the options and attributes that its copy has after the step."""
    for group, stepped in zip(optimizer.param_groups, copied.param_groups, strict=True):
        group.update({key: value for key, value in stepped.items() if key != "params"})
    separate = ("param_groups", "state")
    vars(optimizer).update({k: v for k, v in vars(copied).items() if k not in separate})


def step_without_hooks(optimizer: Optimizer) -> None:
    """Step without calling the hooks."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


@torch.no_grad()
def sizes_of_state(optimizer: Optimizer, group: int, dtype: torch.dtype) -> list[int]:
    """Return the bytes per element of each part of the state that is sharded like a parameter.

    It steps a two-element parameter on the host, with the options of that group.
    """
    options = dict(optimizer.param_groups[group])
    for key, value in options.items():
        options[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    if "capturable" in options:
        options["capturable"] = False  # torch supports it on devices only
    param = torch.zeros(2, 1, dtype=dtype)
    param.grad = torch.zeros_like(param)
    state: dict[torch.Tensor, dict[str, object]] = defaultdict(dict)
    step_without_hooks(optimizer_like(optimizer, [{**options, "params": [param]}], state))
    return [v.element_size() for key, v in state[param].items() if _is_cut_like(v, key, param)]


def _is_cut_like(value: object, key: str, like: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return True if a part of a state has one element for each of a parameter's."""
    if not isinstance(value, torch.Tensor) or key in PLAIN_SCALARS:
        return False
    return value.shape == like.shape


def _local(value: V) -> V:
    """Return a sharded tensor's elements; return other values unchanged."""
    kind = type(value)
    if kind is ShardTensor:  # first, as `isinstance` is slow for tensors
        return value._local_tensor  # type: ignore[attr-defined]
    if kind is torch.Tensor or not isinstance(value, DTensor):
        return value
    return value._local_tensor  # type: ignore[return-value]


def _copy_option(value: object) -> object:
    """Return a copy of an option: a learning rate that is a tensor is changed in place."""
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_option, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
