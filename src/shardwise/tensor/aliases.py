"""Tensors over the memory of one sharded parameter, and their memory after ``p.data = x``.

Note [Assignment of data]
``p.data = x`` gives an ordinary parameter the memory of ``x``, and other tensors keep the old
memory with the old values: scripts swap averaged weights in and out so. A sharded parameter cannot
change its memory, as gathers read it, so the values of ``x`` are copied. Tensors over the old
memory (``p.data``, ``p.detach()``, ``state_dict()``, ``to_local()``) first get a copy of the old
values, which they share. A view of a view of ``p.data`` is in no list; the number of references to
the view that it was made of shows it, and the assignment is refused. Memory that would be shared
with ``x`` from then on cannot be kept:

- of another parameter (``a.data = b.data``): refused when the model runs next, unless one of the
  two has got other values by then, as in a swap;
- of a plain tensor: refused when the model runs next, if the tensor was written in between.
"""

import weakref
from collections.abc import Sequence

import torch

from shardwise.errors import ShardError
from shardwise.tensor.inner import has_own_gather

_MIN_TO_PRUNE = 16


class Aliases:
    """The live tensors over one parameter's elements.

    ``num_assigned`` counts assignments to the parameter's data; each gives these tensors a copy.
    """

    def __init__(self) -> None:
        self.num_assigned = 0
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._prune_at = _MIN_TO_PRUNE

    def add(self, elements: torch.Tensor) -> None:
        """Record a plain tensor over the parameter's elements, also one inside a ShardTensor.

        It is kept by a weak reference. There is none to a ShardTensor, because torch cannot swap
        tensors that have weak references.
        """
        self._tensors.append(weakref.ref(elements))
        if len(self._tensors) >= self._prune_at:
            self._tensors = [ref for ref in self._tensors if ref() is not None]
            self._prune_at = max(_MIN_TO_PRUNE, 2 * len(self._tensors))

    def release(self, local: torch.Tensor, name: str) -> None:
        """Give the live tensors but ``local`` a copy of its elements, which they share.

        **Cost** the copy, if there are any.

        **Raises** ShardError, before any change, if the elements are of a tensor subclass, whose
        memory cannot be replaced, or if a view is in use that is not known.
        """
        tensors = [ref() for ref in self._tensors]
        live = [tensor for tensor in tensors if tensor is not None and tensor is not local]
        if live and has_own_gather(local):
            raise ShardError(
                f"parameter '{name}' is a {type(local).__name__}: its .data cannot be assigned "
                "while another tensor refers to it (p.data, p.detach(), state_dict()); drop that, "
                "or keep a copy of it: p.data.clone()"
            )
        _refuse_hidden_views(live, name)
        self.num_assigned += 1
        self._tensors = []
        self._prune_at = _MIN_TO_PRUNE
        move_to_copy(live, local)


def move_to_copy(tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Give tensors over ``memory`` the memory of one copy of it."""
    kept = memory.detach().clone() if tensors else memory
    for tensor in tensors:
        offset = tensor.storage_offset() - memory.storage_offset()
        tensor.data = kept.as_strided(tensor.size(), tensor.stride(), offset)


def _refuse_hidden_views(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Raise ShardError if a tensor has a view that is not among the tensors."""
    for tensor in tensors:
        num_views = sum(other._base is tensor for other in tensors)
        if tensor._use_count() > 1 + num_views:  # type: ignore[attr-defined]
            raise ShardError(
                f"parameter '{name}': its .data was assigned while a view of its old values is in "
                "use that was made of another view (p.data.view(-1)[3:9], the variable of a loop "
                "over chunks), or is in a graph. An ordinary parameter's view would keep the old "
                "values, and this one would show the new ones. Drop it, or keep a copy of it: "
                "p.data.view(-1)[3:9].clone()"
            )


class SharedParam:
    """Another parameter whose memory was assigned."""

    def __init__(self, name: str, aliases: Aliases) -> None:
        self.name = name
        self._aliases = aliases
        self._num_assigned = aliases.num_assigned

    def check(self, name: str) -> None:
        """Raise ShardError if the two parameters would still share memory."""
        if self._aliases.num_assigned == self._num_assigned:
            raise ShardError(
                f"parameter '{name}': its .data was assigned from '{self.name}'. Ordinary "
                "parameters share memory from then on; sharded ones do not. Tie them before "
                f"shard(), or assign a copy: {name}.data = {self.name}.data.clone()"
            )


class SharedPlain:
    """A plain tensor that was assigned, and its version then."""

    def __init__(self, value: torch.Tensor) -> None:
        # A view shares its version with the other views of its base, such as a flat buffer's.
        counts = not value.is_inference() and value._base is None
        self._value = weakref.ref(value) if counts else None
        self._version = value._version if counts else 0

    def check(self, name: str) -> None:
        """Raise ShardError if the tensor was written since, also through a view."""
        value = None if self._value is None else self._value()
        if value is not None and value._version != self._version:
            raise ShardError(
                f"parameter '{name}': the tensor that was assigned to its .data was written since. "
                "An ordinary parameter would have the new values; a sharded one has a copy of the "
                f"old ones. Write {name}.data in place, or assign again"
            )


Shared = SharedParam | SharedPlain  # memory that an ordinary parameter would share from then on
