"""Settings that people already have: a DeepSpeed JSON or an accelerate YAML, for a plan or a run.

Every key of ``foreign_keys`` has an effect, or is listed with the reason why it has none. One that
is not there is an error that names the nearest key.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.interop.deepspeed.blocks import read_zero, stage_of
from shardwise.interop.deepspeed.homes import Homes, offload_keys
from shardwise.interop.deepspeed.precisions import read_precision
from shardwise.interop.deepspeed.reading import Handler, Reader
from shardwise.interop.deepspeed.report import Report
from shardwise.interop.deepspeed.settings import BATCH_KEYS
from shardwise.interop.deepspeed.train_keys import read_train_keys
from shardwise.interop.foreign_keys import (
    ACCELERATE,
    ACCELERATE_DEEPSPEED,
    DEEPSPEED,
    FSDP,
    NOT_BESIDE_A_FILE,
    PARALLELISM,
    load_json,
    load_keys,
)
from shardwise.keys import near_miss

_MOST = 1 << 40  # of windows or micro-batches; what is beyond is a slip
_MOST_MICRO_BATCH = 10**6
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
_DISTRIBUTED = {"DEEPSPEED": 2, "FSDP": 3, "MULTI_GPU": 0, "MULTI_CPU": 0, "NO": 0}
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
_STRATEGIES["HYBRID_SHARD_ZERO2"] = 2
_STRATEGIES |= {str(i + 1): s for i, s in enumerate(_STRATEGIES.values())}
_BECOMES = {
    "num_processes": "ranks",
    "mixed_precision": "precision",
    "distributed_type": "stage, where no block says it",
    "gradient_accumulation_steps": "accumulation",
    "fsdp_sharding_strategy": "stage",
    "fsdp_reshard_after_forward": "stage",
    "fsdp_transformer_layer_cls_to_wrap": "units; the decoder of `shardwise train` has others: "
    "leave them out there",
    "fsdp_offload_params": "offload",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "zero_stage": "stage",
    "deepspeed_config_file": "its own lines are below",
    "gradient_clipping": "grad_clip",
    "parallelism_config_dp_replicate_size": "dp_replicate",
    "parallelism_config_dp_shard_size": "ranks over replicas",
}


@dataclass(frozen=True)
class ForeignSettings:
    """What a file says, in the names of ``Candidate`` and of the command; and what it leaves out.

    ``values`` may hold ``stage``, ``precision``, ``micro_batch``, ``accumulation``,
    ``global_batch``, ``optimizer``, ``offload``, ``prefetch_bytes``, ``units``, ``ranks``,
    ``dp_replicate``, ``activation_checkpointing``, ``grad_clip``. ``report`` has every key.
    """

    path: Path
    values: Mapping[str, Any]
    report: Report

    @property
    def ignored(self) -> dict[str, str]:
        """The reason for each key without effect."""
        without = (x for x in self.report.lines if x.fate in ("ignored", "auto"))
        return {line.key: line.text for line in without}


def read_deepspeed(path: Path) -> ForeignSettings:
    """Read a DeepSpeed JSON for a plan. **Raises** ConfigError naming the key and the nearest."""
    reader, values = Reader(str(path), plans=True), dict[str, Any]()
    _read_deepspeed(reader, load_json(path), values)
    return ForeignSettings(path, values, reader.report())


def read_accelerate(path: Path, *, plans: bool = True) -> ForeignSettings:
    """Read an accelerate YAML for a plan or a run, and the DeepSpeed JSON that it may name."""
    return _Accelerate(path, plans).read()


def read_accelerate_keys(path: Path, ranks: int | None = None) -> tuple[dict[str, Any], Report]:
    """Read accelerate's YAML as keys of `shardwise train`; it may name a DeepSpeed JSON.

    ``ranks`` stands for ``num_processes`` where the file has none.

    **Raises** ConfigError naming file and key.
    """
    found = read_accelerate(path, plans=False)
    values, lines = dict(found.values), found.report.lines
    ranks = values.get("ranks", ranks)
    file = values.pop("file", None)
    if file is not None:
        known: dict[str, Any] = {
            name: values[name] for name in ("precision", "accumulation") if name in values
        }
        keys, inner = read_train_keys(file, known, {}, ranks)
        keys = {**known, **keys}  # what the JSON leaves open is as this file says
        lines += inner.lines
    else:
        names = ("stage", "precision", "accumulation", "units", "dp_replicate", "grad_clip")
        keys = {name: values[name] for name in names if name in values}
        if "offload" in values:
            keys["offload"] = offload_keys(values["offload"])
    if "activation_checkpointing" in values:
        keys["activation_checkpointing"] = values["activation_checkpointing"] == "full"
    if "units" in keys:
        keys["units"] = list(keys["units"])
    if ranks is not None:
        keys["ranks"] = ranks
    return keys, Report(str(path), lines)


def _count(reader: Reader, values: dict[str, Any], ours: str) -> Handler:
    """Return what stores a positive whole number under a name of ours."""

    def store(name: str, value: Any) -> None:
        most = _MOST_MICRO_BATCH if ours == "micro_batch" else _MOST
        plain = int(value) if isinstance(value, str) and value.isdecimal() else value
        number = reader.integer(name, plain, least=1, most=most)
        if values.setdefault(ours, number) != number:
            raise reader.refusal(
                name,
                f"got {value!r} here and {values[ours]} in another place; leave one of them out",
            )
        reader.mapped(name, value, _BECOMES.get(name.rpartition(".")[2], ours))

    return store


def _read_deepspeed(reader: Reader, content: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Read what a plan asks of a DeepSpeed file into ``values``, which may have a precision."""
    precision = read_precision(reader, content, values.get("precision")).name
    if precision is not None:
        values["precision"] = precision
    if content.get("zero_optimization") is None:
        values["stage"] = 0

    def kind(name: str, block: Any) -> None:
        found = reader.word(f"{name}.type", reader.mapping(name, block).get("type"))
        values["optimizer"] = found.lower()

    handlers: dict[str, Handler] = {
        **{theirs: _count(reader, values, ours) for theirs, ours in BATCH_KEYS.items()},
        "optimizer": kind,
        "zero_optimization": lambda name, block: values.update(
            read_zero(reader, block, values.get("precision"))
        ),
    }
    rest = {k: v for k, v in content.items() if k not in ("fp16", "bf16", "bfloat16")}
    reader.walk(rest, "", DEEPSPEED, handlers)


class _Accelerate:
    """An accelerate file being read; what it says is in ``values``."""

    def __init__(self, path: Path, plans: bool) -> None:
        self.path = path
        self.reader = Reader(str(path), plans=plans)
        self.values: dict[str, Any] = {}
        self.inner: tuple[Any, ...] = ()  # what became of the keys of a DeepSpeed file

    def read(self) -> ForeignSettings:
        content, reader = load_keys(self.path), self.reader
        handlers: dict[str, Handler] = {
            "num_processes": _count(reader, self.values, "ranks"),
            "num_machines": self._nodes,
            "mixed_precision": self._precision,
            "distributed_type": self._distributed,
            "gradient_accumulation_steps": _count(reader, self.values, "accumulation"),
            "fsdp_config": self._fsdp,
            "deepspeed_config": self._deepspeed,
            "parallelism_config": self._parallelism,
        }
        ordered = sorted(content.items(), key=lambda item: item[0].endswith("_config"))
        reader.walk(dict(ordered), "", ACCELERATE, handlers, _BECOMES)
        if self.values.pop("nodes", None) is not None:
            why = "the devices of a node are given by --gpus-per-node"
            why = why if reader.plans else "launching is torchrun's"
            reader.ignored("num_machines", content["num_machines"], why)
        elif "dp_replicate" in self.values and content.get("num_machines") is not None:
            what = "replicas, where shards are hybrid"
            reader.mapped("num_machines", content["num_machines"], what)
        report = reader.report()
        report = Report(report.source, (*report.lines, *self.inner))
        return ForeignSettings(self.path, self.values, report)

    def _take(self, name: str, value: Any, **found: Any) -> None:
        self.values.update(found)
        self.reader.mapped(name, value, _BECOMES[name.rpartition(".")[2]])

    def _flag(self, name: str, value: Any) -> bool:
        """Return true or false; accelerate takes both as text too."""
        said = {"true": True, "false": False}.get(str(value).lower())
        if said is None:
            why = f"got {value!r}, which is not a value that this key can have"
            raise self.reader.refusal(name, why)
        return said

    def _choice(self, name: str, word: str, choices: Mapping[str, Any], value: Any) -> Any:
        if word not in choices:
            hint = near_miss(word, choices)
            why = f"expected one of {', '.join(choices)}, got {value!r}{hint}"
            raise self.reader.refusal(name, why)
        return choices[word]

    def _nodes(self, name: str, value: Any) -> None:
        silent = Reader(self.reader.source)
        _count(silent, self.values, "nodes")(name, value)  # what it became is known at the end

    def _precision(self, name: str, value: Any) -> None:
        word = "no" if value is False else str(value).lower()  # YAML reads an unquoted `no` so
        if word == "fp8" and not self.reader.plans:
            raise self.reader.refusal(name, "fp8 is not supported; use bf16")
        if word not in _PRECISIONS:
            raise self.reader.refusal(name, f"expected no, bf16, fp16 or fp8, got {value!r}")
        self._take(name, value, precision=_PRECISIONS[word])

    def _distributed(self, name: str, value: Any) -> None:
        word = "NO" if value is False else str(value).upper()
        stage = self._choice(name, word, _DISTRIBUTED, value)
        self._take(name, value, stage=self.values.get("stage", stage))

    def _fsdp(self, block_name: str, block: Any) -> None:
        values = self.values

        def reshard(name: str, value: Any) -> None:
            word, stages = str(value).upper(), {**_STRATEGIES, "TRUE": 3, "FALSE": 2}
            if word not in stages:
                self._choice(name, word, _STRATEGIES, value)
            self._take(name, value, stage=stages[word])
            if word in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
                if "nodes" in values:
                    values["dp_replicate"] = values.pop("nodes")
                elif self.reader.plans:
                    why = "num_machines is not given; give the number of nodes by --dp-replicate"
                    self.reader.ignored(f"{block_name}.HYBRID_SHARD", None, why)

        def units(name: str, value: Any) -> None:
            self._take(name, value, units=tuple(one.strip() for one in str(value).split(",")))

        def offload(name: str, value: Any) -> None:
            if self._flag(name, value):
                values["offload"] = "cpu"
            self._take(name, value)

        def checkpointing(name: str, value: Any) -> None:
            chosen = "full" if self._flag(name, value) else "none"
            self._take(name, value, activation_checkpointing=chosen)

        handlers = {
            "fsdp_sharding_strategy": reshard,
            "fsdp_reshard_after_forward": reshard,
            "fsdp_transformer_layer_cls_to_wrap": units,
            "fsdp_offload_params": offload,
            "fsdp_activation_checkpointing": checkpointing,
        }
        self.reader.walk(block, f"{block_name}.", FSDP, handlers, _BECOMES)

    def _deepspeed(self, block_name: str, block: Any) -> None:
        reader, values, homes = self.reader, self.values, Homes(self.reader)
        block = reader.mapping(block_name, block)
        file = block.get("deepspeed_config_file")
        beside = [k for k in NOT_BESIDE_A_FILE if block.get(k) is not None]
        if file is not None and beside:
            raise reader.refusal(
                f"{block_name}.{beside[0]}",
                f"{file} decides it, and accelerate refuses both; say it there and leave it out "
                "here",
            )

        def clip(name: str, value: Any) -> None:
            self._take(name, value, grad_clip=float(reader.number(name, value, least=0)))

        handlers: dict[str, Handler] = {
            "zero_stage": lambda name, value: self._take(
                name, value, stage=stage_of(reader, name, value)
            ),
            "gradient_accumulation_steps": _count(reader, values, "accumulation"),
            "gradient_clipping": clip,
            "offload_optimizer_device": partial(homes.note_device, "optimizer"),
            "offload_param_device": partial(homes.note_device, "params"),
            "offload_optimizer_nvme_path": partial(homes.note_path, "optimizer"),
            "offload_param_nvme_path": partial(homes.note_path, "params"),
            "deepspeed_config_file": self._file,
        }
        reader.walk(block, f"{block_name}.", ACCELERATE_DEEPSPEED, handlers, _BECOMES)
        offload = homes.settle(values.get("stage"))
        if offload is not None:
            values["offload"] = offload

    def _file(self, name: str, value: Any) -> None:
        """Read the DeepSpeed file; a run reads all of it later, by `read_train_keys`."""
        path, named = self.path.parent / str(value), self.values.get("precision")
        content = load_json(path)
        for block in ("fp16", "bf16", "bfloat16"):
            kind, said = block.replace("bfloat16", "bf16"), content.get(block)
            on = said.get("enabled") if isinstance(said, Mapping) else None
            # on where another is named, or off where it is named itself
            if named is not None and on is (named != kind):
                raise self.reader.refusal(
                    "mixed_precision",
                    f"it means {named}, and the DeepSpeed file says {kind}.enabled = "
                    f"{str(on).lower()}; change one of them",
                )
        inner = Reader(str(path), plans=True)
        _read_deepspeed(inner, content, self.values)
        if self.reader.plans:
            self.inner = inner.report().lines
        else:
            self.values["file"] = path
        self._take(name, value)

    def _parallelism(self, block_name: str, block: Any) -> None:
        """Read accelerate's mesh: replicas of shard groups; its product is the number of ranks."""
        reader, sizes = self.reader, dict[str, Any]()
        name_of = f"{block_name}_{{}}_size".format
        handlers = {
            name_of("dp_replicate"): _count(reader, self.values, "dp_replicate"),
            name_of("dp_shard"): _count(reader, sizes, "shards"),
        }
        reader.walk(block, f"{block_name}.", PARALLELISM, handlers, _BECOMES)
        given = [block.get(name_of(axis)) for axis in ("tp", "cp", "sp")]
        for axis, size in zip(("tp", "cp", "sp"), given, strict=True):
            if size not in (None, 1, "auto") and not reader.plans:
                why = f"only data is parallel here; expected 1, got {size!r}"
                raise reader.refusal(f"{block_name}.{name_of(axis)}", why)
        found = (*sizes.values(), self.values.get("dp_replicate"), *given)
        product = math.prod(size for size in found if isinstance(size, int))
        ranks = self.values.get("ranks")
        if sizes and ranks is not None and product != ranks:
            why = f"expected sizes whose product is num_processes {ranks}, got {product}"
            raise reader.refusal(block_name, why)
