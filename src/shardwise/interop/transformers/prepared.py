"""What a sharded model of transformers is given, so that transformers treats it as its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.engine.accumulate import accumulate
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.interop.transformers.saving import save_pretrained


def prepare(model: Any) -> Any:
    """Let a sharded model of transformers be saved and generate as a plain one; return the model.

    Afterwards ``model.save_pretrained(folder)``, called by every rank, writes the whole model, and
    ``model.generate()``, called by every rank, goes on until all ranks are through, which may end
    at different lengths. ``model.to()`` its own device changes nothing. `from_pretrained` and
    `Trainer` do this by themselves; after `shardwise.shard` it is one call.

    **State** attributes of this one model; no class of transformers changes.
    """
    engine_of(model)
    for module in model.modules():
        # transformers' own flag for "its forward needs all ranks": generate() looks at it.
        module._is_fsdp_managed_module = True
    if isinstance(model, PreTrainedModel):  # a PEFT model has files of its own
        vars(model)["save_pretrained"] = partial(save_pretrained, model)
    model.no_sync = partial(_no_sync, model)  # accelerate looks for it, as on DDP's models
    model.to = partial(_to, model)
    return model


def is_sharded(model: Any) -> bool:
    """Tell whether this module was given to `shardwise.shard`."""
    try:
        engine_of(model)
    except (ConfigError, TypeError):
        return False
    return True


def _no_sync(model: Any) -> AbstractContextManager[None]:
    return accumulate(model, last=False)


def _to(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Move nowhere if the model is there already; else refuse as sharded parameters do."""
    asked: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = asked[:2]
    here = engine_of(model).comm.device
    indices = (None, here.index, 0) if here.type == "cpu" else (None, here.index)
    is_here = device is None or (device.type == here.type and device.index in indices)
    if dtype is None and is_here:
        return model
    return type(model).to(model, *args, **kwargs)
