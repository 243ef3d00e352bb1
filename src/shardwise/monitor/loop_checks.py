"""Checks of a training loop in a few steps: its inputs, dropout, gradients and reads of values.

Note [Which steps are checked]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Steps 3, 5, 8, 13 and so on, each about 1.6 times the one before, and every step whose timeline is
kept: a check costs about as much as a tenth of a short step. The numbers follow no period that a
loop may have.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.monitor import metrics as m
from shardwise.parallel.parts import Parts
from shardwise.tensor.elements import elements_of
from shardwise.tensor.plain_state import owner_of

_FIRST, _SECOND = 3, 5
# A step in which reads are counted takes half as long again, so of a short run there are few.
_COUNTED_AT, _COUNTED_FROM = (5, 8, 13), 144
_MOST_TENSORS, _MOST_ELEMENTS = 4, 4096  # of a model's inputs
_READS = ("item", "tolist", "cpu")  # methods of tensors that wait for the device
_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_MAX_NAMED = 200


class LoopChecks:
    """The checks of one rank; made before the first step.

    ``take`` ends a step. Of a step that was checked it returns figures, a digest of the inputs and
    the parameters of the optimizers without a gradient on this rank.
    """

    def __init__(self, parts: Parts, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers, self._units = optimizers, parts.units
        roots = [engine.units[0].module for engine in parts.engines]
        self._dropouts = [each for root in roots for each in _dropouts(root)]
        self._thread = threading.get_ident()
        self.is_checking = False
        self._last, self._next = _FIRST, _FIRST
        self._counts = False  # reads in the next step
        self._clear()

    def _clear(self) -> None:
        self._figures: dict[str, float] = {}
        self._digest: int | None = None
        self._idle: dict[str, bool] | None = None
        self._num_reads = self._num_inputs = 0
        self._looked_back = False

    def clear(self) -> None:
        """Keep neither the model nor the optimizers alive."""
        self.begin(False)
        self._optimizers, self._units, self._dropouts = (), [], []

    def is_due(self, number: int) -> bool:
        """Tell whether a step, counted from 1, is to be checked; call it once for each."""
        self._counts = False
        if number < self._next:
            return False
        self._counts = number in _COUNTED_AT or number >= _COUNTED_FROM
        self._last, self._next = self._next, max(_SECOND, self._next + self._last)
        if self._last == _FIRST:
            self._next = _SECOND
        return True

    def begin(self, is_checked: bool) -> None:
        """Begin a step."""
        was, self.is_checking = self.is_checking, is_checked
        if is_checked:
            self._clear()
        if is_checked and self._counts and sys.getprofile() is None:
            sys.setprofile(self._count_reads)
        elif was and getattr(sys.getprofile(), "__self__", None) is self:
            sys.setprofile(None)

    def take(self) -> tuple[Mapping[str, float], int | None, dict[str, bool] | None]:
        """End a step; see the class."""
        if not self.is_checking:
            return {}, None, None
        if getattr(sys.getprofile(), "__self__", None) is self:
            self._figures[m.READS] = self._num_reads / max(self._num_inputs, 1)
        return self._figures, self._digest, self._idle

    # -- events of a step that is checked
    def see_inputs(self, args: object, kwargs: Mapping[str, object]) -> None:
        """Take a digest of the inputs, and count dropouts that are off."""
        self._num_inputs += 1
        tensors = list(_tensors_in((args, kwargs)))[:_MOST_TENSORS]
        if tensors:  # the first has the samples: token ids, or features in its last dim
            features = tensors[0].shape[-1] if tensors[0].is_floating_point() else 1
            self._figures[m.ROWS] = tensors[0].numel() / max(features, 1)
        for tensor in tensors:
            self._digest = _add_to_digest(self._digest or 0, tensor)
        if self._dropouts:
            off = sum(not part.training or not getattr(part, p) for part, p in self._dropouts)
            self._figures[m.DROPOUTS_OFF_SHARE] = 100 * off / len(self._dropouts)

    def see_phase(self, phase: str, unit: str) -> None:
        """As the first backward pass begins, look for gradients of the step before."""
        if self.is_checking and phase == "backward" and not self._looked_back:
            self._looked_back = True
            self._figures[m.KEPT_GRADIENTS] = float(any(map(_has_gradient, self._some_params())))

    def _some_params(self) -> Iterator[torch.Tensor | None]:
        for unit in self._units:
            for param in unit.params[:1]:
                yield param.grad

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the parameters of an optimizer that have no gradient here, before its step."""
        if not self.is_checking:
            return
        found = self._idle if self._idle is not None else {}
        of_param = {id(p): p.name for u in self._units for p in u.params}
        locals_of: list[tuple[str, torch.Tensor]] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = of_param.get(id(owner_of(param)))
                if name is None:
                    continue
                grad = param.grad
                local = elements_of(grad) if isinstance(grad, DTensor) else grad
                if local is None or not local.numel():
                    found[name] = param.requires_grad  # another rank may have one
                else:
                    locals_of.append((name, local))
        found |= dict.fromkeys(_zeros_of(locals_of), True)
        self._idle = dict([*found.items()][:_MAX_NAMED])

    def _count_reads(self, frame: FrameType, event: str, called: object) -> None:
        if (
            event == "c_call"
            and getattr(called, "__name__", "") in _READS
            and isinstance(getattr(called, "__self__", None), torch.Tensor)
            and not frame.f_code.co_filename.startswith(_OURS)
        ):
            self._num_reads += 1


def _dropouts(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that drop activations, with the name of their probability."""
    for module in root.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                yield module, "p"
            continue
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and 0 < value < 1:
                yield module, name


def _tensors_in(given: object, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if not isinstance(given, DTensor) and given.numel():
            yield given
    elif isinstance(given, Mapping) and depth:
        for value in given.values():
            yield from _tensors_in(value, depth - 1)
    elif isinstance(given, list | tuple) and depth:
        for value in given:
            yield from _tensors_in(value, depth - 1)


@torch.no_grad()
def _add_to_digest(digest: int, tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(flat.numel() // _MOST_ELEMENTS, 1)][:_MOST_ELEMENTS].cpu().contiguous()
    data = some.view(torch.uint8).numpy().tobytes() if some.element_size() else b""
    return crc32(repr(tuple(tensor.shape)).encode(), crc32(data, digest))


@torch.no_grad()
def _has_gradient(grad: torch.Tensor | None) -> bool:
    local = elements_of(grad) if isinstance(grad, DTensor) else grad
    return local is not None and bool(local.any())


@torch.no_grad()
def _zeros_of(gradients: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of gradients whose elements are all zero; waits for each device once."""
    found = []
    for device in {local.device for _, local in gradients}:
        there = [(name, local) for name, local in gradients if local.device == device]
        norms = torch._foreach_norm([local for _, local in there], float("inf"))
        are_zero = torch.stack([norm.float() for norm in norms]).eq(0).tolist()
        found += [name for (name, _), is_zero in zip(there, are_zero, strict=True) if is_zero]
    return found
