"""The only place where hooks are registered on modules."""

from typing import Any

import torch
from torch import nn

from shardwise.engine.runtime import Engine
from shardwise.unit.unit import Unit


def register_hooks(engine: Engine, unit: Unit) -> None:
    """Make the engine see the forward passes of the unit's module.

    The hooks are opaque to torch.compile: a compiled module breaks its graph there and compiles
    what lies between.
    """

    @torch._disable_dynamo
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not engine.suspended:
            return engine.before_forward(unit, args, kwargs)
        return None

    @torch._disable_dynamo
    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not engine.suspended:
            engine.after_forward(unit, output)

    unit.module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(post_forward, always_call=True)
