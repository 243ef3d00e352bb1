"""A torch.distributed.checkpoint folder as a source: its tensors by slices, its values as data.

DCP does not say which tensors of a model are buffers: ``param`` is what is not sure to be one
(integers and booleans are). It does not say either which names share a tensor: it saved each one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import torch_dtype
from shardwise.checkpoint.source import Kind, OptimizerInfo, TensorInfo
from shardwise.convert.dcp_metadata import Chunk, DcpMetadata, Place, read_dcp_metadata
from shardwise.convert.dcp_names import find_names
from shardwise.convert.foreign import explained
from shardwise.convert.torch_file import NoData, TorchFile
from shardwise.convert.torch_names import StoredTensor
from shardwise.errors import DamagedCheckpoint
from shardwise.layout.boxes import Box, boxes_of_range

_WRITER = "torch.distributed.checkpoint"
_LEFT_OUT = object()
_OF_SGD = {"momentum", "dampening", "nesterov"}  # options that only torch's SGD has
_NO_PARAMS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


def open_dcp(folder: Path) -> "DcpSource":
    """Open a folder that torch.distributed.checkpoint has written, and check its table.

    **Cost** the table and the optimizer's lists of names; no tensor is read.
    **Raises** CheckpointError when it is no such folder, when it names classes or paths that it
    must not, or when its model cannot be told (see Note [Which key is which]); DamagedCheckpoint
    when files are missing or cut short.
    """
    with explained(str(folder), _WRITER):
        return DcpSource(folder, read_dcp_metadata(folder))


class DcpSource:
    """The tensors and values of one DCP folder."""

    def __init__(self, folder: Path, metadata: DcpMetadata) -> None:
        self.where = str(folder)
        self.tied: Mapping[str, str] = {}
        self._folder = folder
        self._metadata = metadata
        self._files: dict[Place, TorchFile] = {}  # those of `_reading`
        self._reading = ""
        self._names = find_names(metadata, self.where, self._value)
        self._keys = dict(self._describe())

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Parameters, buffers and the optimizer's states, in the order of their bytes."""
        return tuple(self._keys)

    @cached_property
    def step(self) -> int | None:
        """The step on which the states of all parameters agree, if there is one."""
        with explained(self.where, _WRITER):
            return self._find_step()

    def _find_step(self) -> int | None:
        infos = [info for info in self._keys if info.state == "step" and info.numel == 1]
        steps = {float(self.read(info, 0, 1)) for info in infos}
        values = self.optimizer.state.values() if self.optimizer else ()
        found = [state["step"] for state in values if "step" in state]
        steps |= {
            float(step) for step in found if isinstance(step, int | float) and abs(step) < 2**53
        }
        agreed = steps.pop() if len(steps) == 1 else math.nan
        return int(agreed) if agreed.is_integer() else None

    @cached_property
    def optimizer(self) -> OptimizerInfo | None:
        """The optimizer's groups and values; its class only where its options tell it."""
        with explained(self.where, _WRITER):
            return self._find_optimizer()

    def _find_optimizer(self) -> OptimizerInfo | None:
        if self._names.optimizer is None:
            return None
        groups: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(self._names.groups):
            options = {name: self._value(key) for name, key in group.options.items()}
            same = repr(sorted(options.items())) if self._names.flattened else str(number)
            groups.setdefault(same, {**options, "params": []})["params"] += group.params
        state: dict[str, dict[str, Any]] = {}
        for key in self._metadata.values:
            if (found := self._names.param_of(key)) is not None:
                state.setdefault(found[0], {})[found[1]] = self._value(key)
        is_sgd = all(group.keys() >= _OF_SGD for group in groups.values())
        return OptimizerInfo("SGD" if groups and is_sgd else "", tuple(groups.values()), state)

    @cached_property
    def extra(self) -> Mapping[str, Any]:
        """What is neither model nor optimizer, nested as it was saved; its tensors are read."""
        return self._own[0]

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """What ``extra`` lacks, as it was made of classes that are not read."""
        return self._own[1]

    @cached_property
    def _own(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Return ``extra``, and what was left out of it."""
        with explained(self.where, _WRITER):
            return self._find_own()

    def _find_own(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        own = set(self._keys.values())
        left_out: list[str] = []
        tree: dict[Any, Any] = {}
        for key, path in self._metadata.paths.items():
            if key in own or self._names.is_option(key) or self._names.param_of(key):
                continue
            place = tree
            for part in path[:-1]:
                place = place.setdefault(part, _Branch())
                if not isinstance(place, _Branch):
                    raise DamagedCheckpoint(f"{self.where}: '{key}' is inside of another value")
            if path[-1] in place:
                raise DamagedCheckpoint(f"{self.where}: '{key}' holds another value")
            place[path[-1]] = self._own_value(key, left_out)
        return _unfold_dict(tree), tuple(left_out)

    def read(self, tensor: TensorInfo, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, on the CPU, shape [hi - lo].

        **Cost** the elements; where a piece was cut across rows, all of it between their ends.
        **Raises** DamagedCheckpoint naming the file and the tensor when its bytes are not right.
        """
        return self._read(self._keys[tensor], lo, hi)

    def _describe(self) -> Iterator[tuple[TensorInfo, str]]:
        """Yield every tensor with its key, in the order of their bytes."""
        prefix = self._names.model
        for key in sorted(self._metadata.tensors, key=self._first_byte):
            tensor = self._metadata.tensors[key]
            if (found := self._names.param_of(key)) is not None:
                yield TensorInfo("optimizer", found[0], tensor.dtype, tensor.shape, found[1]), key
            elif key.startswith(prefix) and not (
                self._names.is_option(key) or (not prefix and len(self._metadata.paths[key]) > 1)
            ):
                name = key.removeprefix(prefix)
                kind: Kind = "buffer" if tensor.dtype in _NO_PARAMS else "param"
                yield TensorInfo(kind, name, tensor.dtype, tensor.shape), key

    def _first_byte(self, key: str) -> tuple[str, int]:
        chunks = self._metadata.tensors[key].chunks
        return min(((c.place.file, c.place.begin) for c in chunks), default=("", 0))

    def _value(self, key: str) -> Any:
        """Return a value, or a whole tensor that is one."""
        if key in self._metadata.tensors:
            shape = self._metadata.tensors[key].shape
            return self._read(key, 0, torch.Size(shape).numel()).view(shape)
        place = self._metadata.values[key]
        file = self._file(key, place)
        return file.plain(file.value, f"'{key}'")

    def _own_value(self, key: str, left_out: list[str]) -> Any:
        """Return a value of the user's own, whose classes may be unknown."""
        if key in self._metadata.tensors:
            return self._value(key)
        file = self._file(key, self._metadata.values[key], any_name=True)
        try:
            return file.plain(file.value, key, left_out)
        except NoData:
            left_out.append(key)
            return _LEFT_OUT

    def _read(self, key: str, lo: int, hi: int) -> torch.Tensor:
        tensor = self._metadata.tensors[key]
        if key != self._reading:
            self._reading = key
            self._files.clear()
        out = torch.empty(hi - lo, dtype=torch_dtype(tensor.dtype))
        for box in boxes_of_range(tensor.shape, lo, hi):
            part = out[box.lo - lo : box.hi - lo].view(box.lengths)
            for chunk in tensor.chunks:
                self._copy(key, chunk, box, part)
        return out

    def _copy(self, key: str, chunk: Chunk, box: Box, out: torch.Tensor) -> None:
        """Copy what a chunk has of a box into ``out``, the box's tensor."""
        begins = [max(a, b) for a, b in zip(chunk.offsets, box.offsets, strict=True)]
        chunk_ends = map(sum, zip(chunk.offsets, chunk.lengths, strict=True))
        box_ends = map(sum, zip(box.offsets, box.lengths, strict=True))
        ends = [min(a, b) for a, b in zip(chunk_ends, box_ends, strict=True)]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if any(size <= 0 for size in sizes):
            return
        if chunk.place not in self._files:
            self._files[chunk.place] = self._file(key, chunk.place)
        file = self._files[chunk.place]
        stored = file.value
        expected = (self._metadata.tensors[key].dtype, chunk.lengths)
        if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != expected:
            raise DamagedCheckpoint(f"{file.where}: expected a tensor of {expected}, there is none")
        strides = [1] * len(sizes)
        for dim in reversed(range(len(sizes) - 1)):
            strides[dim] = strides[dim + 1] * chunk.lengths[dim + 1]
        inside = [begin - offset for begin, offset in zip(begins, chunk.offsets, strict=True)]
        first = sum(at * stride for at, stride in zip(inside, strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        span = file.read(stored, first, last + 1)
        target = tuple(
            slice(begin - offset, end - offset)
            for begin, end, offset in zip(begins, ends, box.offsets, strict=True)
        )
        out[target].copy_(span.as_strided(sizes, strides, 0))

    def _file(self, key: str, place: Place, any_name: bool = False) -> TorchFile:
        return TorchFile(
            self._folder / place.file,
            begin=place.begin,
            length=place.length,
            what=f"tensor '{key}'",
            any_name=any_name,
        )


class _Branch(dict[Any, Any]):
    """A dict or list of the saved state, still to be told apart from a value that is a dict."""


def _unfold(value: Any) -> Any:
    if not isinstance(value, _Branch):
        return value
    if set(value) == set(range(len(value))):
        members = [_unfold(value[at]) for at in range(len(value))]  # all of a list, or none
        return _LEFT_OUT if any(member is _LEFT_OUT for member in members) else members
    return _unfold_dict(value)


def _unfold_dict(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    pairs = ((key, _unfold(member)) for key, member in tree.items())
    return {key: member for key, member in pairs if member is not _LEFT_OUT}
