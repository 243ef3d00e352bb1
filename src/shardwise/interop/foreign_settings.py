"""DeepSpeed's and accelerate's files as settings of a plan; accelerate's as keys of a run.

Every key of the table has an effect, or a reason in the report. An unknown key raises.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.interop.deepspeed.blocks import (
    PRECISION_BLOCKS,
    Homes,
    offload_keys,
    read_precision,
    read_zero,
)
from shardwise.interop.deepspeed.reader import Entry, Handler, Line, Reader, Report
from shardwise.interop.deepspeed.run_keys import read_train_keys
from shardwise.interop.foreign_keys import (
    BATCH_KEYS,
    JsonMapping,
    JsonObject,
    load_json,
    load_keys,
)
from shardwise.keys import near_miss

_MOST = 1 << 40  # windows or micro-batches; more is a typing error
_MOST_MICRO_BATCH = 10**6
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
_DISTRIBUTED = {"DEEPSPEED": 2, "FSDP": 3, "MULTI_GPU": 0, "MULTI_CPU": 0, "NO": 0}
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
_STRATEGIES["HYBRID_SHARD_ZERO2"] = 2
_STRATEGIES |= {str(i + 1): s for i, s in enumerate(_STRATEGIES.values())}
_HYBRID = ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5")
# accelerate refuses these beside a `deepspeed_config_file`, which sets them.
_NOT_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
)


@dataclass(frozen=True)
class ForeignSettings:
    """The settings of a file, in the names of ``Candidate`` and of the command.

    ``values`` may hold ``stage``, ``precision``, ``micro_batch``, ``accumulation``,
    ``global_batch``, ``optimizer``, ``offload``, ``prefetch_bytes``, ``units``, ``ranks``,
    ``dp_replicate``, ``activation_checkpointing``, ``grad_clip``. ``report`` has every key.
    """

    path: Path
    values: JsonMapping
    report: Report

    @property
    def ignored(self) -> dict[str, str]:
        """The reason for each key without effect."""
        without = (x for x in self.report.lines if x.fate in ("ignored", "auto"))
        return {line.key: line.text for line in without}


def read_deepspeed(path: Path) -> ForeignSettings:
    """Read a DeepSpeed JSON for a plan. **Raises** ConfigError naming the key and the nearest."""
    reader, values = Reader(str(path), plans=True), JsonObject()
    _read_deepspeed(reader, load_json(path), values)
    return ForeignSettings(path, values, reader.report())


def read_accelerate(path: Path) -> ForeignSettings:
    """Read an accelerate YAML for a plan, and the DeepSpeed JSON that it may name."""
    return _Accelerate(path, plans=True).read()


def read_accelerate_keys(path: Path, ranks: int | None = None) -> tuple[JsonObject, Report]:
    """Read accelerate's YAML as keys of `shardwise train`; it may name a DeepSpeed JSON.

    ``ranks`` is used if the file has no ``num_processes``.

    **Raises** ConfigError naming file and key.
    """
    file = _Accelerate(path, plans=False)
    found = file.read()
    values, lines = dict(found.values), found.report.lines
    ranks = values.get("ranks", ranks)
    if file.deepspeed is not None:
        known = {k: v for k, v in values.items() if k in ("precision", "accumulation")}
        keys, inner = read_train_keys(file.deepspeed, known, {}, ranks)
        keys = {**known, **keys}  # this file fills what the JSON leaves open
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


def _count(values: JsonObject, ours: str, entry: Entry) -> None:
    """Store a positive whole number under a name of ours."""
    value = entry.value
    plain = int(value) if isinstance(value, str) and value.isdecimal() else value
    most = _MOST_MICRO_BATCH if ours == "micro_batch" else _MOST
    number = Entry(entry.reader, entry.key, plain).integer(least=1, most=most)
    if values.setdefault(ours, number) != number:
        why = f"got {value!r} here and {values[ours]} in another place; leave one of them out"
        raise entry.refusal(why)
    entry.mapped()


def _read_deepspeed(reader: Reader, content: JsonMapping, values: JsonObject) -> None:
    """Read a plan's settings from a DeepSpeed file into ``values``, which may have a precision."""
    precision = read_precision(reader, content, values.get("precision")).name
    if precision is not None:
        values["precision"] = precision
    if content.get("zero_optimization") is None:
        values["stage"] = 0

    def optimizer(entry: Entry) -> None:
        kind = reader.entry(f"{entry.key}.type", entry.mapping().get("type"))
        values["optimizer"] = kind.word().lower()

    handlers: dict[str, Handler] = {
        **{theirs: partial(_count, values, ours) for theirs, ours in BATCH_KEYS.items()},
        "optimizer": optimizer,
        "zero_optimization": lambda e: values.update(read_zero(e, values.get("precision"))),
    }
    rest = {k: v for k, v in content.items() if k not in PRECISION_BLOCKS}
    reader.entry("", rest).walk("top", handlers)


class _Accelerate:
    """An accelerate file while it is read, into ``values``."""

    def __init__(self, path: Path, plans: bool) -> None:
        self.path = path
        self.reader = Reader(str(path), plans=plans)
        self.values: JsonObject = {}
        self.deepspeed: Path | None = None  # the file that it names
        self._nodes: int | None = None  # until HYBRID_SHARD uses them
        self._deepspeed_lines: tuple[Line, ...] = ()

    def read(self) -> ForeignSettings:
        """Read the file, its blocks last."""
        content, reader = load_keys(self.path), self.reader
        handlers: dict[str, Handler] = {
            "num_processes": partial(_count, self.values, "ranks"),
            "num_machines": self._read_nodes,
            "mixed_precision": self._precision,
            "distributed_type": self._distributed,
            "gradient_accumulation_steps": partial(_count, self.values, "accumulation"),
            "fsdp_config": self._fsdp,
            "deepspeed_config": self._deepspeed,
            "parallelism_config": self._parallelism,
        }
        ordered = sorted(content.items(), key=lambda item: item[0].endswith("_config"))
        reader.entry("", dict(ordered)).walk("accelerate", handlers)
        nodes = reader.entry("num_machines", content.get("num_machines"))
        if self._nodes is not None:
            by_flag = "the devices of a node are given by --gpus-per-node"
            nodes.ignored(by_flag if reader.plans else "launching is torchrun's")
        elif "dp_replicate" in self.values and nodes.value is not None:
            nodes.mapped("replicas, if shards are hybrid")
        report = reader.report()
        report = Report(report.source, (*report.lines, *self._deepspeed_lines))
        return ForeignSettings(self.path, self.values, report)

    def _take(self, entry: Entry, **found: Any) -> None:
        self.values.update(found)
        entry.mapped()

    def _read_nodes(self, entry: Entry) -> None:
        found: JsonObject = {}
        unreported = Reader(self.reader.source)  # `read` reports on it at the end
        _count(found, "nodes", Entry(unreported, entry.key, entry.value))
        self._nodes = found["nodes"]

    def _precision(self, entry: Entry) -> None:
        word = "no" if entry.value is False else str(entry.value).lower()  # YAML's unquoted `no`
        if word == "fp8" and not self.reader.plans:
            raise entry.refusal("fp8 is not supported; use bf16")
        if word not in _PRECISIONS:
            raise entry.refusal(f"expected no, bf16, fp16 or fp8, got {entry.value!r}")
        self._take(entry, precision=_PRECISIONS[word])

    def _distributed(self, entry: Entry) -> None:
        word = "NO" if entry.value is False else str(entry.value).upper()
        stage = _choice(entry, word, _DISTRIBUTED)
        self._take(entry, stage=self.values.get("stage", stage))

    def _fsdp(self, block: Entry) -> None:
        values = self.values

        def reshard(entry: Entry) -> None:
            word = str(entry.value).upper()
            stage = {"TRUE": 3, "FALSE": 2}.get(word)
            self._take(entry, stage=_choice(entry, word, _STRATEGIES) if stage is None else stage)
            if word in _HYBRID and self._nodes is not None:
                values["dp_replicate"], self._nodes = self._nodes, None
            elif word in _HYBRID and self.reader.plans:
                why = "num_machines is not given; give the number of nodes by --dp-replicate"
                self.reader.add("ignored", f"{block.key}.HYBRID_SHARD", None, why)

        def units(entry: Entry) -> None:
            names = str(entry.value).split(",")
            self._take(entry, units=tuple(name.strip() for name in names))

        def offload(entry: Entry) -> None:
            self._take(entry, **({"offload": "cpu"} if _flag(entry) else {}))

        def checkpointing(entry: Entry) -> None:
            self._take(entry, activation_checkpointing="full" if _flag(entry) else "none")

        handlers: dict[str, Handler] = {
            "fsdp_sharding_strategy": reshard,
            "fsdp_reshard_after_forward": reshard,
            "fsdp_transformer_layer_cls_to_wrap": units,
            "fsdp_offload_params": offload,
            "fsdp_activation_checkpointing": checkpointing,
        }
        block.walk("accelerate.fsdp_config", handlers)

    def _deepspeed(self, entry: Entry) -> None:
        values, homes, block = self.values, Homes(self.reader), entry.mapping()
        file = block.get("deepspeed_config_file")
        beside = [name for name in _NOT_BESIDE_A_FILE if block.get(name) is not None]
        if file is not None and beside:
            raise self.reader.refusal(
                f"{entry.key}.{beside[0]}",
                f"{file} decides it, and accelerate refuses both; say it there and leave it out "
                "here",
            )
        handlers: dict[str, Handler] = {
            "zero_stage": lambda e: self._take(e, stage=e.stage()),
            "gradient_accumulation_steps": partial(_count, values, "accumulation"),
            "gradient_clipping": lambda e: self._take(e, grad_clip=float(e.number(least=0))),
            "offload_optimizer_device": partial(homes.note_device, "optimizer"),
            "offload_param_device": partial(homes.note_device, "params"),
            "offload_optimizer_nvme_path": partial(homes.note_path, "optimizer"),
            "offload_param_nvme_path": partial(homes.note_path, "params"),
            "deepspeed_config_file": self._file,
        }
        entry.walk("accelerate.deepspeed_config", handlers)
        offload = homes.settle(values.get("stage"))
        if offload is not None:
            values["offload"] = offload

    def _file(self, entry: Entry) -> None:
        """Read the DeepSpeed file for a plan; for a run, `read_train_keys` reads it later."""
        path, named = self.path.parent / str(entry.value), self.values.get("precision")
        content = load_json(path)
        for block, kind in PRECISION_BLOCKS.items():
            said = content.get(block)
            is_on = said.get("enabled") if isinstance(said, Mapping) else None
            # it is on though another is named, or off though it is named itself
            if named is not None and is_on is (named != kind):
                raise self.reader.refusal(
                    "mixed_precision",
                    f"it means {named}, and the DeepSpeed file says {kind}.enabled = "
                    f"{str(is_on).lower()}; change one of them",
                )
        inner = Reader(str(path), plans=True)
        _read_deepspeed(inner, content, self.values)
        if self.reader.plans:
            self._deepspeed_lines = inner.report().lines
        self.deepspeed = path
        self._take(entry)

    def _parallelism(self, entry: Entry) -> None:
        """Read accelerate's mesh: replicas of shard groups; its product is the number of ranks."""
        sizes = JsonObject()
        name_of = f"{entry.key}_{{}}_size".format
        handlers: dict[str, Handler] = {
            name_of("dp_replicate"): partial(_count, self.values, "dp_replicate"),
            name_of("dp_shard"): partial(_count, sizes, "shards"),
        }
        entry.walk("accelerate.parallelism_config", handlers)
        given = {name_of(axis): entry.value.get(name_of(axis)) for axis in ("tp", "cp", "sp")}
        for name, size in given.items():
            if size not in (None, 1, "auto") and not self.reader.plans:
                why = f"only data is parallel here; expected 1, got {size!r}"
                raise self.reader.refusal(f"{entry.key}.{name}", why)
        found = (*sizes.values(), self.values.get("dp_replicate"), *given.values())
        product = math.prod(size for size in found if isinstance(size, int))
        ranks = self.values.get("ranks")
        if sizes and ranks is not None and product != ranks:
            why = f"expected sizes whose product is num_processes {ranks}, got {product}"
            raise entry.refusal(why)


def _flag(entry: Entry) -> bool:
    """Return true or false; accelerate takes both as text too."""
    said = {"true": True, "false": False}.get(str(entry.value).lower())
    if said is None:
        raise entry.refusal(f"got {entry.value!r}, which is not a value that this key can have")
    return said


def _choice(entry: Entry, word: str, choices: Mapping[str, int]) -> int:
    if word not in choices:
        hint = near_miss(word, choices)
        raise entry.refusal(f"expected one of {', '.join(choices)}, got {entry.value!r}{hint}")
    return choices[word]
