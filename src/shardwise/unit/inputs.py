"""Parameters among the inputs of ``loss.backward(inputs=[...])``, for which autograd has full ones.

Note [How inputs are seen]
``torch.autograd.backward`` asks the classes of its inputs first (pytorch#171473), and ShardTensor
puts the full parameters in their place. A torch that does not ask would look for the slices in the
graph, find nothing, and leave every gradient None without a word. So it is tried once whether it
asks. Where it does not, its function gets a wrapper that does.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from shardwise.unit.answers import refusal
from shardwise.unit.sliced import Sliced


class _Probe(torch.Tensor):
    """A tensor that says whether it was asked."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        return True


def asks_inputs(backward: Callable[..., Any]) -> bool:
    """Tell whether torch's ``backward`` asks the classes of its inputs; no backward pass is run."""
    probe = torch.Tensor._make_subclass(_Probe, torch.zeros(()))
    try:
        return backward(torch.zeros((), requires_grad=True), inputs=[probe]) is True
    except RuntimeError:  # it wants inputs that require gradients
        return False


def asking_inputs(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``backward`` that puts full parameters in the place of those among its inputs."""
    signature = inspect.signature(backward)

    @wraps(backward)
    def asking(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        inputs = call.arguments.get("inputs")
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs]
        elif isinstance(inputs, dict):
            inputs = list(inputs.values())
        if isinstance(inputs, Sequence):
            call.arguments["inputs"] = [into_leaf(tensor) for tensor in inputs]
        return backward(*call.args, **call.kwargs)

    return asking


def into_leaf(value: Any) -> Any:
    """Return what autograd knows of an input that ``backward(inputs=)`` names."""
    if not isinstance(value, Sliced):
        return value
    if value._owner is None or value._owner.param is not value:
        raise refusal("backward(inputs=[...])", [value])
    return value._owner.leaf


# See Note [How inputs are seen].
if not asks_inputs(torch.autograd.backward):
    torch.autograd.backward = asking_inputs(torch.autograd.backward)
