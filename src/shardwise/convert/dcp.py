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
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.source import Kind, OptimizerInfo, TensorInfo
from shardwise.convert.dcp_metadata import WRITER, Chunk, DcpMetadata, FileRange, read_dcp_metadata
from shardwise.convert.pieces import Piece, PieceSource, explained, read_pieces
from shardwise.convert.torch_file import ObjectFound, StoredTensor, TorchFile
from shardwise.convert.unpickle import expect
from shardwise.errors import CheckpointError, DamagedCheckpoint

_OPEN_FILES = 64
_LEFT_OUT = object()
_OF_SGD = {"momentum", "dampening", "nesterov"}  # options that only torch's SGD has
_NO_PARAMS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_GROUPS = re.compile(r"(^|.*?\.)param_groups\.")
_NUMBERED = re.compile(r"(\d+)\.(.+)")


def open_dcp(folder: Path) -> PieceSource:
    """Open a folder that torch.distributed.checkpoint has written, and check its table.

    Entries of neither model nor optimizer are its ``extra``, nested as they were saved.

    **Cost** the table and the values; the only tensors read are step counts and those of ``extra``.

    **Raises** CheckpointError when it is no such folder, when it names classes or paths that it
    must not, or when its model is not known (see Note [Which key is which]); DamagedCheckpoint
    when files are missing or cut short.
    """
    with explained(str(folder), WRITER):
        return _Folder(folder, read_dcp_metadata(folder)).source()


class _Folder:
    """The tensors and values of one folder, by key."""

    def __init__(self, folder: Path, metadata: DcpMetadata) -> None:
        self.where = str(folder)
        self.metadata = metadata
        self._folder = folder
        self._open = lru_cache(_OPEN_FILES)(self._stream)
        self._keys = _Keys(self)

    def source(self) -> PieceSource:
        """Return the tensors of model and optimizer, and the values."""
        infos = dict(self._describe())
        optimizer = self._optimizer() if self._keys.optimizer is not None else None
        found = [state.get("step") for state in optimizer.state.values()] if optimizer else []
        counts = [key for info, key in infos.items() if info.state == "step" and info.numel == 1]
        steps = {float(self.read(key)) for key in counts}
        steps |= {float(n) for n in found if isinstance(n, int | float) and abs(n) < 2**53}
        agreed = steps.pop() if len(steps) == 1 else math.nan
        left_out: list[str] = []
        return PieceSource(
            self.where,
            {info: self._pieces(key) for info, key in infos.items()},
            int(agreed) if agreed.is_integer() else None,
            optimizer,
            self._extra({*infos.values()}, left_out),
            left_out=left_out,
        )

    def _describe(self) -> Iterator[tuple[TensorInfo, str]]:
        """Yield every tensor with its key, in the order of their bytes."""

        def first_byte(key: str) -> tuple[str, int]:
            chunks = self.metadata.tensors[key].chunks
            return min(((c.place.file, c.place.begin) for c in chunks), default=("", 0))

        for key in sorted(self.metadata.tensors, key=first_byte):
            tensor = self.metadata.tensors[key]
            if (found := self._keys.param_of(key)) is not None:
                yield TensorInfo("optimizer", found[0], tensor.dtype, tensor.shape, found[1]), key
            elif self._keys.is_of_model(key):
                kind: Kind = "buffer" if tensor.dtype in _NO_PARAMS else "param"
                name = key.removeprefix(self._keys.model)
                yield TensorInfo(kind, name, tensor.dtype, tensor.shape), key

    def _optimizer(self) -> OptimizerInfo:
        """Return the optimizer's groups and values; its class only if its options tell it."""
        groups: dict[str, dict[str, Any]] = {}
        for number, (options, params) in enumerate(self._keys.groups):
            values = {name: self.value(key) for name, key in options.items()}
            same = repr(sorted(values.items())) if self._keys.is_flat else str(number)
            groups.setdefault(same, {**values, "params": []})["params"] += params
        state: dict[str, dict[str, object]] = {}
        for key in self.metadata.values:
            if (found := self._keys.param_of(key)) is not None:
                state.setdefault(found[0], {})[found[1]] = self.value(key)
        is_sgd = groups and all(group.keys() >= _OF_SGD for group in groups.values())
        return OptimizerInfo("SGD" if is_sgd else "", tuple(groups.values()), state)

    def _extra(self, used: set[str], left_out: list[str]) -> dict[str, object]:
        """Return the other entries; those whose classes are not read are added to ``left_out``."""
        tree = _Branch()
        for key, path in self.metadata.paths.items():
            if key in used or self._keys.is_option(key) or self._keys.param_of(key):
                continue
            place = tree
            for part in path[:-1]:
                place = expect(_Branch, place.setdefault(part, _Branch()))
            if path[-1] in place:
                raise DamagedCheckpoint(f"{self.where}: '{key}' holds another value")
            try:
                place[path[-1]] = self.value(key, left_out)
            except ObjectFound:
                left_out.append(key)
                place[path[-1]] = _LEFT_OUT
        return tree.unfold()

    def value(self, key: str, left_out: list[str] | None = None) -> object:
        """Return a value, or a whole tensor that is one.

        **Raises** ObjectFound for other classes; given ``left_out``, entries of dicts are left out.
        """
        if key in self.metadata.tensors:
            return self.read(key)
        file = self._stream(key, self.metadata.values[key], any_name=left_out is not None)
        return file.plain(file.value, f"'{key}'" if left_out is None else key, left_out)

    def read(self, key: str) -> torch.Tensor:
        """Return a whole tensor."""
        tensor = self.metadata.tensors[key]
        numel = torch.Size(tensor.shape).numel()
        flat = read_pieces(tensor.dtype, tensor.shape, self._pieces(key), 0, numel)
        return flat.view(tensor.shape)

    def _pieces(self, key: str) -> list[Piece]:
        chunks = self.metadata.tensors[key].chunks
        return [Piece(chunk.region, partial(self._read_chunk, key, chunk)) for chunk in chunks]

    def _read_chunk(self, key: str, chunk: Chunk, lo: int, hi: int) -> torch.Tensor:
        file = self._open(key, chunk.place)
        stored, expected = file.value, (self.metadata.tensors[key].dtype, chunk.region.shape)
        if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != expected:
            raise DamagedCheckpoint(f"{file.where}: expected a tensor of {expected}, there is none")
        return file.read(stored, lo, hi)

    def _stream(self, key: str, place: FileRange, any_name: bool = False) -> TorchFile:
        path, what = self._folder / place.file, f"tensor '{key}'"
        return TorchFile(path, None, place.begin, place.length, what, any_name)


class _Branch(dict[str | int, object]):
    """A dict or list of the saved state; a value that is a dict is no branch."""

    def unfold(self) -> dict[str, object]:
        """Return a plain dict, without what is left out."""
        pairs: Any = {key: _unfold(member) for key, member in self.items()}
        return {key: member for key, member in pairs.items() if member is not _LEFT_OUT}


def _unfold(value: object) -> object:
    if not isinstance(value, _Branch):
        return value
    if set(value) != set(range(len(value))):
        return value.unfold()
    members = [_unfold(value[at]) for at in range(len(value))]  # all of a list, or none
    return _LEFT_OUT if any(member is _LEFT_OUT for member in members) else members


class _Keys:
    """Which key is which. See Note [Which key is which].

    ``model`` and ``optimizer`` are prefixes. ``groups`` have the keys of their options, and their
    parameters by name. In a flattened optimizer each parameter is a group.

    **Raises** CheckpointError when there is no answer, or more than one.
    """

    def __init__(self, folder: _Folder) -> None:
        self._metadata, self._where = folder.metadata, folder.where
        self.optimizer: str | None = None
        self.is_flat = False
        self.groups: list[tuple[Mapping[str, str], tuple[str, ...]]] = []
        found = [(m[1], key) for key in self._metadata.paths if (m := _GROUPS.match(key))]
        # Every group has these; a user's own `param_groups` does not.
        prefixes = {prefix for prefix, key in found if key.endswith((".params", ".lr"))}
        if len(prefixes) > 1:
            raise CheckpointError(
                f"{self._where}: several optimizers, at {_quoted(prefixes)}; one was expected. "
                "Save each with its model in a folder of its own"
            )
        for self.optimizer in prefixes:
            self._find_groups(folder, f"{self.optimizer}param_groups.")
        self._members = {name for _, params in self.groups for name in params}
        self.model = self._find_model()

    def _find_groups(self, folder: _Folder, prefix: str) -> None:
        keys = [key for key in self._metadata.paths if key.startswith(prefix)]
        self.is_flat = f"{prefix}0.params" not in keys
        options: dict[Any, dict[str, str]] = {}
        for key in keys:
            name, _, option = key.removeprefix(prefix).rpartition(".")
            group: str | int = name
            if not self.is_flat:
                if (match := _NUMBERED.fullmatch(key.removeprefix(prefix))) is None:
                    raise DamagedCheckpoint(
                        f"{self._where}: '{key}' belongs to no group of parameters"
                    )
                group, option = int(match[1]), match[2]
            options.setdefault(group, {})[option] = key
        for group, of_group in options.items() if self.is_flat else sorted(options.items()):
            members: object = [group] if self.is_flat else folder.value(of_group.pop("params"))
            if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
                raise CheckpointError(
                    f"{self._where}: group {group} of the optimizer numbers its parameters, so "
                    "which ones they are is not known. Save the optimizer's state by "
                    "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
                )
            self.groups.append((of_group, tuple(members)))

    def _find_model(self) -> str:
        """Return the prefix under which every parameter of the optimizer is a tensor."""
        tensors, paths = self._metadata.tensors, self._metadata.paths
        if not self._members:
            if not tensors:
                raise CheckpointError(f"{self._where}: no tensor in it")
            return self._one_of("".join(f"{part}." for part in paths[key][:-1]) for key in tensors)
        first = min(self._members)
        own = (f"{self.optimizer}state.", f"{self.optimizer}param_groups.")
        keys = [key for key in tensors if ("." + key).endswith("." + first)]
        candidates = {key.removesuffix(first) for key in keys if not key.startswith(own)}
        for name in sorted(self._members):
            candidates = {prefix for prefix in candidates if prefix + name in tensors}
            if not candidates:
                raise CheckpointError(
                    f"{self._where}: the optimizer at '{self.optimizer}' updates '{name}', but no "
                    "model in the folder has all of its parameters. Save model and optimizer "
                    "together"
                )
        return self._one_of(candidates)

    def _one_of(self, candidates: Iterable[str]) -> str:
        prefixes = set(candidates)
        named = {prefix for prefix in prefixes if ("." + prefix).endswith(".model.")}
        chosen = named or prefixes
        if len(chosen) > 1:
            raise CheckpointError(
                f"{self._where}: which of {_quoted(chosen)} is the model is not known. Save it "
                "under the key 'model', and nothing else under one"
            )
        return next(iter(chosen))

    def param_of(self, key: str) -> tuple[str, str] | None:
        """Return (parameter, key of its state) of an optimizer's state; None for other keys."""
        prefix = f"{self.optimizer}state."
        if self.optimizer is None or not key.startswith(prefix):
            return None
        name, entry = key.removeprefix(prefix), ""
        while name not in self._members:
            name, dot, last = name.rpartition(".")
            if not dot:
                return None
            entry = f"{last}.{entry}" if entry else last
        return (name, entry) if entry else None

    def is_option(self, key: str) -> bool:
        """Tell whether a key is of the optimizer's groups."""
        return self.optimizer is not None and key.startswith(f"{self.optimizer}param_groups.")

    def is_of_model(self, key: str) -> bool:
        """Tell whether a tensor that is no state of the optimizer is of the model."""
        is_inside = bool(self.model) or len(self._metadata.paths[key]) == 1
        return key.startswith(self.model) and is_inside and not self.is_option(key)


def _quoted(prefixes: Iterable[str]) -> str:
    names = sorted(prefix.removesuffix(".") or "(the top)" for prefix in prefixes)
    return ", ".join(f"'{name}'" for name in names[:5])
