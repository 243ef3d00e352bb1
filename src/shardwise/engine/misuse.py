"""Errors for calls that would be silently wrong."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardError, StateError
from shardwise.tensor.shard_tensor import ShardTensor


def recorded_once(what: str) -> StateError:
    """Return the error for ``what``, which records the operations of a model once."""
    return StateError(
        f"{what} of a sharded model would record one rank's collectives. Do it with a plain copy, "
        "on every rank: `with shardwise.gathered(model): plain = copy.deepcopy(model)`"
    )


def refuse_transform(allows: Callable[[Any], bool], frees: bool, where_full: str) -> None:
    """Raise StateError for a forward pass inside a trace or an unsupported transform.

    ``frees``: the pass is recorded and frees its parameters before backward. ``where_full`` names
    the place where the transform works.
    """
    if torch._C._get_tracing_state() is not None:
        raise recorded_once("torch.jit.trace")
    if torch.compiler.is_exporting():
        raise recorded_once("torch.export")
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    if transform is None:
        return
    if not allows(transform.key()):
        raise StateError(
            f"torch.func transform ({transform.key().name}) of a sharded model: its parameters "
            f"are gathered and freed during the call; use it {where_full}"
        )
    if frees:
        raise StateError(
            "torch.vmap of a sharded model with gradients: its parameters are freed before "
            f"backward. Use torch.no_grad(), do it {where_full}, or keep them full "
            "(a stage below 3, reshard_after_forward=False)"
        )


def refuse_foreign_params(unit: str, module: nn.Module) -> None:
    """Raise StateError for trainable parameters below a unit's module that no unit owns."""
    for name, param in module.named_parameters():
        if param.requires_grad and not isinstance(param, ShardTensor):
            where = f"{unit}.{name}" if unit else name
            raise StateError(
                f"parameter '{where}' was added or replaced after shard(), so its gradient "
                "would not be reduced over the ranks; change the model before shard()"
            )


def written_in_forward(what: str) -> ShardError:
    """Return the error for a forward pass that wrote a full parameter; ``what`` says which."""
    return ShardError(
        f"parameter {what} inside the forward pass (in place, max_norm=, .data, an assignment). "
        "The change would be lost. Change it between steps, on model.parameters() under "
        "torch.no_grad(), or make it a buffer"
    )


def written_while_full(call: str, what: str) -> ShardError:
    """Return the error of ``call`` for a parameter written while `unshard()` held it."""
    return ShardError(
        f"{call}: parameter {what} while unshard() held it in full; it is a copy there and the "
        "change is lost. Change it after reshard()"
    )


def changed_since_forward(unit: str) -> StateError:
    """Return the error for a backward pass after its parameters have changed."""
    return StateError(
        f"unit '{unit or '(root)'}': its parameters were changed between forward and backward "
        "(an optimizer step or a load in between); run backward first"
    )


def graph_of_freed(unit: str, where_stays: str) -> StateError:
    """Return the error for create_graph=True if the second pass would read freed parameters."""
    return StateError(
        f"create_graph=True through unit '{unit or '(root)'}' of a sharded model: its full "
        "parameters are freed during the pass, and the second pass would read them. Run forward "
        f"and torch.autograd.grad {where_stays}"
    )


def graph_of_means(where_full: str) -> StateError:
    """Return the error for create_graph=True in a pass that gives parameters gradients."""
    return StateError(
        "loss.backward(create_graph=True) on a sharded model: p.grad, the mean over ranks, has no "
        "graph. Use torch.autograd.grad(loss, inputs, create_graph=True) and call backward() on "
        f"what you compute from it, or compute both {where_full}"
    )


def warn_of_dropped_window() -> None:
    """Warn that a backward pass that raised drops the gradients of its accumulation window."""
    warnings.warn(
        "a backward pass raised inside an accumulation window: the gradients of the window's "
        "earlier micro-batches are dropped too; run the window again from its first micro-batch",
        RuntimeWarning,
        stacklevel=4,
    )
