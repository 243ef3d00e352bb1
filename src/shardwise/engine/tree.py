"""Search and replacement of tensors in the arguments and outputs of modules."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 8

ATTRIBUTE = "_shardwise_engine"  # of a sharded model: its engine


def tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is None or isinstance(value, str | bytes | int | float | bool) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors_in(tuple(vars(value).values()), depth + 1)
    elif dataclasses.is_dataclass(value):  # one with __slots__
        yield from tensors_in(
            [getattr(value, f.name) for f in dataclasses.fields(value)], depth + 1
        )


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with the floating-point tensors in tuples, lists and dicts cast."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to the tensors in tuples, lists and dicts.

    Return the same object if nothing changed.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        mapped = [map_tensors(v, change) for v in value]
        same = all(a is b for a, b in zip(value, mapped, strict=True))
        return value if same else type(value)(mapped)
    if type(value) is dict:
        items = {k: map_tensors(v, change) for k, v in value.items()}
        return value if all(items[k] is v for k, v in value.items()) else items
    return value
