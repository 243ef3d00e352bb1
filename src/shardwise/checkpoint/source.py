"""A checkpoint of any format, as a table of tensors that are read by slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardwise.checkpoint.container import element_bytes

if TYPE_CHECKING:
    import torch

Kind = Literal["param", "buffer", "optimizer", "extra"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its kind, name, dtype (safetensors spelling) and full shape.

    ``name`` is the fully qualified name of the parameter or buffer; for ``extra`` it is the place
    in the user's own state. ``state`` is the optimizer's key (``exp_avg``), else "".
    """

    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]
    state: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return self.numel * element_bytes(self.dtype)

    @property
    def key(self) -> str:
        """The name under which files hold it: a parameter's own; unique in a checkpoint."""
        if self.kind == "optimizer":
            return f"optim.state.{self.name}.{self.state}"
        return f"extra.{self.name}" if self.kind == "extra" else self.name


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimizer's settings and its state beside tensors; parameters are named, not numbered.

    ``groups`` are torch's param_groups with ``params`` as a list of names. ``state`` has the values
    other than tensors, by parameter and key.
    """

    class_name: str
    groups: tuple[Mapping[str, Any], ...]
    state: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class Source(Protocol):
    """Tensors and values of one checkpoint; each is read when it is asked for."""

    where: str  # the folder or file, for messages

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Every tensor, in the order in which reading is fastest."""

    @property
    def step(self) -> int | None:
        """The optimizer step at which it was saved, if known."""

    @property
    def optimizer(self) -> OptimizerInfo | None:
        """The optimizer's groups and values, if it holds any."""

    @property
    def extra(self) -> Mapping[str, object]:
        """The user's own state."""

    @property
    def left_out(self) -> Sequence[str]:
        """Entries that `extra` lacks because their classes are not read, once it was asked for."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Further names of shared parameters, each with the name of the saved tensor."""

    def read(self, tensor: TensorInfo, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, on the CPU, shape [hi - lo].

        **Raises** DamagedCheckpoint naming the file and the tensor when its bytes are damaged.
        """
