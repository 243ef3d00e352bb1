"""Views of the elements of a sharded tensor, through which it is read and written.

Note [Views are of whole tensors]
``p.data[0]`` or ``p.detach().view(-1)`` of an ordinary parameter is memory of the parameter: it
has the present values, and a write through it changes the parameter. A sharded tensor has no such
memory. A `WholeView` is a view of a gathered copy. Before each operation the copy is gathered again
if the elements have changed, and after a write each rank takes over its slice. Every rank makes the
same calls, as for any operation on whole tensors.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shardwise.errors import ShardError
from shardwise.tensor.draws import same_draws
from shardwise.tensor.operations import DRAWS, FACTS
from shardwise.tensor.replaced import running_optimizer
from shardwise.tensor.tensor_base import Operation, ShardTensorBase

_PROPERTIES_OF_ELEMENTS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_HANDLES = frozenset({"data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__"})


def _refused_handle(name: str) -> ShardError:
    """Return the error of a call that would expose the memory of a view."""
    lost = f"{name} of a view of a sharded tensor: writes to its memory would be lost"
    optimizer = running_optimizer()
    if optimizer is None:
        return ShardError(f"{lost}. Use full_tensor() to read, and p.copy_(full) to write")
    kind = type(optimizer).__name__
    return ShardError(
        f"{kind} asks for {lost}. Use shard(stage=0), where it runs as it is, or another "
        "optimizer: docs/how-to/optimizers.md has a table"
    )


class GatheredCopy:
    """The whole of a sharded tensor, as new as its elements."""

    def __init__(self, source: ShardTensorBase, whole: torch.Tensor) -> None:
        self.source = source
        self.whole = whole
        self._version = source._local_tensor._version

    @property
    def place(self) -> int:
        """The address of the copy's memory."""
        return self.whole.untyped_storage().data_ptr()

    def refresh(self) -> None:
        """Gather again if the elements have changed. **Cost** one all-gather then."""
        version = self.source._local_tensor._version
        if version != self._version:
            self.whole.copy_(self.source.full_tensor())
            self._version = version

    def write_back(self) -> None:
        """Take over this rank's slice after a write."""
        local = self.source._local_tensor
        local.copy_(self.source._cut.slice_of(self.whole))
        self._version = local._version


class WholeView(torch.Tensor):
    """A view of a sharded tensor; see Note [Views are of whole tensors].

    **Cost** the whole tensor in memory; an all-gather when the elements have changed.
    """

    _copy: GatheredCopy

    @classmethod
    def of(cls, view: torch.Tensor, copy: GatheredCopy) -> "WholeView":
        """Wrap a view of a gathered copy."""
        made: WholeView = view.detach().as_subclass(cls)
        made._copy = copy
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array of the present values that cannot be written."""
        self._copy.refresh()
        array = _plain(self).clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        """Return an array of the present values that cannot be written."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on present values; keep a write; wrap results that are views."""
        call = Operation(func, getattr(func, "__name__", ""), args, kwargs)
        if call.name in ("__get__", "__set__", "__delete__"):
            return cls._property(call)
        if call.name in FACTS:
            return call.run(_plain_in)
        if call.name in _HANDLES:
            raise _refused_handle(call.name)
        return cls._run(call)

    @classmethod
    def _property(cls, call: Operation) -> Any:
        name = call.func.__self__.__name__  # type: ignore[attr-defined]
        if call.name == "__get__" and name in _PROPERTIES_OF_ELEMENTS:
            return cls._run(Operation(call.func, name, call.args))
        if call.name == "__set__" and name == "data":
            raise ShardError(
                "assignment to the .data of a view of a sharded tensor: write it in place"
            )
        return call.run(_plain_in)

    @classmethod
    def _run(cls, call: Operation) -> Any:
        views = list(_views_of(call))
        written = list(_written_by(call))
        with torch.no_grad() if written else nullcontext():
            for view in views:
                view._copy.refresh()
            with _equal_draws(call, views):
                result = call.run(_plain_in)
            for view in written:
                view._copy.write_back()
        if written and isinstance(result, torch.Tensor):
            into = call.kwargs.get("out", call.args[0] if call.args else None)
            return into if isinstance(into, WholeView) else result
        return _wrapped(result, views)


def _plain(value: "WholeView") -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _plain_in(value: Any) -> Any:
    if isinstance(value, WholeView):
        return _plain(value)
    if isinstance(value, list | tuple) and any(isinstance(v, WholeView) for v in value):
        return type(value)(map(_plain_in, value))
    return value


def _views_of(call: Operation) -> Iterator[WholeView]:
    yield from (value for value in call.values if isinstance(value, WholeView))


def _written_by(call: Operation) -> Iterator[WholeView]:
    """Yield the views that the call writes: the first argument in place, those of ``out=``."""
    written: list[Any] = [call.kwargs.get("out")]
    takes_first = call.is_in_place or call.kwargs.get("inplace") is True
    if takes_first:
        written.append(call.args[0] if call.args else call.kwargs.get("tensor"))
    for value in written:
        members = value if isinstance(value, list | tuple) else [value]
        yield from (member for member in members if isinstance(member, WholeView))


def _equal_draws(call: Operation, views: Sequence[WholeView]) -> Any:
    if call.name not in DRAWS:
        return nullcontext()
    source = views[0]._copy.source
    return same_draws(source._cut, source.device, call.kwargs.get("generator"))


def _wrapped(result: Any, views: Sequence[WholeView]) -> Any:
    """Wrap the results that are memory of a gathered copy."""
    if isinstance(result, list | tuple):
        wrapped = [_wrapped(member, views) for member in result]
        return result if all(map(operator.is_, wrapped, result)) else type(result)(wrapped)
    is_done = isinstance(result, WholeView | ShardTensorBase)
    if not isinstance(result, torch.Tensor) or is_done or not result.numel():
        return result
    place = result.untyped_storage().data_ptr()
    copy = next((view._copy for view in views if view._copy.place == place), None)
    return result if copy is None else WholeView.of(result, copy)
