"""The step of some of an optimizer's parameters, as plain tensors, in a copy of the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.layout.placements import local_of
from shardwise.offload.lane import Copies, Load
from shardwise.offload.loads import MULTIPLE, cut
from shardwise.tensor.plain_state import PLAIN_SCALARS, owner_of

MakeHostMemory = Callable[[int, torch.dtype], torch.Tensor]
Mirror = Callable[[Any], torch.Tensor | None]


@dataclass(frozen=True)
class _Row:
    """This rank's elements of one parameter, of its gradient and of its state.

    ``made`` is state that steps on a device have added to ``values``, or have put in its place.
    """

    group: int
    param: Any
    local: torch.Tensor
    grad: torch.Tensor
    values: dict[str, Any]
    made: dict[str, Any] = field(default_factory=dict)

    def is_cut_alike(self, key: str, value: Any) -> bool:
        """Return True if a part of the state has one element for each of the parameter's."""
        return _is_cut_alike(key, value, self.local)

    @property
    def state(self) -> list[torch.Tensor]:
        """The parts of the state that are sharded like the parameter."""
        return [value for key, value in self.values.items() if self.is_cut_alike(key, value)]

    @property
    def bytes_of_element(self) -> int:
        """Bytes that a step reads for one element."""
        return sum(each.element_size() for each in (self.local, self.grad, *self.state))


class Apart:
    """Some parameters of an optimizer, stepped as plain tensors by a copy of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[tuple[int, Any]]) -> None:
        self.sharded: list[DTensor] = []
        # Copied now, because a loss scaler sets attributes for the time of its call.
        self._like = optimizer_like(optimizer, [], {})
        self._state = optimizer.state
        self._options = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._rows = [
            _Row(
                number,
                param,
                self._local(param).detach(),
                self._local(param.grad),
                {key: self._local(v) for key, v in optimizer.state.get(param, {}).items()},
            )
            for number, param in params
        ]

    def _local(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            self.sharded.append(value)
        return local_of(value) if isinstance(value, torch.Tensor) else value

    def step_with(
        self, state: Mapping[tuple[int, str], torch.Tensor]
    ) -> dict[tuple[int, str], torch.Tensor]:
        """Step with ``state`` in place of some of the optimizer's state, by id and name.

        Return the tensors with which the optimizer has replaced it; they are not handed on.
        """
        self._bring(state)
        found = {}
        for row, key, value in self._step():
            if (id(row.param), key) in state:
                found[id(row.param), key] = value
            else:
                self._hand_on(row, key, value)
        return found

    def __call__(self) -> None:
        """Step, and write the tensors that the optimizer has replaced into the caller's state."""
        for row, key, value in self._step():
            self._hand_on(row, key, value)

    def loads(
        self,
        num_bytes: int,
        mirror: Mirror,
        make_memory: MakeHostMemory,
        state: Mapping[tuple[int, str], torch.Tensor],
    ) -> Iterator[Load]:
        """Yield the step as loads of a lane, of ``num_bytes``; call `hand_on` when all are back.

        ``mirror`` returns the device memory that also receives a parameter's new values. It is
        called once per piece. ``make_memory`` is for new state. ``state`` is as in `step_with`.
        """
        self._bring(state)
        for row in self._rows:
            for key, value in row.values.items():
                if row.is_cut_alike(key, value) and not value.is_contiguous():
                    row.values[key] = row.made[key] = value.contiguous()
        sizes = [(row.local.numel(), row.bytes_of_element, 0) for row in self._rows]
        for load in cut(sizes, MULTIPLE, num_bytes):
            pieces = [_Piece(self._rows[row], lo, hi) for row, lo, hi in load]
            work = self._work_on(pieces, mirror, make_memory)
            yield Load([tensor for piece in pieces for tensor in piece.tensors], work)

    def hand_on(self) -> None:
        """Write the state that `loads` have made into the caller's state."""
        for row in self._rows:
            for key, value in row.made.items():
                held = row.values.get(key)
                if isinstance(held, torch.Tensor) and not row.is_cut_alike(key, held):
                    held.copy_(value)  # a count
                else:
                    self._hand_on(row, key, value)

    def _bring(self, state: Mapping[tuple[int, str], torch.Tensor]) -> None:
        for row in self._rows:
            for key in row.values:
                if (id(row.param), key) in state:
                    row.values[key] = state[id(row.param), key]

    def _step(self) -> Iterator[tuple[_Row, str, Any]]:
        """Step; yield the tensors that the optimizer has replaced, by parameter and name."""
        made = [(row, row.local, row.grad, dict(row.values)) for row in self._rows]
        states = self._step_on(made)
        # torch's fused kernels do not increment versions, so full copies would seem current.
        torch.autograd.graph.increment_version([row.local for row in self._rows])
        for row, state in zip(self._rows, states, strict=True):
            for key, value in state.items():
                if value is not row.values.get(key):
                    yield row, key, value

    def _step_on(
        self, made: Iterable[tuple[_Row, torch.Tensor, torch.Tensor, dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Step these parameters, with their gradients and state; return the state of each."""
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self._options]
        state: defaultdict[Any, Any] = defaultdict(dict)
        stand_ins = []
        for row, local, grad, values in made:
            stand_in = local.detach()
            stand_in.grad = grad
            groups[row.group]["params"].append(stand_in)
            state[stand_in] = values
            stand_ins.append(stand_in)
        optimizer = optimizer_like(self._like, groups, state)
        type(optimizer).step.__wrapped__(optimizer)  # the caller of step() has called the hooks
        return [state[stand_in] for stand_in in stand_ins]

    def _work_on(
        self, pieces: Sequence[_Piece], mirror: Mirror, make_memory: MakeHostMemory
    ) -> Callable[[list[torch.Tensor]], Copies]:
        def work(brought: list[torch.Tensor]) -> Copies:
            rest, made = iter(brought), []
            for piece in pieces:
                options = self._options[piece.row.group]
                goes = options.get("fused") or options.get("capturable")
                made.append((piece.row, *piece.brought(rest, bool(goes))))
            states = self._step_on(made)
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            for piece, (_, local, _, _), state in zip(pieces, made, states, strict=True):
                copies += piece.returned(local, state, make_memory)
                there = mirror(piece.row.param)
                if there is not None:
                    copies.append((local, there[piece.lo : piece.hi]))
            return copies

        return work

    def _hand_on(self, row: _Row, key: str, value: Any) -> None:
        alike = isinstance(value, torch.Tensor) and value.shape == row.local.shape
        owner = owner_of(row.param) if alike and value.ndim else None
        self._state[row.param][key] = value if owner is None else owner.form.like(value)


@dataclass(frozen=True)
class _Piece:
    """Elements [lo, hi) of one parameter, in one load through the device."""

    row: _Row
    lo: int
    hi: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors copied to the device: parameter, gradient and state of the same shape."""
        return [self._part(t) for t in (self.row.local, self.row.grad, *self.row.state)]

    def brought(
        self, rest: Iterator[torch.Tensor], goes_too: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return parameter, gradient and state on the device; each piece has its own counts."""
        local, grad, state = next(rest), next(rest), {}
        for key, value in self.row.values.items():
            if self.row.is_cut_alike(key, value):
                state[key] = next(rest)
            elif isinstance(value, torch.Tensor):
                state[key] = value.clone()
                if goes_too:
                    state[key] = state[key].to(local.device, non_blocking=True)
            else:
                state[key] = value
        return local, grad, state

    def returned(
        self, local: torch.Tensor, state: Mapping[str, Any], make_memory: MakeHostMemory
    ) -> Copies:
        """Return the copies back to the host, and record new state."""
        row, copies = self.row, [(local, self._part(self.row.local))]
        for key, value in state.items():
            if _is_cut_alike(key, value, local):
                target = row.made.get(key)
                target = row.values.get(key) if target is None else target
                if target is None:
                    target = make_memory(row.local.numel(), value.dtype).view(row.local.shape)
                    row.made[key] = target
                copies.append((value, self._part(target)))
            elif self.hi == row.local.numel():  # it is the same after every piece
                row.made[key] = value
                if isinstance(value, torch.Tensor) and value.device != row.local.device:
                    row.made[key] = make_memory(value.numel(), value.dtype).view(value.shape)
                    copies.append((value, row.made[key]))
        return copies

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        return value.reshape(-1)[self.lo : self.hi]


def part_of_step(optimizer: Any, params: Sequence[tuple[int, Any]]) -> tuple[Any, list[DTensor]]:
    """Return the step of some parameters, given with their groups, and the tensors it uses.

    The step is an `Apart`, or the equivalent of an optimizer in `optim`.
    """
    if not hasattr(optimizer, "part_of_step"):
        apart = Apart(optimizer, params)
        return apart, apart.sharded
    chosen = [param for _, param in params]
    step = optimizer.part_of_step(chosen)  # one of `optim`: it knows how slices are cut
    held = [each for p in chosen for each in (p, p.grad, *optimizer.state[p].values())]
    return step, [each for each in held if isinstance(each, DTensor)]


def optimizer_like(optimizer: Any, groups: list[dict[str, Any]], state: Any) -> Any:
    """Return a copy of an optimizer with other groups and another state."""
    made = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    vars(made).update(param_groups=groups, state=state)
    return made


@torch.no_grad()
def sizes_of_state(optimizer: Any, group: int, dtype: torch.dtype) -> list[int]:
    """Return the bytes per element of each part of the state that is sharded like a parameter.

    It steps a two-element parameter on the host, with the options of that group.
    """
    options = dict(optimizer.param_groups[group])
    for key, value in options.items():
        options[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    options |= {"capturable": False} if "capturable" in options else {}  # devices alone have it
    param = torch.zeros(2, 1, dtype=dtype)
    param.grad = torch.zeros_like(param)
    state: defaultdict[Any, Any] = defaultdict(dict)
    made = optimizer_like(optimizer, [{**options, "params": [param]}], state)
    type(made).step.__wrapped__(made)
    return [v.element_size() for key, v in state[param].items() if _is_cut_alike(key, v, param)]


def _is_cut_alike(key: str, value: Any, like: torch.Tensor) -> bool:
    """Return True if a part of a state has one element for each of a parameter's."""
    is_tensor = isinstance(value, torch.Tensor) and key not in PLAIN_SCALARS
    return is_tensor and value.shape == like.shape


def _kept(value: Any) -> Any:
    """Return a copy of an option: a learning rate that is a tensor is changed in place."""
    if isinstance(value, list | tuple):
        return type(value)(map(_kept, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
