"""The `Source` that every reader of another format returns: an index of pieces, and values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch

from shardwise.checkpoint.container import torch_dtype
from shardwise.checkpoint.source import OptimizerInfo, TensorInfo
from shardwise.errors import CheckpointError, DamagedCheckpoint, ShardwiseError
from shardwise.layout.boxes import Region, boxes_of_range, contiguous_stride

ReadRange = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, or of its flattened elements, which have one dim.

    ``read(lo, hi)`` returns elements [lo, hi) of the flattened box, on the CPU.
    """

    region: Region
    read: ReadRange


def flat_piece(lo: int, hi: int, read: ReadRange) -> Piece:
    """Return the piece of elements [lo, hi) of a flattened tensor; ``read`` counts from ``lo``."""
    return Piece(Region((lo,), (hi - lo,)), read)


def read_pieces(
    dtype: str, shape: Sequence[int], pieces: Sequence[Piece], lo: int, hi: int
) -> torch.Tensor:
    """Return elements [lo, hi) of a flattened tensor, put together from its pieces.

    **Cost** the elements; of a piece that was cut across rows, all between its ends.
    """
    if pieces and len(pieces[0].region.shape) == 1:
        shape = (prod(shape),)
    if len(pieces) == 1 and pieces[0].region.shape == tuple(shape):
        return pieces[0].read(lo, hi)  # without a copy
    out = torch.empty(hi - lo, dtype=torch_dtype(dtype))
    for box in boxes_of_range(shape, lo, hi):
        want = Region(box.offsets, box.lengths)
        part = out[box.lo - lo : box.hi - lo].view(box.lengths)
        for piece in pieces:
            if (shared := piece.region.common(want)) is not None:
                elements = piece.read(*piece.region.flat(shared))
                strides = contiguous_stride(piece.region.shape)
                part[want.inside(shared)].copy_(elements.as_strided(shared.shape, strides, 0))
    return out


@dataclass
class PieceSource:
    """A `Source`: tensors in the order of their bytes, each with its pieces."""

    where: str
    index: Mapping[TensorInfo, Sequence[Piece]]
    step: int | None = None
    optimizer: OptimizerInfo | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Every tensor."""
        return tuple(self.index)

    def read(self, tensor: TensorInfo, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, on the CPU, shape [hi - lo].

        **Raises** DamagedCheckpoint naming the file and the tensor when its bytes are not right.
        """
        if not 0 <= lo <= hi <= tensor.numel:
            raise CheckpointError(
                f"{self.where}: tensor '{tensor.name}' has {tensor.numel} elements, [{lo}, {hi}) "
                "was asked for"
            )
        return read_pieces(tensor.dtype, tensor.shape, self.index[tensor], lo, hi)


@contextmanager
def explained(where: str, writer: str) -> Iterator[None]:
    """Turn errors of Python or torch about odd input into a DamagedCheckpoint that names it."""
    try:
        yield
    except ShardwiseError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    except (
        *(ArithmeticError, AttributeError, LookupError, MemoryError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise DamagedCheckpoint(
            f"{where}: not as {writer} writes it: {type(error).__name__} {str(error)[:200]!a}"
        ) from None
