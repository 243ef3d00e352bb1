"""A DeepSpeed ZeRO checkpoint, stages 1 to 3 or universal, as a source, without DeepSpeed.

The files are read with `torch_file`, so what DeepSpeed pickles beside tensors (its loss scaler, the
stage, addresses of fragments) is described and never made; see Note [Why not torch.load]. The fp32
master weights are read, not their 16-bit copies. What is no parameter of the optimizer comes from
the model's file: frozen parameters, buffers.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import torch_dtype
from shardwise.checkpoint.files import Files, read_text
from shardwise.checkpoint.source import Kind, OptimizerInfo, TensorInfo
from shardwise.convert.deepspeed_parts import (
    NAMES,
    UNIVERSAL,
    Part,
    Trained,
    integer_of,
    read_partitions,
    read_parts,
    read_universal,
    shapes_of,
    stage_of,
    text_of,
)
from shardwise.convert.foreign import explained, is_plain_name
from shardwise.convert.torch_file import TorchFile
from shardwise.convert.torch_names import StoredTensor
from shardwise.convert.unpickle import Made, Name
from shardwise.errors import CheckpointError, DamagedCheckpoint

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OTHERS = re.compile(r"layer_\d+.*_states\.pt|.*expert_\d+.*_states\.pt|expp_rank_.*")
_MAX_TAG_BYTES = 4096
# What DeepSpeed itself puts into the model's file; the rest is the user's `client_state`.
_OWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "data_sampler", "random_ltd"),
        *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "num_experts", "ds_autoep_layers", "universal_checkpoint_info"),
    )
)


def open_deepspeed(folder: Path, tag: str | None = None) -> "DeepSpeedSource":
    """Open what ``save_checkpoint(folder, tag)`` wrote; without a tag, the one ``latest`` names.

    ``folder`` may also be the tag's own folder.

    **Cost** the tables of all ranks' files; no tensor is read but the step counts.
    **Raises** CheckpointError when it is no such folder, names classes that it must not, or is of
    tensor, pipeline or expert parallel training; DamagedCheckpoint when a rank's file is missing,
    cut short, or of another step.
    """
    with explained(str(folder), "DeepSpeed"):
        home = _find_folder(folder, tag)
        optims, models = _list_files(home)
        files = [TorchFile(path, NAMES, any_name=True) for path in models]
        shapes = [shapes_of(of_flat) for of_flat in files[0].value["param_shapes"]]
        if not optims:
            return DeepSpeedSource(home, files, read_universal(home, shapes))
        states = [TorchFile(path, NAMES) for path in optims]
        _check_ranks(home, files, states)
        return DeepSpeedSource(home, files, read_partitions(states, shapes))


class DeepSpeedSource:
    """The tensors and values of one tag."""

    def __init__(self, folder: Path, models: Sequence[TorchFile], trained: Trained) -> None:
        self.where = str(folder)
        self._model = models[0]
        self._state: Mapping[str, Any] = models[0].value
        self._parts = dict(trained.parts)
        self._scalars = trained.scalars
        self.step: int | None = integer_of(self._state["global_steps"])
        self.optimizer: OptimizerInfo | None = OptimizerInfo(
            self._optimizer_name(), tuple(trained.groups), trained.values
        )
        tied = self._state.get("shared_params") or {}
        self.tied: Mapping[str, str] = {text_of(k): text_of(v) for k, v in tied.items()}
        if trained.stage == 3:
            self._add_frozen(models)
        self._add_rest(trained.stage)

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Parameters each with its states, then frozen parameters and buffers, then scalars."""
        return (*self._parts, *self._scalars)

    @cached_property
    def extra(self) -> Mapping[str, Any]:
        """The user's ``client_state``, and ``lr_scheduler`` if there is one."""
        return self._own[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """What ``extra`` lacks, as it was made of classes that are not read."""
        return self._own[1]

    @cached_property
    def _own(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Return ``extra``, and what was left out of it."""
        with explained(self.where, "DeepSpeed"):
            return self._find_own()

    def _find_own(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        own = {k: v for k, v in self._state.items() if k not in _OWN}
        if own.get("lr_scheduler") is None:
            own.pop("lr_scheduler", None)
        left_out: list[str] = []
        extra = self._model.plain(own, "client_state", left_out)
        module = self._state.get("module") or {}
        rest = {k: v for k, v in module.items() if not isinstance(v, StoredTensor)}
        return {**extra, **self._model.plain(rest, "module")}, tuple(left_out)

    def read(self, tensor: TensorInfo, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, on the CPU, shape [hi - lo].

        **Cost** the elements. **Raises** DamagedCheckpoint naming the file when its bytes are not
        right.
        """
        if tensor in self._scalars:
            return self._scalars[tensor].reshape(1)[lo:hi].clone()
        out = torch.empty(hi - lo, dtype=torch_dtype(tensor.dtype))
        read_parts(self._parts[tensor], out, lo)
        return out

    def _optimizer_name(self) -> str:
        """Return torch's name for what DeepSpeed's config says, "" where it does not say it.

        Its "Adam" decays weights as AdamW does, unless ``adam_w_mode`` is off.
        """
        config = self._state.get("ds_config")
        named = config.get("optimizer") if isinstance(config, dict) else None
        name = named.get("type") if isinstance(named, dict) else None
        if not isinstance(name, str):
            return ""
        options = named.get("params") if isinstance(named, dict) else None
        if name.lower() == "adam":
            off = isinstance(options, dict) and options.get("adam_w_mode") is False
            return "Adam" if off else "AdamW"
        return "AdamW" if name.lower() == "adamw" else name

    def _add_frozen(self, models: Sequence[TorchFile]) -> None:
        """Add parameters without gradients of stage 3, which cuts them as well."""
        for name, shape in shapes_of(self._state.get("frozen_param_shapes") or {}).items():
            parts = []
            share = -(-prod(shape) // len(models))
            for rank, file in enumerate(models):
                stored = file.value["frozen_param_fragments"][name]
                lo, hi = (min((rank + n) * share, prod(shape)) for n in (0, 1))
                if stored.numel < hi - lo:
                    raise DamagedCheckpoint(
                        f"{file.where}: '{name}' has {stored.numel} elements, expected {hi - lo}"
                    )
                parts.append(Part(lo, hi, file, stored, 0))
            self._parts[TensorInfo("param", name, stored.dtype, shape)] = parts

    def _add_rest(self, stage: int) -> None:
        """Add what only the model's file has: buffers, and frozen parameters of stages 1 and 2."""
        known = {info.name for info in self._parts}
        buffers = {text_of(name) for name in self._state.get("buffer_names") or ()}
        for name, stored in (self._state.get("module") or {}).items():
            if isinstance(stored, Made | Name):
                raise CheckpointError(
                    f"{self._model.where}: '{name}' of the model is a "
                    f"{stored.name if isinstance(stored, Made) else stored.text}, which is not read"
                )
            if name in known or name in self.tied or not isinstance(stored, StoredTensor):
                continue
            if stage == 3 and not stored.numel and name not in buffers:
                raise DamagedCheckpoint(f"{self._model.where}: no rank has elements of '{name}'")
            kind: Kind = "buffer" if name in buffers else "param"
            info = TensorInfo(kind, name, stored.dtype, stored.shape)
            self._parts[info] = [Part(0, stored.numel, self._model, stored, 0)]
        names = {info.name for info in self._parts}
        if lost := [name for name, target in self.tied.items() if target not in names]:
            raise DamagedCheckpoint(f"{self._model.where}: what '{lost[0]}' shares is not there")


def _check_ranks(folder: Path, models: Sequence[TorchFile], optims: Sequence[TorchFile]) -> None:
    """Hold the files against each other: the number of ranks, and the step."""
    world = integer_of(models[0].value["dp_world_size"])
    saved = optims[0].value["optimizer_state_dict"]
    counts = saved.get("partition_count", world)
    cut = {integer_of(n) for n in (counts if isinstance(counts, list) else [counts])}
    if cut != {world}:
        raise CheckpointError(
            f"{folder}: {world} ranks cut into {sorted(cut)} parts (MiCS, or expert parallel), "
            "which is not read"
        )
    each = world if stage_of(saved, optims[0].where) == 3 else 1
    for files, kind, expected in ((optims, "optim", world), (models, "model", each)):
        if len(files) != expected:
            raise DamagedCheckpoint(
                f"{folder}: {len(files)} files *_{kind}_states.pt, {world} ranks wrote "
                f"{expected}; zero_pp_rank_{len(files)}_mp_rank_00_{kind}_states.pt is missing"
            )
    steps = [integer_of(file.value["global_steps"]) for file in models]
    for file, step in zip(models, steps, strict=True):
        if step != steps[0]:
            raise DamagedCheckpoint(
                f"{file.where} is of step {step}, {models[0].where} of {steps[0]}: two "
                "checkpoints are mixed"
            )


def _find_folder(folder: Path, tag: str | None) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    entries = {entry.name: entry for entry in Files().list(folder)}
    if tag is None and any(_MODEL.fullmatch(name) for name in entries):
        return folder
    if tag is None:
        if "latest" not in entries:
            raise CheckpointError(
                f"{folder}: expected a folder that DeepSpeed saved to: neither 'latest' nor "
                "*_model_states.pt files are in it. Give the tag, or its folder"
            )
        tag = read_text(Files(), folder / "latest", _MAX_TAG_BYTES).strip()
    if not is_plain_name(tag):
        raise CheckpointError(f"{folder}: tag {tag!r:.80} is no plain name of a folder in it")
    if tag not in entries or entries[tag].kind != "folder":
        raise CheckpointError(f"{folder}: there is no folder '{tag}' in it; give another tag")
    return folder / tag


def _list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the optimizer's and the model's files in rank order."""
    names = [entry.name for entry in Files().list(folder)]
    if others := [name for name in names if _OTHERS.fullmatch(name)]:
        raise CheckpointError(
            f"{folder / others[0]}: of pipeline or expert parallel training, which is not read"
        )
    lists: list[list[Path]] = []
    for pattern, kind in ((_OPTIM, "optim"), (_MODEL, "model")):
        found = [(match, name) for name in names if (match := pattern.fullmatch(name))]
        if more := [name for match, name in found if int(match[2])]:
            raise CheckpointError(
                f"{folder / more[0]}: of tensor parallel training, which is not read"
            )
        by_rank = {int(match[1] or 0): name for match, name in found}
        if len(by_rank) != len(found):
            raise DamagedCheckpoint(f"{folder}: several files *_{kind}_states.pt of one rank")
        if kind == "optim" and not found and UNIVERSAL in names:
            lists.append([])
            continue
        missing = sorted(set(range(max(by_rank, default=0) + 1)) - set(by_rank))
        if missing:
            raise DamagedCheckpoint(
                f"{folder}: zero_pp_rank_{missing[0]}_mp_rank_00_{kind}_states.pt is missing: that "
                "rank's file is lost, or it was saved without ZeRO, which is not read"
            )
        lists.append([folder / by_rank[rank] for rank in range(len(by_rank))])
    return lists[0], lists[1]
