"""The full parameter that layers read, and writes to its data.

Note [Writes inside a forward pass]
A full parameter is a copy of the shards unless the shards lie in it (stages 0 to 2, one dtype). So
a forward pass that writes it (codebooks, clamps, weights that a library packs again) would lose the
change. Writes in place change the version, which `Slots` compares. Writes through ``.data`` do not,
and assignments give the parameter other memory. So the class notes what its ``data`` has returned
and been given during a call. After the call a write in place through ``.data``, an assignment, or a
frozen parameter in its place is kept if the shards lie in the full parameter; any other is refused.
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
        """Note that ``param.data`` was read. Its version counts writes from now on."""
        self.reads.append((param, data))

    def take_written(self) -> dict[int, bool]:
        """Return, and forget, the ids of parameters that were assigned or written.

        The value tells whether one was written in place, through ``data``.
        """
        if not self.reads and not self.assigned:
            return {}
        found = {id(param): False for param in self.assigned}
        found |= {id(param): True for param, data in self.reads if data._version}
        self.reads, self.assigned = [], []
        return found


class FullParameter(nn.Parameter):
    """A full parameter, in modules while they run; autograd's leaf."""

    _access: DataAccess | None = None  # of a parameter in modules, not of copies

    @property
    def data(self) -> torch.Tensor:
        """The parameter outside the graph; writes are noted."""
        made: torch.Tensor = _DATA.__get__(self)
        if self._access is not None:
            self._access.note_read(self, made)
        return made

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)
        if self._access is not None:
            self._access.assigned.append(self)

    def detach(self) -> torch.Tensor:
        """Return a plain tensor; for ``nn.Parameter(p)``, which asks for it, one of this class."""
        made = super().detach()
        if sys._getframe(1).f_code is _NEW_PARAMETER:
            made.__class__ = FullParameter
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the parameter as an ordinary one."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_DATA.__get__(self).clone(), self.requires_grad)
        made: nn.Parameter = memo[id(self)]
        return made


FullParameter.__name__ = nn.Parameter.__name__  # as messages call it


def make_full(view: torch.Tensor, requires_grad: bool, access: DataAccess) -> nn.Parameter:
    """Return a leaf over the memory of a full copy; a tensor subclass stays an `nn.Parameter`."""
    leaf = nn.Parameter(view, requires_grad=requires_grad)
    if type(view) is torch.Tensor:
        leaf.__class__ = FullParameter
        vars(leaf)["_access"] = access
    return leaf


def set_full_data(leaf: nn.Parameter, view: torch.Tensor) -> None:
    """Give a full parameter its own memory again, without a note."""
    _DATA.__set__(leaf, view)


def data_of(leaf: nn.Parameter) -> torch.Tensor:
    """Return a full parameter's data, without a note."""
    made: torch.Tensor = _DATA.__get__(leaf)
    return made


class ValueWatch:
    """Compares the values of full parameters before and after a call, for `check.writes`.

    It finds writes that change no version: through NumPy, DLPack, addresses, kernels of others.
    **Cost** a copy of the full parameters of the units in their calls.
    """

    def __init__(self) -> None:
        self.found: dict[str, None] = {}  # names of parameters that were written, in order
        self._values: dict[int, list[torch.Tensor]] = {}  # by the id of the full parameter

    def begin(self, fulls: Iterable[nn.Parameter]) -> None:
        """Copy the values of full parameters that are about to be used."""
        for full in fulls:
            self._values[id(full)] = [part.clone() for part in _parts_of(full)]

    def end(self, fulls: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare full parameters, given with their names; leave out those with a known write."""
        for name, full in fulls:
            before = self._values.get(id(full))
            if before is not None and not all(map(has_same_bits, before, _parts_of(full))):
                self.found[name] = None
        self._values.clear()

    def forget(self) -> None:
        """Drop the copies: the caller may write from now on."""
        self._values.clear()


def _parts_of(full: nn.Parameter) -> list[torch.Tensor]:
    return list(plain_parts(data_of(full)).values())


_LEFT = "_shardwise_left_context"  # on a full parameter of `gathered`: its name


def leave_context(full: torch.Tensor, name: str) -> None:
    """Mark a full parameter of a context that has ended; an optimizer of it trains nothing."""
    vars(full)[_LEFT] = name


def left_context(param: torch.Tensor) -> str | None:
    """Return the name of a full parameter whose context has ended; None for other tensors."""
    name: str | None = vars(param).get(_LEFT)
    return name
