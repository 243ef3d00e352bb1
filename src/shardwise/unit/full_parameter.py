"""The full parameter that layers read, and writes to its data.

Note [Writes inside a forward pass]
A full parameter is a copy of the shards unless the shards are inside it (stages 0 to 2, one dtype).
So the change would be lost if a forward pass wrote it (codebooks, clamps, weights that a library
packs again). Writes in place change the version, which `Slots` compares. Writes through ``.data``
do not change it, and assignments give the parameter other memory. So the class records reads of
``data`` and assignments to it during a call. After the call these writes are kept if the shards are
inside the full parameter: in place through ``.data``, by assignment, and by a frozen parameter that
replaces it. All other writes are refused.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.tensor.inner import has_same_bits, plain_parts

_DATA: Any = torch.Tensor.data
_NEW_PARAMETER = nn.Parameter.__new__.__code__


class DataAccess:
    """The tensors that the ``data`` of one unit's full parameters returned, and assignments."""

    def __init__(self) -> None:
        self.reads: list[tuple[FullParameter, torch.Tensor]] = []
        self.assigned: list[FullParameter] = []

    def note_read(self, param: "FullParameter", data: torch.Tensor) -> None:
        """Note a read of ``param.data``. The version of ``data`` counts writes to it."""
        self.reads.append((param, data))

    def reads_of(self, param: nn.Parameter) -> list[torch.Tensor]:
        """Return what ``param.data`` has returned since `forget`."""
        return [data for read, data in self.reads if read is param]

    def find_written(self) -> dict[int, bool]:
        """Return the ids of parameters that were assigned or written since `forget`.

        The value is True if the parameter was written in place, through ``data``.
        """
        written = {id(param): False for param in self.assigned}
        return written | {id(param): True for param, data in self.reads if data._version}

    def forget(self) -> None:
        """Forget reads and assignments."""
        self.reads = []
        self.assigned = []

    def take_written(self) -> dict[int, bool]:
        """Return the result of `find_written`, and forget it."""
        written = self.find_written()
        self.forget()
        return written


class FullParameter(nn.Parameter):
    """A full parameter, which modules hold while they run; autograd's leaf."""

    _access: DataAccess | None = None  # the unit's; None for copies of the parameter

    @property
    def data(self) -> torch.Tensor:
        """The values outside the graph; reads and assignments are recorded."""
        data: torch.Tensor = _DATA.__get__(self)
        if self._access is not None:
            self._access.note_read(self, data)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)
        if self._access is not None:
            self._access.assigned.append(self)

    def detach(self) -> torch.Tensor:
        """Return a plain tensor; a tensor of this class if ``nn.Parameter(p)`` calls it.

        ``nn.Parameter`` compares the class of the result with the class of ``p``.
        """
        detached = super().detach()
        if sys._getframe(1).f_code is _NEW_PARAMETER:
            detached.__class__ = FullParameter
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the parameter as an ordinary one."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_DATA.__get__(self).clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


FullParameter.__name__ = nn.Parameter.__name__  # users' messages and checks see an `nn.Parameter`


def make_full(view: torch.Tensor, requires_grad: bool, access: DataAccess) -> nn.Parameter:
    """Return a leaf over the memory of a full copy; a tensor subclass stays an `nn.Parameter`."""
    leaf = nn.Parameter(view, requires_grad=requires_grad)
    if type(view) is torch.Tensor:
        leaf.__class__ = FullParameter
        vars(leaf)["_access"] = access
    return leaf


def set_full_data(leaf: nn.Parameter, view: torch.Tensor) -> None:
    """Set the data of a full parameter without recording it."""
    _DATA.__set__(leaf, view)


def data_of(leaf: nn.Parameter) -> torch.Tensor:
    """Return the data of a full parameter without recording it."""
    data: torch.Tensor = _DATA.__get__(leaf)
    return data


class ValueWatch:
    """Compares the values of full parameters before and after a call, for `check.writes`.

    It finds writes that change no version: through NumPy, DLPack, addresses, kernels of other
    libraries. **Cost** a copy of the full parameters of the units in their calls.
    """

    def __init__(self) -> None:
        self.written: dict[str, None] = {}  # names of parameters that were written, in order
        self._values: dict[int, list[torch.Tensor]] = {}  # by the id of the full parameter

    def begin(self, fulls: Iterable[nn.Parameter]) -> None:
        """Copy the values of full parameters that are about to be used."""
        for full in fulls:
            self._values[id(full)] = [part.clone() for part in _parts_of(full)]

    def end(self, fulls: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare full parameters, given with their names; the caller leaves out known writes."""
        for name, full in fulls:
            before = self._values.get(id(full))
            if before is not None and not all(map(has_same_bits, before, _parts_of(full))):
                self.written[name] = None
        self._values.clear()

    def forget(self) -> None:
        """Drop the copies: the caller may write from now on."""
        self._values.clear()


def _parts_of(full: nn.Parameter) -> list[torch.Tensor]:
    return list(plain_parts(data_of(full)).values())


# Set on a full parameter of `gathered` when the context ends; it holds the parameter's name.
_EXPIRED = "_shardwise_left_context"


def mark_expired(full: torch.Tensor, name: str) -> None:
    """Mark a full parameter of a context that has ended: an optimizer of it trains nothing."""
    vars(full)[_EXPIRED] = name


def name_if_expired(param: torch.Tensor) -> str | None:
    """Return the name of a full parameter whose context has ended; None for other tensors."""
    name: str | None = vars(param).get(_EXPIRED)
    return name
