"""Write a sharded model of transformers as the folder that ``save_pretrained`` writes.

Note [A part at a time]
transformers writes parameters under the names of the hub, for which it may split one of ours (the
experts of a mixture) or join several. It does so on the whole state at once. Here its function is
run first on tensors without memory, which gives every file's header, then on a part of the state
after the other, gathered on the ranks that write. A part is one tensor, if the names that tensors
have apart are those of the whole; else a layer; else, as a conversion goes across layers, all.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.container import (
    Stored,
    build_header,
    dtype_name,
    element_bytes,
    memory_of,
    place,
)
from shardwise.convert.export import split_into_shards
from shardwise.engine.api import engine_of
from shardwise.engine.weights import FullWeights, State, named_weights, stream_weights
from shardwise.errors import ConfigError, StateError
from shardwise.quantities import parse_size

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    *,
    is_main_process: bool | None = None,
    state_dict: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    **options: Any,
) -> None:
    """Write the whole model, in its master dtype, as a folder that ``from_pretrained`` loads.

    Every rank calls it, rank 0 writes. The arguments are those of transformers. With a
    ``state_dict``, or inside ``gathered(model)``, its own method runs. Weights appear under their
    names when all of them are written.

    **Cost** as of `interop.stream` to the ranks that write, on which one part of the state at a
    time is in memory: one parameter, or those of a layer if the names of the hub ask for it.

    **Raises** ConfigError for what cannot be done; on all ranks when a write fails on one.
    """
    stock = type(model).save_pretrained
    engine = engine_of(model)
    options = {k: v for k, v in options.items() if v is not None}
    if state_dict is not None or engine.suspended:
        options |= {} if is_main_process is None else {"is_main_process": is_main_process}
        stock(model, save_directory, state_dict=state_dict, **options)
        return
    _check(model, options)
    max_bytes = _bytes_of(max_shard_size)  # asked first: transformers' own removes earlier weights
    engine.rest("save_pretrained()")
    writes = model.should_save_on_this_rank(is_main_process is not False)  # a rank 0 only
    options |= {"state_dict": {}, "is_main_process": writes}  # all but the weights
    with _no_progress_bar():  # of the weights, of which there are none
        on_all_ranks(engine.comm.control, lambda: stock(model, save_directory, **options))
    _write(Plan(model, max_bytes, save_original_format), save_directory, writes)


def save_weights(model: Any, folder: str | Path, *, writes: bool) -> None:
    """Write the state dict of a sharded module of any class to ``model.safetensors``.

    Every rank calls it, with ``writes`` on one of them. Tied tensors are there under one name.

    **Cost** and **Raises** as of `save_pretrained`.
    """
    _check(model, {})
    engine_of(model).rest("save_weights()")
    if writes:
        Path(folder).mkdir(parents=True, exist_ok=True)
    _write(Plan(model, None, save_original_format=False), folder, writes)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


def _write(plan: Plan, folder: str | Path, writes: bool) -> None:
    """Gather part by part on the ranks that write. See Note [A part at a time]."""
    failures: list[Exception] = []
    control = engine_of(plan.model).everyone
    flags = control.exchange(bytes([writes]))
    members = control.members or (dist.get_rank(),)
    ranks = [rank for rank, flag in zip(members, flags, strict=True) if flag[0]]
    with ExitStack() as stack:
        writer = None
        if writes:
            try:
                writer = stack.enter_context(_Writer(Path(folder), plan))
            except OSError as error:
                failures.append(error)
        weights = FullWeights(plan.model, "save_pretrained", ranks or members)
        groups = plan.groups if ranks else []
        for name, tensor in stream_weights(weights, plan.tensors, groups, plan.revert, 0):
            if failures or writer is None:  # the others gather on; they are told below
                continue
            try:
                writer.write({name: tensor.cpu()})
            except OSError as error:
                failures.append(error)

        def finish() -> None:
            if failures:
                raise failures[0]
            if writer is not None:
                writer.finish(plan.model)

        on_all_ranks(engine_of(plan.model).comm.control, finish)


def _check(model: Any, options: Mapping[str, Any]) -> None:
    """Refuse what would be wrong, before anything is written."""
    broken = engine_of(model).conditions.unusable
    if broken is not None:
        raise StateError(f"save_pretrained: the parameters are not to be used: {broken}")
    for name in ("push_to_hub", "variant", "distributed_checkpoint"):
        if options.get(name):
            raise ConfigError(
                f"save_pretrained({name}={options[name]!r}): not for a sharded model. Leave it "
                "out: what is written is an ordinary folder, which can be uploaded or renamed"
            )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "save_pretrained: the model has adapters of PEFT inside (add_adapter()); build it with "
            "peft.get_peft_model() instead, whose save_pretrained() works"
        )


def _bytes_of(size: int | str) -> int:
    """Return the bytes of a number, or of text such as "5GB"."""
    try:
        num_bytes = int(parse_size(str(size)))
    except ValueError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ConfigError(f"max_shard_size={size!r}: expected bytes, or text such as '5GB'")
    return num_bytes


class Plan:
    """Which tensors go where, and which are converted together. See Note [A part at a time]."""

    def __init__(self, model: Any, max_bytes: int | None, save_original_format: bool) -> None:
        self.model = model
        self._reverts = save_original_format
        self.tensors = named_weights(model)
        empty = {
            name: torch.empty(t.shape, dtype=t.dtype, device="meta")
            for name, t in self.tensors.items()
        }
        whole = self.revert(dict(empty))
        for groups in ([[name] for name in empty], _by_layer(empty), [list(empty)]):
            self.groups, made = groups, State()
            for names in groups:
                made |= self.revert({name: empty[name] for name in names})
            if {k: v.shape for k, v in made.items()} == {k: v.shape for k, v in whole.items()}:
                break
        names = list(made)
        dtypes = {name: dtype_name(made[name].dtype, name) for name in names}
        sizes = [made[n].numel() * element_bytes(dtypes[n]) for n in names]
        self.total_bytes = sum(sizes)
        shards = split_into_shards(sizes, max_bytes or max(1, self.total_bytes))
        self.files: dict[str, list[Stored]] = {}
        for number, members in enumerate(shards):
            one = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            boxes = [
                (n, dtypes[n], tuple(made[n].shape), (0,) * made[n].dim())
                for n in (names[i] for i in members)
            ]
            boxes.sort(key=lambda box: -element_bytes(box[1]))  # each aligned to its elements
            self.files[_WEIGHTS if len(shards) == 1 else one] = place(boxes)

    def revert(self, state: State) -> State:
        """Return tensors as they are stored."""
        if not self._reverts:
            return state
        found: State = revert_weight_conversion(self.model, state)
        return found


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group names by the layer that they are in; what is in none is alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        groups.setdefault(found[0] if found else name, []).append(name)
    return list(groups.values())


class _Writer:
    """The files of one rank that writes; they get their names at the end."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        mark = secrets.token_hex(4)
        self._temporary = {name: folder / f".{name}.{mark}.tmp" for name in plan.files}
        self._open: dict[str, tuple[BinaryIO, int]] = {}
        self._homes = {s.key: (name, s) for name, stored in plan.files.items() for s in stored}

    def __enter__(self) -> _Writer:
        try:
            for name, stored in self._plan.files.items():
                header = build_header(stored, {"format": "pt"})
                file = self._temporary[name].open("xb")
                self._open[name] = file, len(header)
                file.write(header)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for file, _ in self._open.values():
            with suppress(OSError):
                file.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def write(self, tensors: State) -> None:
        """Put tensors where the headers say that they are."""
        for key, tensor in tensors.items():
            name, stored = self._homes[key]
            file, begin = self._open[name]
            file.seek(begin + stored.begin)
            file.write(memory_of(tensor.contiguous()))

    def finish(self, model: Any) -> None:
        """Close the files, give them their names, and write the index if there are several."""
        for name, (file, _) in self._open.items():
            file.close()
            os.replace(self._temporary[name], self._folder / name)
        stale = _INDEX if _WEIGHTS in self._plan.files else _WEIGHTS
        (self._folder / stale).unlink(missing_ok=True)  # of an earlier save
        if len(self._plan.files) > 1:
            total = {"total_parameters": model.num_parameters()}
            index = {
                "metadata": {**total, "total_size": self._plan.total_bytes},
                "weight_map": {key: name for key, (name, _) in sorted(self._homes.items())},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / _INDEX).write_text(text, encoding="utf-8")
