"""This rank's elements of a sharded tensor, read and replaced without waiting for a step.

`step.background` gives tensors of a step under way a class whose ``_local_tensor`` waits.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_ELEMENTS: Any = DTensor.__dict__["_local_tensor"]


def elements_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's elements without waiting, for their shape, dtype, device and bytes."""
    elements: torch.Tensor = _ELEMENTS.__get__(tensor)
    return elements


def set_elements(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the memory of this rank's elements without waiting."""
    _ELEMENTS.__set__(tensor, local)
