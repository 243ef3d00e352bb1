"""A DeepSpeed ZeRO checkpoint of stages 1 to 3 as a source, without DeepSpeed.

`torch_file` reads the files, so objects that DeepSpeed pickles beside tensors (its loss scaler, the
stage, addresses of fragments) are described and never made. The fp32 master weights are read, not
their 16-bit copies. Tensors that the optimizer does not update come from the model's file: frozen
parameters, buffers.

Note [The layout of ZeRO's files]
The fp32 weights and the optimizer's states of one group of parameters are in flat tensors, *flats*,
one or more per rank and group.

- Stages 1 and 2 concatenate the parameters of the group and cut the whole into equal parts, so
  several ranks may share a parameter. Each rank says in ``param_slice_mappings`` which elements of
  its flat are which parameter's. The padding that makes the parts equal is cut off the weights, but
  stays in the states.
- Stage 3 cuts each parameter by itself: rank r has elements [r * c, (r + 1) * c) of it, c = numel /
  ranks, rounded up; the last part is padded with zeros. A group is divided into sub-groups of
  whole parameters, each with one flat.

In both, the n-th flat has the n-th of ``param_shapes`` and the n-th state of the optimizer, as if
flats were the parameters.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import dtype_name
from shardwise.checkpoint.files import Files, read_text
from shardwise.checkpoint.source import Kind, OptimizerInfo, TensorInfo
from shardwise.convert.pieces import Piece, PieceSource, explained, flat_piece
from shardwise.convert.torch_file import StoredTensor, TorchFile, is_plain_name, sizes_of
from shardwise.convert.unpickle import Builder, Made, Name, expect
from shardwise.errors import CheckpointError, DamagedCheckpoint

_WRITER = "DeepSpeed"
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OTHERS = re.compile(
    r"layer_\d+.*_states\.pt|.*expert_\d+.*_states\.pt|expp_rank_.*"
    r"|.*mp_rank_0*[1-9]\d*_(optim|model)_states\.pt"
)
_MAX_TAG_BYTES = 4096
# DeepSpeed's own keys in the model's file; the rest is the user's `client_state`.
_OWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "data_sampler", "random_ltd"),
        *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "num_experts", "ds_autoep_layers", "universal_checkpoint_info"),
    )
)
# Classes that DeepSpeed pickles; they are described, never made.
_NAMES: Mapping[str, Builder | None] = dict.fromkeys(
    (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
)
Shapes = Mapping[str, tuple[int, ...]]


def open_deepspeed(folder: Path, tag: str | None = None) -> PieceSource:
    """Open what ``save_checkpoint(folder, tag)`` wrote; without a tag, the one ``latest`` names.

    ``folder`` may also be the tag's own folder.

    **Cost** the tables of all ranks' files; the only tensors read are the step counts.

    **Raises** CheckpointError when it is no such folder, names classes that it must not, or is of
    tensor, pipeline or expert parallel training; DamagedCheckpoint when a rank's file is missing,
    cut short, or of another step.
    """
    with explained(str(folder), _WRITER):
        home = _find_folder(folder, tag)
        optims, models = _list_files(home)
        files = [TorchFile(path, _NAMES, any_name=True) for path in models]
        shapes = [_shapes_of(of_flat) for of_flat in files[0].value["param_shapes"]]
        states = [TorchFile(path, _NAMES) for path in optims]
        _check_ranks(home, files, states)
        return _source(home, files, _read_partitions(states, shapes))


def _source(home: Path, models: Sequence[TorchFile], trained: "_Trained") -> PieceSource:
    """Add what the model's files hold: frozen parameters, buffers, values."""
    model, state = models[0], models[0].value
    tied = {expect(str, k): expect(str, v) for k, v in (state.get("shared_params") or {}).items()}
    index = trained.index
    if trained.stage == 3:
        for name, shape in _shapes_of(state.get("frozen_param_shapes") or {}).items():
            fragments = [(file, file.value["frozen_param_fragments"][name]) for file in models]
            index |= _frozen(name, shape, fragments)
    known = {info.name for info in index} | tied.keys()
    buffers = {expect(str, name) for name in state.get("buffer_names") or ()}
    module = state.get("module") or {}
    for name, stored in module.items():
        if isinstance(stored, Made | Name):
            what = stored.name if isinstance(stored, Made) else stored.text
            raise CheckpointError(
                f"{model.where}: '{name}' of the model is a {what}, which is not read"
            )
        if name in known or not isinstance(stored, StoredTensor):
            continue
        if trained.stage == 3 and not stored.numel and name not in buffers:
            raise DamagedCheckpoint(f"{model.where}: no rank has elements of '{name}'")
        info = TensorInfo(
            "buffer" if name in buffers else "param", name, stored.dtype, stored.shape
        )
        index[info] = [_part(model, stored, 0, stored.numel)]
    names = {info.name for info in index}
    if lost := [name for name, target in tied.items() if target not in names]:
        raise DamagedCheckpoint(f"{model.where}: what '{lost[0]}' shares is not there")
    own = {k: v for k, v in state.items() if k not in _OWN}
    if own.get("lr_scheduler") is None:
        own.pop("lr_scheduler", None)
    left_out: list[str] = []
    extra = model.plain(own, "client_state", left_out)
    extra |= model.plain(
        {k: v for k, v in module.items() if not isinstance(v, StoredTensor)}, "module"
    )
    optimizer = OptimizerInfo(_optimizer_name(state), tuple(trained.groups), trained.values)
    step = expect(int, state["global_steps"])
    return PieceSource(str(home), index, step, optimizer, extra, tied, left_out)


def _part(file: TorchFile, stored: StoredTensor, lo: int, hi: int, start: int = 0) -> Piece:
    """Return elements [lo, hi) of a tensor, which are those of ``stored`` from ``start`` on."""
    return flat_piece(lo, hi, lambda a, b: file.read(stored, start + a, start + b))


def _frozen(
    name: str, shape: tuple[int, ...], fragments: Sequence[tuple[TorchFile, StoredTensor]]
) -> dict[TensorInfo, list[Piece]]:
    """Return a frozen parameter of stage 3, which cuts it as well."""
    pieces, share = [], -(-prod(shape) // len(fragments))
    for rank, (file, stored) in enumerate(fragments):
        lo, hi = (min((rank + n) * share, prod(shape)) for n in (0, 1))
        if stored.numel < hi - lo:
            raise DamagedCheckpoint(
                f"{file.where}: '{name}' has {stored.numel} elements, expected {hi - lo}"
            )
        pieces.append(_part(file, stored, lo, hi))
    return {TensorInfo("param", name, stored.dtype, shape): pieces}


def _optimizer_name(state: Mapping[str, object]) -> str:
    """Return torch's name of the optimizer in DeepSpeed's config, or "".

    Its "Adam" decays weights as AdamW does, unless ``adam_w_mode`` is off.
    """
    match state.get("ds_config"):
        case {"optimizer": {"type": str(name), "params": {"adam_w_mode": False}}}:
            return "Adam" if name.lower() == "adam" else name
        case {"optimizer": {"type": str(name)}}:
            return "AdamW" if name.lower() in ("adam", "adamw") else name
    return ""


def _check_ranks(folder: Path, models: Sequence[TorchFile], optims: Sequence[TorchFile]) -> None:
    """Check that the files agree on the number of ranks and on the step."""
    world = expect(int, models[0].value["dp_world_size"])
    saved = optims[0].value["optimizer_state_dict"]
    counts = saved.get("partition_count", world)
    cut = {expect(int, n) for n in (counts if isinstance(counts, list) else [counts])}
    if cut != {world}:
        raise CheckpointError(
            f"{folder}: {world} ranks cut into {sorted(cut)} parts (MiCS, or expert parallel), "
            "which is not read"
        )
    each = world if _stage_of(saved, optims[0].where) == 3 else 1
    for files, kind, expected in ((optims, "optim", world), (models, "model", each)):
        if len(files) != expected:
            raise DamagedCheckpoint(
                f"{folder}: {len(files)} files *_{kind}_states.pt, {world} ranks wrote "
                f"{expected}; zero_pp_rank_{len(files)}_mp_rank_00_{kind}_states.pt is missing"
            )
    _check_steps({file.where: expect(int, file.value["global_steps"]) for file in models})


def _check_steps(steps: Mapping[str, float | None]) -> None:
    (first, step), *others = steps.items()
    for where, other in others:
        if other != step:
            raise DamagedCheckpoint(
                f"{where} is of step {other}, {first} of {step}: two checkpoints are mixed"
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
            f"{folder / others[0]}: of tensor, pipeline or expert parallelism, which is not read"
        )
    lists: list[list[Path]] = []
    for pattern, kind in ((_OPTIM, "optim"), (_MODEL, "model")):
        matches = [match for name in names if (match := pattern.fullmatch(name)) is not None]
        by_rank = {int(match[1] or 0): folder / match[0] for match in matches}
        if len(by_rank) < len(matches):
            raise DamagedCheckpoint(f"{folder}: several files *_{kind}_states.pt of one rank")
        if missing := sorted({*range(max(by_rank, default=0) + 1)} - by_rank.keys()):
            raise DamagedCheckpoint(
                f"{folder}: zero_pp_rank_{missing[0]}_mp_rank_00_{kind}_states.pt is missing: that "
                "rank's file is lost, or it was saved without ZeRO, or converted to a universal "
                "checkpoint: import the checkpoint that was converted"
            )
        lists.append([by_rank[rank] for rank in sorted(by_rank)])
    return lists[0], lists[1]


# -- the optimizer's state
@dataclass(frozen=True, slots=True)
class _Flat:
    """One flat of one rank: tensors by state ("" is the weights), and values for all elements."""

    file: TorchFile
    tensors: Mapping[str, StoredTensor]
    common: Mapping[str, Any] = field(default_factory=dict)


_Part = tuple[int, int, _Flat, int]  # elements [lo, hi) of a parameter: those of a flat from here


@dataclass
class _Trained:
    """The optimizer's groups, the tensors that it updates, and values of whole tensors."""

    stage: int
    groups: list[dict[str, object]] = field(default_factory=list)
    index: dict[TensorInfo, list[Piece]] = field(default_factory=dict)
    values: dict[str, dict[str, object]] = field(default_factory=dict)

    def add_scalar(self, name: str, key: str, value: object, file: TorchFile) -> None:
        """Add a state that holds for a whole parameter: a tensor of one element, or a value."""
        if key == "step" and isinstance(value, int | float | torch.Tensor):
            value = torch.tensor(float(value))  # as torch's own AdamW keeps it
        if isinstance(value, torch.Tensor):
            dtype = dtype_name(value.dtype, f"{file.where}, state '{key}'")
            one = value.reshape(1)
            info = TensorInfo("optimizer", name, dtype, (), key)
            self.index[info] = [flat_piece(0, 1, lambda lo, hi: one[lo:hi].clone())]
        else:
            self.values.setdefault(name, {})[key] = value


def _read_partitions(files: Sequence[TorchFile], shapes: Sequence[Shapes]) -> _Trained:
    """Combine the ranks' files of the optimizer, in rank order.

    **Raises** DamagedCheckpoint when they are of two checkpoints, or elements are missing.
    """
    stages = [_stage_of(file.value["optimizer_state_dict"], file.where) for file in files]
    if len(set(stages)) > 1:
        raise DamagedCheckpoint(f"{files[0].where} and others: stages {stages} are mixed")
    trained = _Trained(stages[0])
    ranks = [_read_flats(file, trained.stage) for file in files]
    counts = {len(flats) for flats in ranks} | {len(shapes)}
    if len(counts) > 1:
        raise DamagedCheckpoint(
            f"{files[0].where} and those of the other ranks have {sorted(counts)} parts each"
        )
    for group in _inner(files[0], trained.stage)["param_groups"]:
        options = {k: v for k, v in group.items() if k not in ("params", "step")}
        names = [name for number in group["params"] for name in shapes[expect(int, number)]]
        trained.groups.append({**files[0].plain(options, "param_groups"), "params": names})
    for number, of_number in enumerate(shapes):
        flats = [flats[number] for flats in ranks]
        _check_steps({f.file.where: f.common.get("step") for f in flats})
        cut = _cut_params if trained.stage == 3 else _cut_groups
        for name, parts in cut(flats, number, of_number):
            trained.index.update(_tensors_of(name, of_number[name], flats[0], parts))
            for key, value in flats[0].common.items():
                trained.add_scalar(name, key, value, flats[0].file)
    return trained


def _read_flats(file: TorchFile, stage: int) -> list[_Flat]:
    """Return the flats of one rank's file by their numbers."""
    masters = file.value["optimizer_state_dict"][
        "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    ]
    states = _inner(file, stage)["state"]
    flats: dict[int, _Flat] = {}
    for group in _inner(file, stage)["param_groups"]:
        for number in (expect(int, n) for n in group["params"]):
            state = dict(states.get(number, {}))
            if "step" in group:  # some of DeepSpeed's own optimizers count there
                state.setdefault("step", group["step"])
            tensors, common = {"": expect(StoredTensor, masters[number])}, {}
            for key, value in state.items():
                if isinstance(value, StoredTensor) and value.shape:
                    tensors[expect(str, key)] = value
                else:
                    common[expect(str, key)] = file.plain(value, "the optimizer's state")
            flats[number] = _Flat(file, tensors, common)
    if sorted(flats) != list(range(len(masters))):
        raise ValueError("flats that are in no group")
    return [flats[number] for number in range(len(masters))]


def _inner(file: TorchFile, stage: int) -> dict[str, Any]:
    saved = file.value["optimizer_state_dict"]
    inner = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    if not isinstance(inner, dict):
        raise DamagedCheckpoint(
            f"{file.where}: written with DeepSpeed's 'elastic_checkpoint', which is not read; save "
            "it again without"
        )
    return inner


def _cut_groups(
    flats: Sequence[_Flat], number: int, shapes: Shapes
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield the parts of each parameter of a group, as stages 1 and 2 cut it."""
    found: dict[str, list[_Part]] = {name: [] for name in shapes}
    for flat in flats:
        slices = flat.file.value["optimizer_state_dict"]["param_slice_mappings"][number]
        for name, address in slices.items():
            made = expect(Made, address)
            start, numel = sizes_of((made.field("start"), made.field("numel")))
            if start + numel > flat.tensors[""].numel:
                raise DamagedCheckpoint(
                    f"{flat.file.where}: '{name}' should end at element {start + numel} of a part "
                    f"of {flat.tensors[''].numel}"
                )
            lo = found[name][-1][1] if found[name] else 0
            found[name].append((lo, lo + numel, flat, start))
    for name, parts in found.items():
        covered = parts[-1][1] if parts else 0
        if covered != prod(shapes[name]):
            raise DamagedCheckpoint(
                f"{flats[0].file.where} and those of the other ranks have {covered} elements of "
                f"'{name}'; its shape {shapes[name]} has {prod(shapes[name])}"
            )
        yield name, parts


def _cut_params(
    flats: Sequence[_Flat], number: int, shapes: Shapes
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield the parts of each parameter of a sub-group, as stage 3 cuts it."""
    shares = {name: -(-prod(shape) // len(flats)) for name, shape in shapes.items()}
    for flat in flats:
        numel = flat.tensors[""].numel
        if numel != sum(shares.values()):
            raise DamagedCheckpoint(
                f"{flat.file.where}: part {number} has {numel} elements; one {len(flats)}th "
                f"of its parameters has {sum(shares.values())}"
            )
    start = 0
    for name, share in shares.items():
        bounds = [min(rank * share, prod(shapes[name])) for rank in range(len(flats) + 1)]
        pairs = zip(bounds, bounds[1:], flats, strict=False)
        yield name, [(lo, hi, flat, start) for lo, hi, flat in pairs]
        start += share


def _tensors_of(
    name: str, shape: tuple[int, ...], first: _Flat, parts: list[_Part]
) -> Iterator[tuple[TensorInfo, list[Piece]]]:
    """Yield a parameter, and each state that the optimizer has of its elements, with its pieces."""
    for key, example in first.tensors.items():
        pieces = []
        for lo, hi, flat, start in parts:
            stored = flat.tensors.get(key)
            has = stored is not None and stored.numel >= flat.tensors[""].numel
            if stored is None or stored.dtype != example.dtype or not has:
                raise DamagedCheckpoint(
                    f"{flat.file.where}: elements [{lo}, {hi}) of '{name}' ({key or 'weights'}) "
                    f"are not there as in {first.file.where}"
                )
            pieces.append(_part(flat.file, stored, lo, hi, start))
        kind: Kind = "optimizer" if key else "param"
        yield TensorInfo(kind, name, example.dtype, shape, key), pieces


def _shapes_of(value: Any) -> dict[str, tuple[int, ...]]:
    return {expect(str, name): sizes_of(shape) for name, shape in value.items()}


def _stage_of(saved: Mapping[str, object], where: str) -> int:
    """Return the ZeRO stage that an optimizer's file says."""
    found = saved.get("zero_stage", 1)  # its optimizer for bf16 without ZeRO 2 does not say it
    stage = expect(int, found.args[0] if isinstance(found, Made) else found)
    if stage not in (1, 2, 3):
        raise DamagedCheckpoint(f"{where}: ZeRO stage {stage}, expected 1, 2 or 3")
    return stage
