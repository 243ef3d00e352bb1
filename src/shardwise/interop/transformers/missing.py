"""Initialise what a checkpoint does not have, by the model's own rules, alike on all ranks.

Note [The draws of a plain model]
A head that a checkpoint lacks is drawn at random, and two scripts with the same seed should get the
same one, sharded or not. So every rank walks the modules as transformers does, with rank 0's
generator, and draws the whole parameter on the CPU; its own slice is kept. A rank whose generator
was the same as rank 0's goes on after the draws, as a plain script would; another's is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from shardwise.comm.control import Control
from shardwise.engine.api import engine_of
from shardwise.tensor.plain_state import owner_of

if TYPE_CHECKING:
    from collections.abc import Collection

_DONE = "_is_hf_initialized"  # transformers' initialisation leaves alone what has this attribute


def initialise_missing(
    model: PreTrainedModel, loaded: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Initialise the parameters that were not loaded, and the buffers that no file holds.

    Every rank calls it. ``dtypes`` are those that the model has before it is sharded.

    **Cost** one module's missing parameters whole, in host memory.
    """
    state = model.state_dict(keep_vars=True)
    for name in loaded:
        setattr(state[name], _DONE, True)
    drawn = {id(state[name]): dtypes[name] for name in state if name not in loaded}
    control = engine_of(model).comm.control
    with torch.no_grad(), _generator_of_rank_0(control), guard_torch_init_functions():
        _visit(model, model, drawn)


def _visit(module: nn.Module, owner: PreTrainedModel, drawn: Mapping[int, torch.dtype]) -> None:
    """Initialise a module after its children, by the rules of the model that it belongs to."""
    for child in module.children():
        _visit(child, child if isinstance(child, PreTrainedModel) else owner, drawn)
    with _standing_in_full(module, drawn):
        owner._initialize_weights(module, owner.is_custom_code())


@contextmanager
def _standing_in_full(module: nn.Module, drawn: Mapping[int, torch.dtype]) -> Iterator[None]:
    """Put whole parameters in the place of the module's own missing ones; keep this rank's part."""
    fulls: dict[str, tuple[Any, nn.Parameter]] = {}
    for name, param in module._parameters.items():
        if param is None or owner_of(param) is None:
            continue
        if id(param) in drawn and not hasattr(param, _DONE):
            memory = torch.empty(param.shape, dtype=drawn[id(param)], device="cpu")
            fulls[name] = param, nn.Parameter(memory, requires_grad=param.requires_grad)
    for name, (_, full) in fulls.items():
        module._parameters[name] = full
    try:
        yield
    finally:
        for name, (param, _) in fulls.items():
            module._parameters[name] = param
    for param, full in fulls.values():
        owner = owner_of(param)
        param.to_local().copy_(owner.cut.slice_of(full))
        setattr(param, _DONE, True)


@contextmanager
def _generator_of_rank_0(control: Control) -> Iterator[None]:
    """See Note [The draws of a plain model]."""
    own = torch.get_rng_state()
    first = torch.frombuffer(bytearray(control.broadcast(own.numpy().tobytes())), dtype=torch.uint8)
    torch.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            torch.set_rng_state(own)
