"""Where the elements of each parameter lie in the partitions that DeepSpeed's ranks have saved.

Note [How ZeRO lays out what it saves]
The fp32 weights and the optimizer's states of one group of parameters lie in flat tensors,
*flats*, one or more per rank and group.

- Stages 1 and 2 lay all parameters of the group one after the other and cut the whole into equal
  parts, so a parameter may go over several ranks. Each rank says in ``param_slice_mappings`` which
  elements of its flat are which parameter's. What was added to make the parts equal is cut off the
  weights, but stays in the states.
- Stage 3 cuts each parameter by itself: rank r has elements [r * c, (r + 1) * c) of it, c = numel /
  ranks, rounded up; the last part is filled up with zeros. A group is divided into sub-groups of
  whole parameters, each with a flat of its own.

In both, the n-th flat has the n-th of ``param_shapes`` and the n-th state of the optimizer, as if
flats were the parameters.

Note [Universal checkpoints]
DeepSpeed's own converter makes them of ZeRO's files: a folder for each parameter, with whole
weights and states. The model's files stay as they were; ``zero/optimizer_state.pt`` has the groups
and, of stage 3, the step counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import dtype_name
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.source import Kind, TensorInfo
from shardwise.convert.foreign import is_plain_name
from shardwise.convert.torch_file import TorchFile
from shardwise.convert.torch_names import StoredTensor
from shardwise.convert.unpickle import Builder, Made
from shardwise.errors import CheckpointError, DamagedCheckpoint

# Classes that DeepSpeed pickles; they are described, never made.
NAMES: Mapping[str, Builder | None] = dict.fromkeys(
    (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
)
UNIVERSAL = "zero"  # the folder of a universal checkpoint, and in each parameter's the weights
_WEIGHTS = "fp32.pt"
MASTER = ""  # the key of a flat's weights, among those of its states


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [lo, hi) of a tensor: those of ``stored`` from ``start`` on."""

    lo: int
    hi: int
    file: TorchFile
    stored: StoredTensor
    start: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat of one rank: its weights under `MASTER`, its states, and what is common to all."""

    file: TorchFile
    tensors: Mapping[str, StoredTensor]
    common: Mapping[str, Any]

    @property
    def step(self) -> float | None:
        """The optimizer's step count, if it has made one."""
        return float(self.common["step"]) if "step" in self.common else None

    @property
    def numel(self) -> int:
        """Number of elements, padding left out where DeepSpeed leaves it out."""
        return self.tensors[MASTER].numel


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [lo, hi) of a parameter: those of ``flat`` from ``start`` on."""

    lo: int
    hi: int
    flat: Flat
    start: int


Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Trained:
    """What the optimizer updates: its groups, tensors in parts, what holds for whole tensors."""

    stage: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[TensorInfo, list[Part]] = field(default_factory=dict)
    scalars: dict[TensorInfo, torch.Tensor] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_scalar(self, name: str, key: str, value: Any, file: TorchFile) -> None:
        """Add a state that holds for a whole parameter: a tensor of one element, or a value."""
        if key == "step" and isinstance(value, int | float | torch.Tensor):
            value = torch.tensor(float(value))  # as torch's own AdamW keeps it
        if isinstance(value, torch.Tensor):
            dtype = dtype_name(value.dtype, f"{file.where}, state '{key}'")
            self.scalars[TensorInfo("optimizer", name, dtype, (), key)] = value
        else:
            self.values.setdefault(name, {})[key] = value

    def add_groups(self, file: TorchFile, groups: Any, shapes: Sequence[Shapes]) -> None:
        """Add torch's param_groups, whose ``params`` are numbers of flats."""
        for group in groups:
            options = {k: v for k, v in group.items() if k not in ("params", "step")}
            names = [name for number in group["params"] for name in shapes[integer_of(number)]]
            self.groups.append({**file.plain(options, "param_groups"), "params": names})


def read_partitions(files: Sequence[TorchFile], shapes: Sequence[Shapes]) -> Trained:
    """Put together what the ranks' files of the optimizer hold, in rank order.

    **Raises** DamagedCheckpoint when they are of two checkpoints, or elements are missing.
    """
    stages = [stage_of(file.value["optimizer_state_dict"], file.where) for file in files]
    if len(set(stages)) > 1:
        raise DamagedCheckpoint(f"{files[0].where} and others: stages {stages} are mixed")
    trained = Trained(stages[0])
    ranks = [_read_flats(file, trained.stage) for file in files]
    counts = {len(flats) for flats in ranks} | {len(shapes)}
    if len(counts) > 1:
        raise DamagedCheckpoint(
            f"{files[0].where} and those of the other ranks have {sorted(counts)} parts each"
        )
    trained.add_groups(files[0], _inner(files[0], trained.stage)["param_groups"], shapes)
    for number, of_number in enumerate(shapes):
        flats = [flats[number] for flats in ranks]
        for flat in flats:
            if flat.step != flats[0].step:
                raise DamagedCheckpoint(
                    f"{flat.file.where} is of the optimizer's step {flat.step}, "
                    f"{flats[0].file.where} of {flats[0].step}: two checkpoints are mixed"
                )
        cut = _split if trained.stage == 3 else _sliced
        for name, spans in cut(flats, number, of_number):
            trained.parts.update(_parts_of_param(name, of_number[name], flats[0], spans))
            for key, value in flats[0].common.items():
                trained.add_scalar(name, key, value, flats[0].file)
    return trained


def _read_flats(file: TorchFile, stage: int) -> list[Flat]:
    """Return the flats of one rank's file by their numbers."""
    masters = file.value["optimizer_state_dict"][
        "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    ]
    states = _inner(file, stage)["state"]
    flats: dict[int, Flat] = {}
    for group in _inner(file, stage)["param_groups"]:
        for number in map(integer_of, group["params"]):
            state = dict(states.get(number, {}))
            if "step" in group:  # where some of DeepSpeed's own optimizers count
                state.setdefault("step", group["step"])
            flats[number] = _flat(file, _stored(masters[number]), state)
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


def _sliced(flats: Sequence[Flat], number: int, shapes: Shapes) -> Iterator[tuple[str, list[Span]]]:
    found: dict[str, list[Span]] = {name: [] for name in shapes}
    for flat in flats:
        slices = flat.file.value["optimizer_state_dict"]["param_slice_mappings"][number]
        for name, address in slices.items():
            start, numel = _address(address)
            if start + numel > flat.numel:
                raise DamagedCheckpoint(
                    f"{flat.file.where}: '{name}' should end at element {start + numel} of a part "
                    f"of {flat.numel}"
                )
            lo = found[name][-1].hi if found[name] else 0
            found[name].append(Span(lo, lo + numel, flat, start))
    for name, spans in found.items():
        covered = spans[-1].hi if spans else 0
        if covered != prod(shapes[name]):
            raise DamagedCheckpoint(
                f"{flats[0].file.where} and those of the other ranks have {covered} elements of "
                f"'{name}'; its shape {shapes[name]} has {prod(shapes[name])}"
            )
        yield name, spans


def _split(flats: Sequence[Flat], number: int, shapes: Shapes) -> Iterator[tuple[str, list[Span]]]:
    shares = {name: -(-prod(shape) // len(flats)) for name, shape in shapes.items()}
    for flat in flats:
        if flat.numel != sum(shares.values()):
            raise DamagedCheckpoint(
                f"{flat.file.where}: part {number} has {flat.numel} elements; one {len(flats)}th "
                f"of its parameters has {sum(shares.values())}"
            )
    start = 0
    for name, share in shares.items():
        numel = prod(shapes[name])
        yield (
            name,
            [
                Span(min(rank * share, numel), min((rank + 1) * share, numel), flat, start)
                for rank, flat in enumerate(flats)
            ],
        )
        start += share


def _parts_of_param(
    name: str, shape: tuple[int, ...], flat: Flat, spans: Sequence[Span]
) -> Iterator[tuple[TensorInfo, list[Part]]]:
    """Yield a parameter, and each state that the optimizer has of its elements, with its parts."""
    for key, example in flat.tensors.items():
        parts = []
        for span in spans:
            stored = span.flat.tensors.get(key)
            if stored is None or stored.dtype != example.dtype or stored.numel < span.flat.numel:
                raise DamagedCheckpoint(
                    f"{span.flat.file.where}: elements [{span.lo}, {span.hi}) of '{name}' "
                    f"({key or 'weights'}) are not there as in {flat.file.where}"
                )
            parts.append(Part(span.lo, span.hi, span.flat.file, stored, span.start))
        kind: Kind = "optimizer" if key else "param"
        yield TensorInfo(kind, name, example.dtype, shape, key), parts


def read_parts(parts: Sequence[Part], out: torch.Tensor, lo: int) -> None:
    """Fill ``out`` with the elements from ``lo`` on."""
    hi = lo + out.numel()
    for part in parts:
        begin, end = max(part.lo, lo), min(part.hi, hi)
        if begin < end:
            start = part.start + begin - part.lo
            out[begin - lo : end - lo] = part.file.read(part.stored, start, start + end - begin)


def _flat(file: TorchFile, master: StoredTensor, state: Mapping[Any, Any]) -> Flat:
    tensors, common = {MASTER: master}, {}
    for key, value in state.items():
        if isinstance(value, StoredTensor) and value.shape:
            tensors[text_of(key)] = value
        else:
            common[text_of(key)] = file.plain(value, "the optimizer's state")
    return Flat(file, tensors, common)


def _address(value: Any) -> tuple[int, int]:
    if not isinstance(value, Made):
        raise ValueError("an address was expected")
    start, numel = value.field("start"), value.field("numel")
    if not all(type(n) is int and n >= 0 for n in (start, numel)):
        raise ValueError("an address without numbers")
    return start, numel


def _stored(value: Any) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        raise ValueError("a tensor was expected")
    return value


def text_of(value: Any) -> str:
    """Return a name. **Raises** ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError("a name was expected")
    return value


def integer_of(value: Any) -> int:
    """Return a number. **Raises** ValueError if it is none."""
    if type(value) is not int:
        raise ValueError("a number was expected")
    return value


def shapes_of(value: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes by name. **Raises** ValueError if they are none."""
    shapes = {text_of(name): tuple(map(integer_of, shape)) for name, shape in value.items()}
    if any(size < 0 for shape in shapes.values() for size in shape):
        raise ValueError("a shape with a negative size")
    return shapes


def stage_of(saved: Mapping[str, Any], where: str) -> int:
    """Return the ZeRO stage that an optimizer's file says."""
    found = saved.get("zero_stage", 1)  # its optimizer for bf16 without ZeRO 2 does not say it
    stage = integer_of(found.args[0] if isinstance(found, Made) else found)
    if stage not in (1, 2, 3):
        raise DamagedCheckpoint(f"{where}: ZeRO stage {stage}, expected 1, 2 or 3")
    return stage


def read_universal(folder: Path, shapes: Sequence[Shapes]) -> Trained:
    """Read the tables of all parameters' files: see Note [Universal checkpoints].

    **Raises** DamagedCheckpoint when a parameter is missing or has another size.
    """
    home = folder / UNIVERSAL
    common = TorchFile(home / "optimizer_state.pt", NAMES)
    trained = Trained(stage_of(common.value, common.where))
    trained.add_groups(common, common.value["param_groups"], shapes)
    inner = common.value.get("optimizer_state_dict") or {}
    for number, of_flat in enumerate(shapes):
        state = inner["state"].get(number, {}) if "state" in inner else {}
        for name, shape in of_flat.items():
            if not is_plain_name(name):
                raise CheckpointError(
                    f"{home}: parameter {name!r:.80} is no plain name of a folder"
                )
            if "step" in state:
                trained.add_scalar(name, "step", common.plain(state["step"], "step"), common)
            _add_param(trained, home / name, name, shape)
    return trained


def _add_param(trained: Trained, folder: Path, name: str, shape: tuple[int, ...]) -> None:
    files = [entry.name for entry in Files().list(folder)] if folder.is_dir() else []
    if _WEIGHTS not in files:
        raise DamagedCheckpoint(f"{folder / _WEIGHTS} is missing; load another checkpoint")
    for file_name in (_WEIGHTS, *(f for f in files if f.endswith(".pt") and f != _WEIGHTS)):
        file = TorchFile(folder / file_name, NAMES)
        stored: Any = file.value["param"] if isinstance(file.value, Mapping) else file.value
        key = "" if file_name == _WEIGHTS else file_name.removesuffix(".pt")
        if not isinstance(stored, StoredTensor) or (key and not stored.shape and shape):
            trained.add_scalar(name, key, file.plain(stored, key), file)
        elif stored.numel != prod(shape):
            raise DamagedCheckpoint(
                f"{file.where}: {stored.numel} elements; '{name}' of shape {shape} has "
                f"{prod(shape)}"
            )
        else:
            kind: Kind = "optimizer" if key else "param"
            info = TensorInfo(kind, name, stored.dtype, shape, key)
            trained.parts[info] = [Part(0, stored.numel, file, stored, 0)]
