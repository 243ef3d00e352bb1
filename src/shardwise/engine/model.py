"""What `shard()` adds to the model itself: a class of its own, with a few methods more.

Note [The model's class]
The model becomes an instance of a subclass of its class, with the same name, as `fully_shard` does
it too: ``isinstance`` holds, and the user's class stays as it is. Of the methods, those that plain
models have as well (``copy.deepcopy``, pickling, an attribute that is missing) ask first whether
this one is sharded, as ``type(model)(...)`` makes one that is not.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn

from shardwise.engine.copying import Memo, copy_engine, forget_engine, place_units
from shardwise.engine.entrances import register_entrances
from shardwise.engine.hooks import register_hooks
from shardwise.engine.runtime import Engine
from shardwise.unit.unit import Unit

ATTRIBUTE = "_shardwise_engine"
_MARK = "_is_fsdp_managed_module"
_HINTS = {
    "module": "shard() wraps nothing, as DistributedDataParallel does; drop `.module` and use the "
    "model itself",
    "join_hook": "torch's Join is for wrappers of its own; for ranks with different numbers of "
    "batches use `for batch, weight in shardwise.join(model, loader):`",
}


class ShardedModel:
    """The methods of a model that was given to `shard`; see Note [The model's class]."""

    def __getattr__(self, name: str) -> Any:
        """Look further as the model's class does; say what to do where nothing is found."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if name not in _HINTS or ATTRIBUTE not in self.__dict__:
                raise
            raise AttributeError(f"{error}: {_HINTS[name]}", name=name, obj=self) from None

    def __deepcopy__(self, memo: Memo) -> Any:
        """Copy the sharded model; every rank does. Inside `gathered` the copy is a plain model."""
        engine: Engine | None = self.__dict__.get(ATTRIBUTE)
        if engine is None:
            return _copy_by_class(self, memo)
        if engine.suspended:
            memo[id(engine)] = "gathered"  # goes with its name, below
            return _made_plain(_copy_by_class(self, memo))
        made, units = copy_engine(engine, memo)
        copied = _copy_by_class(self, memo)
        forget_engine(copied)
        place_units(units, memo)
        settle(copied, made, units)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as the engine does."""
        engine: Engine | None = self.__dict__.get(ATTRIBUTE)
        return super().__reduce_ex__(protocol) if engine is None else engine.__reduce_ex__(protocol)


@contextmanager
def no_sync(self: Any) -> Iterator[None]:
    """Run a micro-batch that is not the last before the step: ``accumulate(model, last=False)``."""
    engine: Engine = self.__dict__[ATTRIBUTE]
    with engine.conditions.micro_batch(last=False):
        yield


@cache
def sharded_class(cls: Any) -> Any:
    """Return the class of sharded models of ``cls``; a `no_sync` of its own stays."""
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(cls, name) for name in names}
    if not hasattr(cls, "no_sync"):
        members["no_sync"] = no_sync
    return type(cls)(cls.__name__, (ShardedModel, cls), members)


class Nested:
    """Watches a module that several units belong to, on a mesh each: one call inside the other."""

    def __init__(self, engine: Engine, units: list[Unit]) -> None:
        self._engine = engine
        self._units = units

    @property
    def suspended(self) -> bool:
        """Tell whether forward passes go unnoticed now."""
        return self._engine.suspended

    def before_forward(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the units in turn."""
        for each in self._units:
            args, kwargs = self._engine.before_forward(each, args, kwargs)
        return args, kwargs

    def after_forward(self, unit: Any, output: Any) -> None:
        """Leave them, the last one first."""
        for each in reversed(self._units):
            self._engine.after_forward(each, output)


def settle(model: nn.Module, engine: Engine, units: list[Unit]) -> None:
    """Let the engine watch the model whose units these are, and note on the model whose it is."""
    engine.settle(units)
    by_module: dict[int, list[Unit]] = {}
    for unit in units:
        by_module.setdefault(id(unit.module), []).append(unit)
    for several in by_module.values():
        register_hooks(engine if len(several) == 1 else Nested(engine, several), several[0])
    _mark((model, *register_entrances(engine, units)), engine)


def _mark(ways_in: Sequence[nn.Module], engine: Engine) -> None:
    """Note on the model whose it is, and on it and what it merely wraps how to generate."""
    model = ways_in[0]
    vars(model)[ATTRIBUTE] = engine
    if not isinstance(model, ShardedModel):
        cls: Any = type(model)
        model.__class__ = sharded_class(cls)
    for module in ways_in:
        if callable(getattr(module, "generate", None)):
            # transformers asks for it: ranks then generate until all are through.
            module._is_fsdp_managed_module = True  # type: ignore[assignment]


def _copy_by_class(model: Any, memo: Memo) -> Any:
    """Copy a model as its own class says, or by default."""
    own = getattr(super(ShardedModel, model), "__deepcopy__", None)
    if own is not None:
        return own(memo)
    make, args, state = super(ShardedModel, model).__reduce_ex__(4)[:3]
    made = make(*args)
    memo[id(model)] = made
    made.__setstate__(copy.deepcopy(state, memo))
    return made


def _made_plain(model: Any) -> Any:
    """Take from a copy, whose parameters are plain, all that sharding has added."""
    forget_engine(model)
    model.__class__ = type(model).__mro__[2]
    for name, value in list(vars(model).items()):
        home = getattr(getattr(value, "func", value), "__module__", None) or ""
        if name == ATTRIBUTE or (callable(value) and home.startswith("shardwise.")):
            del vars(model)[name]
    for module in model.modules():
        vars(module).pop(_MARK, None)
    return model
