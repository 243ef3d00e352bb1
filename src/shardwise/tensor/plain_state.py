"""Checks before an optimizer's first step: state that was loaded whole, and dtypes.

Note [Plain state is cut at the first step]
``optimizer.load_state_dict(torch.load(...))`` of a plain or DistributedDataParallel run puts whole
tensors into the state of sharded parameters. torch only casts them to the parameter's dtype and
device, so the parameter cannot cut them there. But every load makes a new dict of the state, and
torch calls the hooks of all optimizers before each step. The hook here scans each new dict once.
It cuts state of its parameter's shape, which is right for every optimizer with elementwise state.
Counts and other values stay.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ConfigError
from shardwise.names import list_names
from shardwise.tensor.shard_tensor import ShardTensor

_LOG = logging.getLogger("shardwise")
FULLY_SHARD = "_of_fully_shard"  # set on the DTensors that are parameters of `fully_shard`
_SEEN = "_shardwise_state_seen"
GATHERS = "_shardwise_gathers"  # on an optimizer of `optim.gathering`
# One number for the whole parameter, whatever the parameter's shape.
PLAIN_SCALARS = ("step", "mu_product", "eta", "mu")
# State of torch's optimizers that always has its parameter's shape.
_ELEMENTWISE = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "exp_inf", "ax", "prev", "step_size"),
)


class FullyShardOwner:
    """The owner of a parameter of `fully_shard`; copies and pickles of it have no owner."""

    def __init__(self, param: Any) -> None:
        self.param = param

    def __deepcopy__(self, memo: Any) -> bool:
        """Copy to True: the mark of a parameter of `fully_shard`, without the owner."""
        return True

    def __reduce__(self) -> Any:
        """Pickle as True, without the owner."""
        return bool, (True,)


def owner_of(param: Any) -> Any:
    """Return the owner of a parameter of `shard` or `fully_shard`; None for others."""
    if isinstance(param, ShardTensor):
        return param._owner
    return getattr(getattr(param, FULLY_SHARD, None), "param", None)


def owning_rank(param: Any) -> int | None:
    """Return the rank of the shard axis whose slice is the whole parameter, by its layout."""
    cut = None if owner_of(param) is None else getattr(param, "_cut", None)
    return None if cut is None else cut.owner


def cut_plain_state(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Cut whole tensors in an optimizer's state. See Note [Plain state is cut at the first step].

    That of an optimizer that gathers is looked through each time, as it makes whole tensors.

    **Cost** nothing for a dict that was seen before; else a copy of this rank's slices.

    **Raises** ConfigError with the parameter's name, before any change, if state has another shape.
    """
    gathers = GATHERS in vars(optimizer)
    is_seen = vars(optimizer).get(_SEEN) is optimizer.state and not gathers
    if torch.compiler.is_compiling() or is_seen:
        return
    if _SEEN not in vars(optimizer):
        _warn_of_lost_updates(optimizer)
    new_states: list[tuple[torch.Tensor, dict[Any, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            cut_whole = _cutter_of(param)
            if cut_whole is not None and param in optimizer.state:
                owner = getattr(param, "_owner", None)
                name = (
                    f"parameter {place} of group {number}" if owner is None else f"'{owner.name}'"
                )
                cutter = _StateCutter(param, cut_whole, name, has_any_shape=gathers)
                new_states.append((param, cutter.of_dict(optimizer.state[param])))
    for param, state in new_states:
        optimizer.state[param] = state
    vars(optimizer)[_SEEN] = optimizer.state


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer) -> None:
    """Log on rank 0 the sharded 16-bit parameters that an optimizer is about to step."""
    names = [name for _, name in stepped_in_16_bits(optimizer)]
    if names and dist.is_initialized() and dist.get_rank() == 0:
        _LOG.warning(
            "shardwise: %s steps parameters in 16 bits without fp32 masters: %s. An update below "
            "half a unit in the last place (of bfloat16: 1/512 to 1/256 of the value) is lost by "
            "rounding. Keep the model in fp32 and compute in 16 bits: shard(precision='bf16'), or "
            "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
            *(type(optimizer).__name__, list_names(names)),
        )


def stepped_in_16_bits(optimizer: torch.optim.Optimizer) -> list[tuple[DTensor, str]]:
    """Return the sharded 16-bit parameters whose updates are rounded, with their names."""
    if getattr(optimizer, "bf16_stochastic_round", False):  # torchao rounds at random
        return []
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    owned = [(p, owner_of(p)) for p in params if p.dtype in (torch.bfloat16, torch.float16)]
    return [(param, owner.name) for param, owner in owned if owner is not None]


def cut_state_dict(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of whole tensors, each cut like the sharded tensor of its name."""
    held = model.state_dict(keep_vars=True)

    def cut(name: str, value: Any) -> Any:
        ours = held.get(name)
        is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        fits = is_whole and isinstance(ours, DTensor) and value.shape == ours.shape
        return cut_like(ours, value) if fits else value  # torch names what does not fit

    with torch.no_grad():
        return {name: cut(name, value) for name, value in values.items()}


def cut_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, cut like a parameter and of its class.

    Return the whole tensor for a parameter that shardwise has not sharded.
    """
    cut_whole = _cutter_of(param)
    return whole if cut_whole is None else cut_whole(whole)


def _cutter_of(param: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that slices a whole tensor; None for parameters that are not sharded."""
    if isinstance(param, ShardTensor):
        cut = param._cut
        return lambda whole: ShardTensor.wrap(cut.slice_of(whole).clone(), cut)
    if isinstance(param, DTensor) and vars(param).get(FULLY_SHARD):
        mesh, placements = param.device_mesh, param.placements
        # Every rank has loaded the whole tensor, so nothing is sent.
        return lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()
    return None


class _StateCutter:
    """Cuts the whole tensors in the optimizer's state of one parameter.

    ``has_any_shape``: state may have other shapes than the parameter's, as GaLore's has.
    """

    def __init__(
        self,
        param: torch.Tensor,
        cut_whole: Callable[[torch.Tensor], torch.Tensor],
        name: str,
        has_any_shape: bool,
    ) -> None:
        self._shape = tuple(param.shape)
        self._cut_whole = cut_whole
        self._name = name
        self._has_any_shape = has_any_shape

    def of_dict(self, state: dict[Any, Any]) -> dict[Any, Any]:
        return {key: self._of(value, key) for key, value in state.items()}

    def _of(self, value: Any, key: Any) -> Any:
        if type(value) is dict:
            return self.of_dict(value)
        if type(value) in (list, tuple):
            return type(value)(self._of(member, key) for member in value)
        if type(value) is not torch.Tensor or key in PLAIN_SCALARS:
            return value
        if tuple(value.shape) != self._shape:
            if value.dim() and key in _ELEMENTWISE and not self._has_any_shape:
                raise ConfigError(
                    f"optimizer: state '{key}' of {self._name} has shape {tuple(value.shape)}, "
                    f"and the parameter has {self._shape}: it was loaded from an optimizer of "
                    "another model, or of other groups of parameters"
                )
            return value
        with torch.no_grad():
            return self._cut_whole(value)


register_optimizer_step_pre_hook(cut_plain_state)
