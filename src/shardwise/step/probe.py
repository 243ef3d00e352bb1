"""Traits of an optimizer class, found by a few steps of small stand-ins for its parameters.

Note [A probe of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An optimizer's code may read more than the parameter that it steps (a norm of all gradients), draw
random numbers, or call collectives. Then ranks that each step a part of the parameters differ from
one process. Its class does not say so. So before the first step a copy of the optimizer steps small
plain tensors: once all of them, and once each of two parts. A class whose parts step otherwise than
the whole reads more than one parameter. Every rank makes the same stand-ins, so all ranks find the
same, and nothing is sent. A collective is caught before it begins.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.comm.torch_collectives import CollectiveCalled, RefusedCollectives
from shardwise.device import seed_generators
from shardwise.errors import ConfigError
from shardwise.step.local_step import Args, Kwargs, optimizer_like
from shardwise.step.shared_draws import GeneratorStates
from shardwise.tensor.plain_state import owner_of, owning_rank
from shardwise.tensor.replaced import TRAITS, params_of

_STEPS = 4
_MEMBERS = 4  # stand-ins for the parameters of one group and number of dims
_SIZES = (8, 64)  # longest dim of stand-ins; the next if a class fails with the first
_TOLERANCE = 1e-3  # of the largest change of a parameter; in 16 bits more
Numbers = dict[tuple[int, str], float]  # options, by the number of their group and name
_LOG = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Traits:
    """What a probe found. ``collective`` is the kind of the first collective that was called.

    ``is_separable``: every parameter is stepped as if it were alone, and nothing is drawn.
    """

    collective: str = ""
    is_separable: bool = True


def traits_of(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Traits:
    """Return the traits of an optimizer that is about to step with these arguments.

    **Cost** a few steps of tensors of at most 8 elements per dim, once for an optimizer.
    """
    held = [len(group["params"]) for group in optimizer.param_groups]
    known: tuple[list[int], Traits] | None = vars(optimizer).get(TRAITS)
    if known is None or known[0] != held:
        known = vars(optimizer)[TRAITS] = held, _probe(optimizer, args, kwargs)
    return known[1]


@cache
def find_collectives() -> None:
    """Refuse optimizers that call collectives, from now on, before their first step."""
    torch_optimizer.register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    kind: Any = type(optimizer)
    if torch.compiler.is_compiling() or not may_call_collectives(kind):
        return
    if any(_is_sharded(param) for param in params_of(optimizer)):
        refuse_collectives(optimizer, traits_of(optimizer, args, kwargs))


def _is_sharded(param: torch.Tensor) -> bool:
    owner = owner_of(param)
    return owner is not None and not owner.cut.is_replicated


def refuse_collectives(optimizer: Optimizer, traits: Traits) -> None:
    """Refuse a class that deals parameters to ranks itself, before any rank has stepped.

    **Raises** ConfigError.
    """
    if traits.collective:
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name}.step() calls a collective ({traits.collective}): it deals parameters, which "
            "it takes to be whole on every rank, to ranks itself. Sharded parameters are dealt "
            "already. Use the class's form for one process (of Keller Jordan's: SingleDeviceMuon, "
            "SingleDeviceMuonWithAuxAdam) or torch.optim.Muon, with shard(layout='matrices')"
        )


@cache
def may_call_collectives(kind: type[Optimizer]) -> bool:
    """Tell whether the methods of a class, or functions that they name, name a collective."""
    seen: set[CodeType] = set()
    pending: list[Any] = [
        value
        for each in kind.__mro__
        if each.__module__.partition(".")[0] != "torch"
        for value in vars(each).values()
    ]
    while pending:
        func = inspect.unwrap(pending.pop()) if pending else None
        code = getattr(func, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names = {name for each in _codes(code) for name in each.co_names}
        if any(name.lstrip("_").startswith(_COLLECTIVES) for name in names):
            return True
        known = getattr(func, "__globals__", {})
        package = kind.__module__.partition(".")[0]
        pending += [
            value
            for value in map(known.get, names)
            if str(getattr(value, "__module__", "")).partition(".")[0] == package
        ]
    return False


_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _probe(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Traits:
    owners = [owner for param in params_of(optimizer) if (owner := owner_of(param)) is not None]
    if all(axis.size == 1 for owner in owners for axis in owner.cut.comm.axes.all):
        return Traits()
    generators = _Generators(params_of(optimizer)[0].device)
    try:
        for size in _SIZES:
            try:
                with RefusedCollectives(), torch.compiler.set_stance("force_eager"):
                    return _compare(_Trial(optimizer, size, args, kwargs), generators)
            except CollectiveCalled as call:
                return Traits(collective=str(call.args[0]), is_separable=False)
            except Exception as error:
                _LOG.debug("shardwise: %s with small tensors: %r", type(optimizer).__name__, error)
    finally:
        generators.restore()
    # The small copy fails, so a class that names collectives may step parameters together.
    kind: Any = type(optimizer)
    return Traits(is_separable=not may_call_collectives(kind))


def _compare(trial: _Trial, generators: _Generators) -> Traits:
    generators.seed()
    whole, numbers = trial.steps(trial.everything)
    if generators.have_drawn():
        return Traits(is_separable=False)
    for part in trial.parts():
        alone, numbers_alone = trial.steps(part)
        if not all(trial.is_same(number, alone[number], whole[number]) for number in part):
            return Traits(is_separable=False)
        if any(not _is_near(number, numbers.get(at)) for at, number in numbers_alone.items()):
            return Traits(is_separable=False)
    return Traits()


class _Trial:
    """Stand-ins for some of an optimizer's parameters, and the runs that step them."""

    def __init__(self, optimizer: Optimizer, size: int, args: Args, kwargs: Kwargs) -> None:
        self._optimizer = optimizer
        self._size = size
        self._args, self._kwargs = args[1:], kwargs
        self._params: list[tuple[int, torch.Tensor]] = []  # and the number of each one's group
        for number, group in enumerate(optimizer.param_groups):
            num_taken: dict[int, int] = defaultdict(int)
            for param in group["params"]:
                num_taken[param.ndim] += 1
                if param.requires_grad and num_taken[param.ndim] <= _MEMBERS:
                    self._params.append((number, param))

    @property
    def everything(self) -> set[int]:
        """The numbers of all stand-ins."""
        return set(range(len(self._params)))

    def parts(self) -> list[set[int]]:
        """Return two parts: each second one of the owned matrices, with all other parameters."""
        owned = [n for n, (_, param) in enumerate(self._params) if owning_rank(param) is not None]
        return [self.everything - set(owned[begin::2]) for begin in (0, 1)]

    def is_same(self, number: int, values: torch.Tensor, others: torch.Tensor) -> bool:
        """Tell whether two results for one stand-in are equal to rounding."""
        start = self._start(number)
        if values.numel() == 0:
            return True
        tolerance = _TOLERANCE if values.dtype.itemsize > 2 else 10 * _TOLERANCE
        largest = (others - start).abs().max()
        return bool((values - others).abs().max() <= tolerance * largest)

    def steps(self, picked: set[int]) -> tuple[dict[int, torch.Tensor], Numbers]:
        """Take the steps of some of the stand-ins; return their values, and the options then."""
        stand_ins = {n: self._start(n).requires_grad_(True) for n in sorted(picked)}
        copied = self._copy(stand_ins)
        step = type(copied).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        for turn in range(_STEPS):
            for number, stand_in in stand_ins.items():
                stand_in.grad = self._grad(number, turn)
            step(copied, *map(_closure, self._args), **self._options())
        options = {
            (place, name): float(value)
            for place, group in enumerate(copied.param_groups)
            for name, value in group.items()
            if isinstance(value, int | float) or _is_number(value)
        }
        return {number: each.detach() for number, each in stand_ins.items()}, options

    def _options(self) -> Kwargs:
        return {key: _closure(value) for key, value in self._kwargs.items()}

    def _draw(self, number: int, turn: int) -> torch.Tensor:
        param = self._params[number][1]
        generator = torch.Generator().manual_seed(1009 * number + turn)
        drawn = torch.randn([min(n, self._size) for n in param.shape], generator=generator)
        return drawn.to(param.device, param.dtype)

    def _start(self, number: int) -> torch.Tensor:
        return self._draw(number, _STEPS)

    def _grad(self, number: int, turn: int) -> torch.Tensor:
        """Return a gradient: of other sizes for other parameters, and of other ones each step."""
        return self._draw(number, turn) * (1.0, 30.0, 0.1)[(number + turn) % 3]

    def _copy(self, stand_ins: dict[int, torch.Tensor]) -> Optimizer:
        """Return a copy of the optimizer with stand-ins, its own attributes, and no state."""
        memo: dict[int, Any] = {id(self._params[n][1]): each for n, each in stand_ins.items()}
        copied = self._copy_of(self._optimizer, memo)
        if any(isinstance(value, DTensor) for value in memo.values()):
            # Operations on them with stand-ins could raise on some ranks and not on others.
            raise ConfigError("it holds sharded tensors other than its parameters and state")
        return copied

    def _copy_of(self, optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
        groups = memo.get(id(optimizer.param_groups))
        if groups is None:
            groups = memo[id(optimizer.param_groups)] = []
            for group in optimizer.param_groups:
                made = memo.get(id(group))
                if made is None:
                    made = memo[id(group)] = {}
                    made.update({k: _copied(v, memo) for k, v in group.items() if k != "params"})
                    made["params"] = [memo[id(p)] for p in group["params"] if id(p) in memo]
                groups.append(made)
        state = memo.setdefault(id(optimizer.state), defaultdict(dict))
        copied = memo[id(optimizer)] = optimizer_like(optimizer, groups, state)
        for name, value in vars(optimizer).items():
            if name.endswith(_HOOKS):
                vars(copied)[name] = OrderedDict()
            elif isinstance(value, Optimizer):
                vars(copied)[name] = memo.get(id(value)) or self._copy_of(value, memo)
            elif callable(value) and hasattr(type(optimizer), name):
                del vars(copied)[name]  # put in place of a method, it may write parameters
            elif name not in ("param_groups", "state") and not callable(value):
                vars(copied)[name] = _copied(value, memo)
        return copied


def _is_number(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_near(number: float, other: float | None) -> bool:
    return other is not None and math.isclose(number, other, rel_tol=_TOLERANCE)


_HOOKS = "_hooks"


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def _closure(value: Any) -> Any:
    """Return a closure that computes nothing, for a closure."""
    return (lambda: torch.ones(())) if callable(value) else value


class _Generators:
    """The default generators of Python, NumPy, torch and one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._read()
        self._seeded = self._before

    def _read(self) -> GeneratorStates:
        return GeneratorStates.read(self._device, has_others=True)

    def seed(self) -> None:
        """Give all of them fixed states."""
        torch.default_generator.manual_seed(0)
        seed_generators(self._device, 0)
        random.seed(0)
        np.random.seed(0)
        self._seeded = self._read()

    def have_drawn(self) -> bool:
        """Tell whether one of them has drawn since `seed`."""
        return not self._read().is_equal(self._seeded)

    def restore(self) -> None:
        """Give all of them their states from the beginning."""
        self._before.write(self._device)
