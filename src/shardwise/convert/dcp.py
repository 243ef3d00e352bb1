"""A torch.distributed.checkpoint folder as a source: its tensors by slices, its values as data.

DCP does not say which tensors of a model are buffers: integers and booleans count as buffers, all
others as parameters. It does not say which names share a tensor either: it saved each one.

Note [Which key is which]
A folder of DCP is one table of keys such as ``model.layers.0.weight``. Only the program that wrote
it knows that this is a parameter, and of which model. The optimizer names the parameters that it
updates, so an optimizer is searched first, by its ``param_groups``. It may be at any depth
(``optim.``, ``app.optimizer.``, or at the top), as nested dicts (``param_groups.0.lr`` and a list
of names) or flattened (``param_groups.<name>.lr``). The model is then the one prefix under which
each of those names is a tensor; of several, the one that ends in ``model``. Without an optimizer,
the model is the dict under a key ``model``, or else the only dict of tensors. If more than one is
left, the folder is refused: nothing is guessed.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import torch_dtype
from shardwise.checkpoint.source import Kind, OptimizerInfo, TensorInfo
from shardwise.convert.dcp_metadata import Chunk, DcpMetadata, FileRange, read_dcp_metadata
from shardwise.convert.torch_file import (
    ObjectFound,
    StoredTensor,
    TorchFile,
    explained,
)
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.layout.boxes import Region, boxes_of_range

_WRITER = "torch.distributed.checkpoint"
_LEFT_OUT = object()
_OF_SGD = {"momentum", "dampening", "nesterov"}  # options that only torch's SGD has
_NO_PARAMS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_GROUPS = re.compile(r"(^|.*?\.)param_groups\.")
_NUMBERED = re.compile(r"(\d+)\.(.+)")


def open_dcp(folder: Path) -> "DcpSource":
    """Open a folder that torch.distributed.checkpoint has written, and check its table.

    **Cost** the table and the optimizer's lists of names; no tensor is read.

    **Raises** CheckpointError when it is no such folder, when it names classes or paths that it
    must not, or when its model is not known (see Note [Which key is which]); DamagedCheckpoint
    when files are missing or cut short.
    """
    with explained(str(folder), _WRITER):
        return DcpSource(folder, read_dcp_metadata(folder))


class DcpSource:
    """The tensors and values of one DCP folder."""

    def __init__(self, folder: Path, metadata: DcpMetadata) -> None:
        self.where = str(folder)
        self.tied: Mapping[str, str] = {}
        self.left_out: list[str] = []
        self._folder = folder
        self._metadata = metadata
        self._files: dict[FileRange, TorchFile] = {}  # of the key in `_reading`
        self._reading = ""
        self._names = _find_names(metadata, self.where, self._value)
        self._keys = dict(self._describe())

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Parameters, buffers and the optimizer's states, in the order of their bytes."""
        return tuple(self._keys)

    @cached_property
    def step(self) -> int | None:
        """The step that the states of all parameters agree on, if there is one."""
        values = self.optimizer.state.values() if self.optimizer else ()
        found = [state["step"] for state in values if "step" in state]
        with explained(self.where, _WRITER):
            infos = [info for info in self._keys if info.state == "step" and info.numel == 1]
            steps = {float(self.read(info, 0, 1)) for info in infos}
        steps |= {
            float(step) for step in found if isinstance(step, int | float) and abs(step) < 2**53
        }
        agreed = steps.pop() if len(steps) == 1 else math.nan
        return int(agreed) if agreed.is_integer() else None

    @cached_property
    def optimizer(self) -> OptimizerInfo | None:
        """The optimizer's groups and values; its class only if its options tell it."""
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
        state: dict[str, dict[str, object]] = {}
        for key in self._metadata.values:
            if (found := self._names.param_of(key)) is not None:
                state.setdefault(found[0], {})[found[1]] = self._value(key)
        is_sgd = all(group.keys() >= _OF_SGD for group in groups.values())
        return OptimizerInfo("SGD" if groups and is_sgd else "", tuple(groups.values()), state)

    @cached_property
    def extra(self) -> Mapping[str, object]:
        """Entries of neither model nor optimizer, nested as they were saved; tensors are read.

        Entries whose classes are not read are missing, and listed in ``left_out``.
        """
        with explained(self.where, _WRITER):
            return self._find_own()

    def _find_own(self) -> dict[str, object]:
        own = set(self._keys.values())
        tree = _Branch()
        for key, path in self._metadata.paths.items():
            if key in own or self._names.is_option(key) or self._names.param_of(key):
                continue
            place = tree
            for part in path[:-1]:
                inner = place.setdefault(part, _Branch())
                if not isinstance(inner, _Branch):
                    raise DamagedCheckpoint(f"{self.where}: '{key}' is inside of another value")
                place = inner
            if path[-1] in place:
                raise DamagedCheckpoint(f"{self.where}: '{key}' holds another value")
            place[path[-1]] = self._own_value(key)
        return _unfold_dict(tree)

    def read(self, tensor: TensorInfo, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, on the CPU, shape [hi - lo].

        **Cost** the elements; of a piece that was cut across rows, all between its ends.

        **Raises** DamagedCheckpoint naming the file and the tensor when its bytes are not right.
        """
        return self._read(self._keys[tensor], lo, hi)

    def _describe(self) -> Iterator[tuple[TensorInfo, str]]:
        """Yield every tensor with its key, in the order of their bytes."""

        def first_byte(key: str) -> tuple[str, int]:
            chunks = self._metadata.tensors[key].chunks
            return min(((c.place.file, c.place.begin) for c in chunks), default=("", 0))

        prefix = self._names.model
        for key in sorted(self._metadata.tensors, key=first_byte):
            tensor = self._metadata.tensors[key]
            if (found := self._names.param_of(key)) is not None:
                yield TensorInfo("optimizer", found[0], tensor.dtype, tensor.shape, found[1]), key
            elif key.startswith(prefix) and not (
                self._names.is_option(key) or (not prefix and len(self._metadata.paths[key]) > 1)
            ):
                name = key.removeprefix(prefix)
                kind: Kind = "buffer" if tensor.dtype in _NO_PARAMS else "param"
                yield TensorInfo(kind, name, tensor.dtype, tensor.shape), key

    def _value(self, key: str) -> object:
        """Return a value, or a whole tensor that is one."""
        if key in self._metadata.tensors:
            shape = self._metadata.tensors[key].shape
            return self._read(key, 0, torch.Size(shape).numel()).view(shape)
        file = self._file(key, self._metadata.values[key])
        return file.plain(file.value, f"'{key}'")

    def _own_value(self, key: str) -> object:
        """Return a value of the user's own, whose classes may be unknown."""
        if key in self._metadata.tensors:
            return self._value(key)
        file = self._file(key, self._metadata.values[key], any_name=True)
        try:
            return file.plain(file.value, key, self.left_out)
        except ObjectFound:
            self.left_out.append(key)
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
                self._copy(key, chunk, Region(box.offsets, box.lengths), part)
        return out

    def _copy(self, key: str, chunk: Chunk, box: Region, out: torch.Tensor) -> None:
        """Copy the elements that a chunk and a box share into ``out``, the box's tensor."""
        shared = chunk.region.common(box)
        if shared is None:
            return
        if chunk.place not in self._files:
            self._files[chunk.place] = self._file(key, chunk.place)
        file = self._files[chunk.place]
        stored, shape = file.value, chunk.region.shape
        expected = (self._metadata.tensors[key].dtype, shape)
        if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != expected:
            raise DamagedCheckpoint(f"{file.where}: expected a tensor of {expected}, there is none")
        elements = file.read(stored, *chunk.region.flat(shared))
        strides = torch.empty(shape, device="meta").stride()
        out[box.inside(shared)].copy_(elements.as_strided(shared.shape, strides, 0))

    def _file(self, key: str, place: FileRange, any_name: bool = False) -> TorchFile:
        return TorchFile(
            self._folder / place.file,
            begin=place.begin,
            length=place.length,
            what=f"tensor '{key}'",
            any_name=any_name,
        )


class _Branch(dict[str | int, object]):
    """A dict or list of the saved state; a value that is a dict is no branch."""


def _unfold(value: object) -> object:
    if not isinstance(value, _Branch):
        return value
    if set(value) == set(range(len(value))):
        members = [_unfold(value[at]) for at in range(len(value))]  # all of a list, or none
        return _LEFT_OUT if any(member is _LEFT_OUT for member in members) else members
    return _unfold_dict(value)


def _unfold_dict(tree: _Branch) -> dict[str, object]:
    pairs = ((key, _unfold(member)) for key, member in tree.items())
    return {key: member for key, member in pairs if member is not _LEFT_OUT}  # type: ignore[misc]


# -- see Note [Which key is which]
@dataclass(frozen=True)
class _Group:
    """One param_group: the keys of its options, and its parameters by name."""

    options: Mapping[str, str]
    params: tuple[str, ...]


@dataclass(frozen=True)
class _Names:
    """The prefixes of the model and, if there is one, of the optimizer; the optimizer's groups.

    In a flattened optimizer each parameter is a group, whether or not its options are its own.
    """

    model: str
    optimizer: str | None
    groups: tuple[_Group, ...] = ()
    flattened: bool = False

    @cached_property
    def members(self) -> frozenset[str]:
        """The parameters that the optimizer updates."""
        return frozenset(name for group in self.groups for name in group.params)

    def param_of(self, key: str) -> tuple[str, str] | None:
        """Return (parameter, key of its state) of an optimizer's state; None for other keys."""
        prefix = f"{self.optimizer}state."
        if self.optimizer is None or not key.startswith(prefix):
            return None
        name, entry = key.removeprefix(prefix), ""
        while name not in self.members:
            name, dot, last = name.rpartition(".")
            if not dot:
                return None
            entry = f"{last}.{entry}" if entry else last
        return (name, entry) if entry else None

    def is_option(self, key: str) -> bool:
        """Tell whether a key is of the optimizer's groups."""
        return self.optimizer is not None and key.startswith(f"{self.optimizer}param_groups.")


def _find_names(metadata: DcpMetadata, where: str, value_of: Callable[[str], object]) -> _Names:
    """Tell the model's keys from the optimizer's. See Note [Which key is which].

    ``value_of`` reads one value of the folder. **Raises** CheckpointError when there is no answer,
    or more than one.
    """
    found = [(m[1], key) for key in metadata.paths if (m := _GROUPS.match(key))]
    # Every group has these; a user's own `param_groups` does not.
    prefixes = {prefix for prefix, key in found if key.endswith((".params", ".lr"))}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{where}: several optimizers, at {_quoted(prefixes)}; one was expected. Save each "
            "with its model in a folder of its own"
        )
    if not prefixes:
        return _Names(_only_model(metadata, where), None)
    (prefix,) = prefixes
    of_groups = f"{prefix}param_groups."
    keys = [key.removeprefix(of_groups) for key in metadata.paths if key.startswith(of_groups)]
    flattened = "0.params" not in keys
    if flattened:
        groups = _flattened_groups(keys, of_groups)
    else:
        groups = _numbered_groups(keys, of_groups, where, value_of)
    members = [name for group in groups for name in group.params]
    model = _model_of(metadata, where, prefix, members)
    return _Names(model, prefix, groups, flattened)


def _numbered_groups(
    keys: Iterable[str], prefix: str, where: str, value_of: Callable[[str], object]
) -> tuple[_Group, ...]:
    options: dict[int, dict[str, str]] = {}
    for key in keys:
        if (match := _NUMBERED.fullmatch(key)) is None:
            raise DamagedCheckpoint(f"{where}: '{prefix}{key}' belongs to no group of parameters")
        options.setdefault(int(match[1]), {})[match[2]] = prefix + key
    groups = []
    for number in sorted(options):
        members = value_of(f"{prefix}{number}.params")
        if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
            raise CheckpointError(
                f"{where}: group {number} of the optimizer numbers its parameters, so which ones "
                "they are is not known. Save the optimizer's state by get_optimizer_state_dict "
                "of torch.distributed.checkpoint.state_dict"
            )
        options[number].pop("params")
        groups.append(_Group(options[number], tuple(members)))
    return tuple(groups)


def _flattened_groups(keys: Iterable[str], prefix: str) -> tuple[_Group, ...]:
    options: dict[str, dict[str, str]] = {}
    for key in keys:
        name, _, option = key.rpartition(".")
        options.setdefault(name, {})[option] = prefix + key
    return tuple(_Group(of_name, (name,)) for name, of_name in options.items())


def _model_of(metadata: DcpMetadata, where: str, optimizer: str, members: list[str]) -> str:
    """Return the prefix under which every parameter of the optimizer is a tensor."""
    own = (f"{optimizer}state.", f"{optimizer}param_groups.")
    keys = [key for key in metadata.tensors if not key.startswith(own)]
    if not members:
        return _only_model(metadata, where)
    ending = "." + members[0]
    candidates = {key[: -len(members[0])] for key in keys if ("." + key).endswith(ending)}
    for name in members:
        candidates = {prefix for prefix in candidates if prefix + name in metadata.tensors}
        if not candidates:
            raise CheckpointError(
                f"{where}: the optimizer at '{optimizer}' updates '{name}', but no model in the "
                "folder has all of its parameters. Save model and optimizer together"
            )
    return _one_of(candidates, where)


def _only_model(metadata: DcpMetadata, where: str) -> str:
    """Return the prefix of the only dict of tensors, or of the one under a key ``model``."""
    folders = {metadata.paths[key][:-1] for key in metadata.tensors}
    if not folders:
        raise CheckpointError(f"{where}: no tensor in it")
    return _one_of({"".join(f"{part}." for part in folder) for folder in folders}, where)


def _one_of(prefixes: set[str], where: str) -> str:
    named = {prefix for prefix in prefixes if ("." + prefix).endswith(".model.")}
    chosen = named or prefixes
    if len(chosen) > 1:
        raise CheckpointError(
            f"{where}: which of {_quoted(chosen)} is the model cannot be told. Save it under the "
            "key 'model', and nothing else under one"
        )
    return next(iter(chosen))


def _quoted(prefixes: set[str]) -> str:
    names = sorted(prefix.removesuffix(".") or "(the top)" for prefix in prefixes)
    return ", ".join(f"'{name}'" for name in names[:5])
