"""A model as a load sees it, sharded or plain: where each parameter's values go, and who may run.

A plain model is whole on every rank, and nothing is sent for it: each process that loads one reads
all of it, alone or in a group, or without any.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.state import clean_name, param_names, persistent_buffers
from shardwise.comm.control import Control, SoloControl, exchange_any
from shardwise.engine.conditions import Origin
from shardwise.engine.parts import Model, Parts, modules_of
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError
from shardwise.layout.boxes import Region, full_region
from shardwise.tensor.cut import Cut
from shardwise.tensor.inner import has_own_gather, inner_of, plain_parts
from shardwise.unit.param import ShardedParam


@dataclass(frozen=True, eq=False)
class Place:
    """One parameter: all its names, and the memory of its elements [lo, hi); a plain one has all.

    ``held`` is what the optimizer knows it by, ``param`` what the engine does, if it is sharded.
    A parameter that is made of several plain tensors has a place for each; the optimizer's state is
    under the names of the ``first``, with ``suffixes`` behind those of its tensors.
    """

    names: tuple[str, ...]
    held: Any
    shape: tuple[int, ...]
    lo: int
    hi: int
    data: torch.Tensor
    param: ShardedParam | None
    cut: Cut | None
    is_first: bool = True
    suffixes: tuple[str, ...] = ("",)

    @property
    def piece(self) -> Region:
        """The box of the parameter whose flattened elements [lo, hi) are."""
        return full_region(self.shape) if self.cut is None else self.cut.piece

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements [lo, hi) that each rank of the shard axis works on."""
        if self.param is None or self.cut is None or self.cut.layout is None or self.param.dim > 0:
            return ((0, self.piece.numel),)
        return self.cut.ranges

    @property
    def of_own_class(self) -> torch.Tensor | None:
        """This rank's part of the parameter, where it is of a class that defines its own gather."""
        local: torch.Tensor = self.held if self.param is None else self.param.sharded._local_tensor
        return local if has_own_gather(local) else None

    def state_of_class(self, before: Any) -> torch.Tensor:
        """Return what an optimizer makes of a tensor of its own class; ``before``, if it fits."""
        local = self.of_own_class
        assert local is not None
        if isinstance(before, torch.Tensor) and before.shape == self.held.shape:
            inside = before._local_tensor if isinstance(before, DTensor) else before
            is_alike = self.param is None or self.param.form.is_alike(before)
            if is_alike and tuple(plain_parts(inside)) == self.suffixes:
                return before
        made = torch.zeros_like(local)
        return made if self.param is None else self.param.form.like(made)

    def state_like(self, dtype: torch.dtype, before: Any) -> torch.Tensor:
        """Return memory for state that is cut as the parameter is: ``before``, if it fits."""
        if self.param is None:
            fits = type(before) is torch.Tensor and tuple(before.shape) == self.shape
            if fits and before.dtype == dtype and before.device == self.data.device:
                return before
            return torch.empty(self.shape, dtype=dtype, device=self.data.device)
        if self.param.form.is_alike(before) and before.dtype == dtype:
            found: torch.Tensor = before
            return found
        shape, home = self.param.cut.local_shape, self.param.unit.home
        if home is not None and home.files.optimizer is not None:
            return self.param.form.like(
                home.in_file(home.files.optimizer, prod(shape), dtype).view(shape)
            )
        return self.param.form.like(torch.empty(shape, dtype=dtype, device=self.data.device))


class Host:
    """The model that is loaded into, between whose passes that is."""

    rank: int
    num_ranks: int
    device: torch.device
    control: Control
    places: Sequence[Place]
    elsewhere: frozenset[str]  # names that other stages of a pipeline have

    def check(self) -> None:
        """Refuse a moment at which nothing can be loaded. **Raises** StateError."""

    def begin(self, names: set[str], path: Path) -> None:
        """Note that the parameters of these names are no longer whole."""

    def failed(self, error: Exception) -> Exception:
        """Return the error of a load that broke off after `begin`."""
        return error

    def end(self, names: set[str], path: Path) -> None:
        """Note that they are whole again. **Raises** CheckpointError when others are not."""

    def stop(self, why: str) -> None:
        """Let nothing run until a load succeeds."""

    def note_origin(self, origin: Origin) -> None:
        """Note the checkpoint that was loaded."""


def host_of(model: Model) -> Host:
    """Return the host. **Raises** ConfigError when the model is sharded by somebody else."""
    params = (param for each in modules_of(model) for param in each.parameters())
    if any(isinstance(param, DTensor) for param in params):
        return _Sharded(Parts(model), model)
    try:
        return _Sharded(Parts(model), model)  # gathered, or without parameters
    except ConfigError:
        return _Plain(model)


class _Sharded(Host):
    """A sharded model; its engine refuses to run what is half loaded."""

    def __init__(self, engine: Parts, model: Model) -> None:
        self._engine = engine
        engine.give_up_steps()
        engine.rest("load()")
        self.control = engine.everyone
        self.rank, self.num_ranks = self.control.rank, self.control.num_ranks
        self.device = engine.comm.device
        params = [param for unit in engine.units for param in unit.params]
        self.places = [place for param in params for place in _places_of(param)]
        self.elsewhere = self._names_elsewhere(model)

    def _names_elsewhere(self, model: Model) -> frozenset[str]:
        """Ask the other stages of a pipeline what they have. **Cost** two exchanges."""
        if not self._engine.has_stages:
            return frozenset()
        names = [name for place in self.places for name in place.names]
        names += [name for name, _ in persistent_buffers(model)]
        rows = exchange_any(self.control, json.dumps(names).encode())
        return frozenset(name for row in rows for name in json.loads(row))

    def check(self) -> None:
        if self._engine.suspended:
            raise StateError("load() inside gathered(): leave that context first")

    def begin(self, names: set[str], path: Path) -> None:
        self._engine.finish_reductions()
        why = f"a load of {path} did not come to its end; load a whole checkpoint first"
        self._engine.begin_load(names, why)

    def end(self, names: set[str], path: Path) -> None:
        left = self._engine.end_load(names)
        if left is not None:
            raise CheckpointError(
                f"{path}: '{left}' is half loaded from another checkpoint, and not in this "
                "one; load one that has all of the model"
            )

    def stop(self, why: str) -> None:
        self._engine.refuse(why)

    def note_origin(self, origin: Origin) -> None:
        self._engine.origin = origin


def _places_of(param: ShardedParam) -> list[Place]:
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


class _Plain(Host):
    """A model that is not sharded, which nobody can keep from running."""

    elsewhere: frozenset[str] = frozenset()

    def __init__(self, model: Model) -> None:
        self.control = SoloControl()
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if in_group else 0
        self.num_ranks = dist.get_world_size() if in_group else 1
        names: dict[nn.Parameter, list[str]] = {}
        parts = [each.named_parameters(remove_duplicate=False) for each in modules_of(model)]
        for name, param in (pair for part in parts for pair in part):
            names.setdefault(param, []).append(clean_name(name))
            if param.is_meta:
                raise ConfigError(
                    f"model: parameter '{name}' is on the meta device and has no memory to load "
                    "into; call model.to_empty(device=...) first"
                )
        self.device = next((param.device for param in names), torch.device("cpu"))
        self.places = [
            Place(
                tuple(name + suffix for name in of_param),
                param,
                tuple(part.shape),
                0,
                part.numel(),
                part.detach(),
                None,
                None,
                number == 0,
                tuple(parts),
            )
            for param, of_param in names.items()
            for parts in (plain_parts(param),)
            for number, (suffix, part) in enumerate(parts.items())
        ]

    def failed(self, error: Exception) -> Exception:
        if isinstance(error, CheckpointError):
            kind = DamagedCheckpoint if isinstance(error, DamagedCheckpoint) else CheckpointError
            return kind(
                f"{error}. What was read before it is in the model: do not use that before a load "
                "has succeeded"
            )
        return error
