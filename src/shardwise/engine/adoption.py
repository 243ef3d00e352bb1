"""Replacement of parameters in optimizers that were built before ``shard()``.

Note [What an optimizer knows]
An optimizer holds parameters in the lists of its groups and keys its state by them. Both are edited
in place, because other objects may hold the lists (L-BFGS and wrappers of optimizers do). State of
a parameter's shape is cut as the parameter is, with rank 0's values. All other state (step counts,
row and column statistics) stays whole: a plain tensor beside a ShardTensor means a whole value.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId
from shardwise.errors import ConfigError
from shardwise.layout.placements import local_of
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.tensor.plain_state import PLAIN_SCALARS
from shardwise.tensor.replaced import retire
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Adoption:
    """The optimizers of one ``shard()`` call, and each parameter's places in their groups."""

    def __init__(self, optimizers: Optimizers, specs: Sequence[UnitSpec]) -> None:
        """Check that the model has all their parameters. **Raises** ConfigError before changes."""
        self._optimizers = _as_list(optimizers)
        params = {id(param.param): param for unit in specs for param in unit.params}
        # By id of a parameter: each list of a group that has it, and its place in the list.
        self._places: dict[int, list[tuple[list[Any], int]]] = {}
        self._facts: list[str] = []
        for number, optimizer in enumerate(self._optimizers):
            self._facts.append(f"optimizer {number} ({type(optimizer).__name__})")
            for index, group in enumerate(optimizer.param_groups):
                for place, tensor in enumerate(group["params"]):
                    if isinstance(tensor, ShardTensor):
                        continue  # of a model that is sharded already
                    if id(tensor) not in params:
                        raise _not_of_model(optimizer, index, place, tensor)
                    param = params[id(tensor)]
                    self._places.setdefault(id(tensor), []).append((group["params"], place))
                    self._facts.append(f"optimizer {number}, group {index}: '{param.name}'")
                    state = state_to_save(optimizer, tensor)
                    self._facts += _state_facts(param, state)

    def facts(self) -> list[str]:
        """Return the facts that must be equal on all ranks, as lines of text."""
        return self._facts

    def replace_params(self, spec: UnitSpec, unit: Unit) -> None:
        """Replace a new unit's original parameters, and their state, in the optimizers."""
        params = {param.name: param for param in unit.params}
        for original in spec.params:
            param = params[original.name]
            for group_params, place in self._places.pop(id(original.param), ()):
                group_params[place] = param.sharded
            for optimizer in self._optimizers:
                if original.param in optimizer.state:
                    state = state_to_save(optimizer, original.param)
                    del optimizer.state[original.param]
                    optimizer.state[param.sharded] = {
                        key: _cut_state(key, value, original, param, unit.comm)
                        for key, value in state.items()
                    }
            retire(original.param, original.name)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers such as accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def state_to_save(optimizer: Any, param: torch.Tensor) -> Mapping[str, Any]:
    """Return a parameter's state as values, decoded if the optimizer keeps codes."""
    if param not in optimizer.state:
        return {}
    decode = getattr(innermost(optimizer), "saved_state", None)
    state: Mapping[str, Any] = optimizer.state[param] if decode is None else decode(param)
    return state


def _as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in listed:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: expected a torch optimizer, or a list of them, got {optimizer!r}"
            )
    return listed


def _not_of_model(
    optimizer: torch.optim.Optimizer, group: int, place: int, param: torch.Tensor
) -> ConfigError:
    return ConfigError(
        f"optimizer: parameter {place} of group {group} {tuple(param.shape)} of this "
        f"{type(optimizer).__name__} is not one of the model's. If the model was changed since, "
        "build the optimizer anew; a parameter outside the model belongs into an optimizer of its "
        "own, since its gradient is not averaged over the ranks"
    )


def _state_facts(param: ParamSpec, state: Mapping[str, Any]) -> Iterator[str]:
    """Describe the state of one parameter. **Raises** ConfigError if it cannot be cut."""
    for key, value in state.items():
        what = f"state '{key}' of '{param.name}'"
        if not isinstance(value, torch.Tensor):
            is_plain = isinstance(value, bool | int | float | str)
            yield f"{what}: {value if is_plain else type(value).__name__}"
            continue
        if value.is_meta:
            raise ConfigError(
                f"optimizer: {what} is on the meta device, as the model was when the optimizer was "
                "built; build this optimizer after shard()"
            )
        if _is_cut(key, value, param.param) and (
            type(local_of(value)) is not torch.Tensor or not value.is_floating_point()
        ):
            raise ConfigError(
                f"optimizer: {what} is a {type(value).__name__} of {value.dtype}, and quantised "
                "state cannot be cut; build this optimizer after shard()"
            )
        yield f"{what}: {tuple(value.shape)} {value.dtype}"


def _is_cut(key: str, value: torch.Tensor, param: torch.Tensor) -> bool:
    # For a scalar parameter the shape does not show whether a value belongs to each element.
    return value.shape == param.shape and (value.ndim > 0 or key not in PLAIN_SCALARS)


@torch.no_grad()
def _cut_state(key: str, value: Any, spec: ParamSpec, param: ShardedParam, comm: Comm) -> Any:
    """Return rank 0's value of one entry of a parameter's state, cut as the parameter is."""
    if not isinstance(value, torch.Tensor):
        return value
    first = local_of(value).detach().to(comm.device, copy=True).contiguous()
    comm.broadcast(first, CollectiveId("broadcast", f"{spec.name}, {key}", param.unit.index))
    if not _is_cut(key, value, spec.param):
        return first.to(value.device)
    dtype = param.sharded.dtype if value.dtype == spec.param.dtype else value.dtype
    local = param.cut.slice_of_piece(first).to(param.sharded.device, dtype, copy=True)
    return ShardTensor.wrap(local, param.cut)
