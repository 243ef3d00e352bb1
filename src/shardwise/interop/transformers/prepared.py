"""What a sharded model of transformers is given, so that transformers treats it as its own.

Note [Sharded at load time]
transformers has its own way to shard a model while it loads it. Its `Trainer` then leaves the model
where it is, wraps it in nothing, lets all ranks take part in a save, and puts off reductions by
``set_requires_gradient_sync``. A model of ours wants just that, so it carries the mark of such
models: an attribute, and an empty ``distributed_config`` in its config, which is never written to
``config.json``. Such models cannot be resumed by transformers; `CheckpointCallback` adds that.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from shardwise.engine.accumulate import accumulate
from shardwise.engine.api import engine_of
from shardwise.engine.model import compare_load
from shardwise.engine.module_state import note_managed
from shardwise.errors import ConfigError
from shardwise.interop.peft import save_adapter
from shardwise.interop.transformers.saving import save_pretrained
from shardwise.tensor.plain_state import cut_state_dict


def prepare(model: Any) -> Any:
    """Let transformers train, save and generate with a sharded model; return the model.

    Afterwards transformers' own ``Trainer`` trains it (Note [Sharded at load time]),
    ``model.save_pretrained(folder)``, called by every rank, writes the whole model, and
    ``model.generate()``, called by every rank, goes on until all ranks are through, which may end
    at different lengths. ``model.to()`` its own device changes nothing. `from_pretrained` and our
    `Trainer` do this by themselves; after `shardwise.shard` it is one call.

    **State** attributes of this one model; no class of transformers changes.
    """
    engine_of(model)
    for module in model.modules():
        if callable(getattr(module, "generate", None)):
            # transformers' own flag for "its forward needs all ranks": generate() looks at it.
            note_managed(module)
    if isinstance(model, PreTrainedModel):
        vars(model)["save_pretrained"] = partial(save_pretrained, model)
        vars(model)["resize_token_embeddings"] = _refuse_resize
    elif hasattr(model, "peft_config"):
        vars(model)["save_pretrained"] = partial(_save_adapters, model)
    model.to = partial(_to, model)
    model.load_state_dict = partial(_load_state_dict, model)
    _mark_for_trainer(model)
    return model


def _mark_for_trainer(model: Any) -> None:
    """See Note [Sharded at load time]."""
    if isinstance(model, PreTrainedModel):  # there it is a property
        model._is_distributed_loading_by_transformers = True
    elif hasattr(model, "peft_config"):
        model.is_distributed_loading_by_transformers = True
    else:  # of another class, which Trainer would save without gathering it
        return
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig) and not getattr(config, "distributed_config", None):
        config.distributed_config = DistributedConfig()
    if not isinstance(model, FSDPModule):  # which has the method
        model.set_requires_gradient_sync = _GradientSync(model)


class _GradientSync:
    """The method ``set_requires_gradient_sync`` of one model, which is copied with it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._window = ExitStack()

    def __call__(self, requires: bool) -> None:
        """Put reductions off, or let the next backward pass reduce."""
        if requires:
            self._window.close()
        else:
            self._window.enter_context(accumulate(self._model, last=False))

    def __deepcopy__(self, memo: dict[int, Any]) -> _GradientSync:
        """Return the copied model's own, no window open."""
        return _GradientSync(memo[id(self._model)])


def _save_adapters(model: Any, save_directory: Any, **options: Any) -> None:
    """Answer ``save_pretrained`` of a PEFT model; every rank calls it, rank 0 writes."""
    if engine_of(model).suspended:  # gathered, as by save_adapter() itself
        type(model).save_pretrained(model, save_directory, **options)
        return
    adapters = options.pop("selected_adapters", None)
    options.pop("is_main_process", None)
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"save_pretrained: {', '.join(given)} not for a sharded PEFT model; save without, or "
            "inside `with shardwise.gathered(model):`"
        )
    save_adapter(model, save_directory, adapters)


def _refuse_resize(*args: Any, **kwargs: Any) -> Any:
    raise ConfigError(
        "resize_token_embeddings: the model is sharded, and its shards keep their shapes. Resize "
        "the plain model before shard(); after from_pretrained(), resize a plain copy and save it"
    )


def _load_state_dict(model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Load whole values too, of which each rank takes its part: torch's DTensors take no whole."""
    compare_load(model, state_dict)  # a cut one does not tell
    return type(model).load_state_dict(model, cut_state_dict(model, state_dict), *args, **kwargs)


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
