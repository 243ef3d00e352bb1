"""DeepSpeed's and accelerate's files as settings of a plan, and as keys of `shardwise train`.

Every key of the table has an effect, or a reason in the report. An unknown key raises.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.offload_blocks import offload_keys, store_offload
from shardwise.interop.deepspeed.reading import (
    BETAS,
    COMPUTE_BYTES,
    PRECISION_BLOCKS,
    SIZES,
    DeepSpeedFile,
    Reading,
    TorchSchedule,
    resolve,
)
from shardwise.interop.foreign_keys import (
    Entry,
    Handler,
    JsonMapping,
    JsonObject,
    Line,
    Reader,
    Report,
    load_json,
    load_keys,
    names_of,
    shown,
    value_at,
)
from shardwise.keys import flag_of, read_options
from shardwise.precisions import plain_precision
from shardwise.train.config import TrainConfig

_OPTIMIZER = ("optimizer", "lr", "weight_decay", *BETAS, "optimizer_options")
_SAME = (*SIZES, "stage", "precision", "prefetch_bytes", "offload", "gather", "reduce")
_HYBRID = ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5")
# accelerate refuses these beside a `deepspeed_config_file`, which sets them.
_NOT_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
SourceOf = Callable[[str], str | None]

# -- for a plan


def read_deepspeed(path: Path) -> tuple[JsonObject, Report]:
    """Read a DeepSpeed JSON for a plan: settings in the names of `Candidate`, and the report.

    They may be ``stage``, ``precision``, ``micro_batch``, ``accumulation``, ``global_batch``,
    ``optimizer``, ``offload``, ``prefetch_bytes``, ``gather``, ``reduce``.

    **Raises** ConfigError naming the key and the nearest.
    """
    reading = DeepSpeedFile(load_json(path), Reader(str(path), plans=True)).read()
    return _planned(reading), reading.report


def _planned(reading: Reading) -> JsonObject:
    found = {**reading.defaults, **reading.values}
    return {name: found[name] for name in (*_SAME, "optimizer") if name in found}


def read_accelerate(path: Path) -> tuple[JsonObject, Report]:
    """Read an accelerate YAML for a plan, as `read_deepspeed`, and the JSON that it may name.

    Settings may also be ``units``, ``ranks``, ``dp_replicate``, ``activation_checkpointing``.
    """
    file = _Accelerate(path, plans=True)
    return file.values, file.report


# -- for a run


def read_train_keys(
    path: Path, known: JsonMapping, decided: JsonMapping, world_size: int | None
) -> tuple[JsonObject, Report]:
    """Read a DeepSpeed JSON as keys of `shardwise train`, with the report.

    ``known`` are keys of another file: they fill what this one leaves out or at "auto". ``decided``
    are keys that win over it (flags). A key that stays at "auto" is left out, or is "auto" in
    ``schedule_options``, so its default decides.

    **Raises** ConfigError if the file is wrong, or a run has no counterpart of a key.
    """
    both = {**known, **decided}
    named = plain_precision(both.get("precision"))
    precision = named if named in COMPUTE_BYTES else None  # `check_keys` raises for others
    reading = DeepSpeedFile(load_json(path), Reader(str(path)), precision).read()
    if "bf16_master" in reading.values:
        raise ConfigError(
            f"{path}: bf16.bf16_master_weights_and_grads: `shardwise train` keeps masters in "
            "fp32; leave it out, or use from_deepspeed() in a loop of your own"
        )
    explicit = {name: reading.values[name] for name in _OPTIMIZER if name in reading.values}
    if decided.get("optimizer", explicit.get("optimizer")) != explicit.get("optimizer"):
        explicit.pop("optimizer_options", None)
    explicit |= _read_schedule(reading, str(path), known, decided)
    explicit |= {
        name: reading.values[name] for name in (*_SAME, "grad_clip") if name in reading.values
    }
    for name in ("loss_scale", "loss_scale_window"):
        if name in reading.defaults and name in reading.values:  # it is under fp16, or may be
            explicit[name] = reading.values[name]
    all_keys = {name: v for name, v in reading.defaults.items() if name not in reading.auto}
    if "optimizer" in explicit and reading.schedule is None:
        all_keys["schedule"] = "constant"  # DeepSpeed's optimizer keeps its rate
    all_keys |= explicit
    keys = {name: v for name, v in all_keys.items() if name in explicit or name not in known}
    found = {
        name: _whole(both.get(name)) for name in SIZES if name in decided or name not in explicit
    }
    given = {name: size for name, size in found.items() if size is not None}
    sizes = resolve({**keys, **given}, world_size, str(path))
    if sizes["micro_batch"] is None and sizes["global_batch"] is not None:
        raise ConfigError(
            f"{path}: train_micro_batch_size_per_gpu: it follows from train_batch_size and the "
            "number of ranks; give --ranks"
        )
    keys |= {k: n for k, n in sizes.items() if n is not None and (k in explicit or k not in known)}
    if "offload" in keys:
        keys["offload"] = offload_keys(keys["offload"])
    return keys, reading.report


def _whole(value: object) -> int | None:
    """Return a size of a file or a flag; `check_keys` raises for what is none."""
    text = str(value)
    return int(text) if text.isdecimal() else None


def _read_schedule(
    reading: Reading, source: str, known: JsonMapping, decided: JsonMapping
) -> JsonObject:
    schedule = reading.schedule
    if schedule is None or decided.get("schedule", schedule.name) != schedule.name:
        return {}
    if isinstance(schedule, TorchSchedule):
        raise ConfigError(
            f"{source}: scheduler.type: `shardwise train` has no {schedule.name}; use "
            "from_deepspeed() in a loop of your own, or give --schedule"
        )
    options = {k: v for k, v in schedule.given.items() if k not in schedule.missing}
    fills = "warmup_steps" in known and "warmup_num_steps" not in options
    if "warmup_steps" in decided or fills or "warmup_num_steps" in schedule.missing:
        options["warmup_num_steps"] = "auto"  # the key `warmup_steps`
    try:
        theirs = read_options({**known, **decided}.get("schedule_options")) or {}
    except ValueError:
        theirs = {}  # `check_keys` raises
    filled = {"total_num_steps", *options, *theirs}  # without it, it is the key `steps`
    missing = [name for name in schedule.missing if name not in filled]
    if missing:
        raise ConfigError(
            f"{source}: scheduler.params.{missing[0]}: a run needs a number, and no other key says "
            f"it; write it there, or give --schedule-options '{{{missing[0]}: NUMBER}}'"
        )
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    return {"schedule": schedule.name, **({"schedule_options": listed} if listed else {})}


def read_accelerate_keys(path: Path, ranks: int | None = None) -> tuple[JsonObject, Report]:
    """Read accelerate's YAML as keys of `shardwise train`; it may name a DeepSpeed JSON.

    ``ranks`` is used if the file has no ``num_processes``.

    **Raises** ConfigError naming file and key.
    """
    file = _Accelerate(path, plans=False)
    values, lines = dict(file.values), file.report.lines
    ranks = values.get("ranks", ranks)
    keys = {k: v for k, v in values.items() if k not in ("optimizer", "prefetch_bytes")}
    if file.deepspeed is not None:
        keys = {k: v for k, v in values.items() if k in ("precision", "accumulation")}
        found, inner = read_train_keys(file.deepspeed, keys, {}, ranks)
        keys |= found  # this file fills what the JSON leaves open
        lines += inner.lines
    elif "offload" in keys:
        keys["offload"] = offload_keys(keys["offload"])
    if "activation_checkpointing" in values:
        keys["activation_checkpointing"] = values["activation_checkpointing"] == "full"
    if "units" in keys:
        keys["units"] = list(keys["units"])
    if ranks is not None:
        keys["ranks"] = ranks
    return keys, Report(str(path), lines)


class _Accelerate:
    """An accelerate file that was read: ``values``, ``report``, and the DeepSpeed file it names."""

    def __init__(self, path: Path, plans: bool) -> None:
        self.path = path
        self.reader = Reader(str(path), plans=plans)
        self.deepspeed: Path | None = None
        self._named: Reading | None = None
        content = load_keys(path)
        self._nodes = Entry(self.reader, "num_machines", content.get("num_machines"))
        self._is_hybrid = False
        handlers: dict[str, Handler] = {
            "accelerate.num_machines": lambda nodes: None,
            "accelerate.deepspeed_config": self._deepspeed,
            "accelerate.parallelism_config": self._parallelism,
            "accelerate.fsdp_config.fsdp_sharding_strategy": self._strategy,
            "accelerate.fsdp_config.fsdp_reshard_after_forward": self._strategy,
            "accelerate.deepspeed_config.deepspeed_config_file": self._file,
        }
        self.reader.read(content, "accelerate", handlers)
        self._report_nodes()
        self.values = {**self.reader.defaults, **self.reader.values}
        self.report = self.reader.report()
        if self._named is not None:
            self.values |= _planned(self._named)
            if plans:
                lines = (*self.report.lines, *self._named.report.lines)
                self.report = Report(str(path), lines)

    def _report_nodes(self) -> None:
        nodes, values = self._nodes, self.reader.values
        if nodes.value is None:
            return
        number = nodes.integer(1, allows_text=True)
        if self._is_hybrid and "dp_replicate" not in values:
            values["dp_replicate"] = number
        if "dp_replicate" in values and self._is_hybrid:
            nodes.tell("mapped", "dp_replicate, if shards are hybrid")
        else:
            by_flag = "the devices of a node are given by --gpus-per-node"
            nodes.tell("ignored", by_flag if self.reader.plans else "launching is torchrun's")

    def _strategy(self, entry: Entry) -> None:
        entry.store()
        if str(entry.value).upper() in _HYBRID:
            self._is_hybrid = True
            if self._nodes.value is None and self.reader.plans:
                why = "num_machines is not given; give the number of nodes by --dp-replicate"
                self.reader.add("ignored", "fsdp_config.HYBRID_SHARD", None, why)

    def _deepspeed(self, entry: Entry) -> None:
        block = entry.mapping()
        file = block.get("deepspeed_config_file")
        beside = [name for name in _NOT_BESIDE_A_FILE if block.get(name) is not None]
        if file is not None and beside:
            raise self.reader.refusal(
                f"{entry.key}.{beside[0]}",
                f"{file} decides it, and accelerate refuses both; say it there and leave it out "
                "here",
            )
        entry.walk()
        store_offload(self.reader, self.reader.values.get("stage"))

    def _file(self, entry: Entry) -> None:
        """Read the DeepSpeed file. For a run, `read_train_keys` reads it again, with our keys."""
        path, named = self.path.parent / str(entry.value), self.reader.values.get("precision")
        content = load_json(path)
        for block, kind in PRECISION_BLOCKS.items():
            is_on = value_at(content, f"{block}.enabled")
            # it is on though another is named, or off though it is named itself
            if named is not None and is_on is (named != kind):
                raise self.reader.refusal(
                    "mixed_precision",
                    f"it means {named}, and the DeepSpeed file says {kind}.enabled = "
                    f"{str(is_on).lower()}; change one of them",
                )
        inner = Reader(str(path), plans=True)
        given = {k: self.reader.values[k] for k in ("accumulation",) if k in self.reader.values}
        inner.values.update(given)
        self._named = DeepSpeedFile(content, inner, named).read()
        self.deepspeed = path
        entry.tell("mapped")

    def _parallelism(self, entry: Entry) -> None:
        """Read accelerate's mesh: replicas of shard groups; its product is the number of ranks."""
        entry.walk()
        values = self.reader.values
        name_of = f"{entry.key}_{{}}_size".format
        given = {name_of(axis): entry.value.get(name_of(axis)) for axis in ("tp", "cp", "sp")}
        for name, size in given.items():
            if size not in (None, 1, "auto") and not self.reader.plans:
                why = f"only data is parallel here; expected 1, got {size!r}"
                raise self.reader.refusal(f"{entry.key}.{name}", why)
        shards = values.pop("dp_shard", None)
        found = (shards, values.get("dp_replicate"), *given.values())
        product = math.prod(size for size in found if isinstance(size, int))
        ranks = values.get("ranks")
        if shards is not None and ranks is not None and product != ranks:
            why = f"expected sizes whose product is num_processes {ranks}, got {product}"
            raise entry.refusal(why)


# -- where each number came from

_UNSET = {
    "global_batch": "micro_batch x accumulation x ranks",
    "accumulation": "1, or what global_batch asks for",
    "prefetch_bytes": "the largest unit is gathered ahead",
}


def tell_sources(report: Report, config: TrainConfig, source_of: SourceOf) -> Report:
    """Return the report with the value and source of each key that the file did not decide.

    ``source_of`` takes a key of `shardwise train` and returns its flag, the file that sets it, or
    None if its default decides.
    """
    ours_of = names_of("deepspeed")

    def one(name: str) -> str:
        value, source = getattr(config, name), source_of(name)
        if source is not None:
            return f"{name}: {shown(value)}, from {source}"
        if value is None:
            return f"{name}: {_UNSET.get(name, 'unset')}"
        follows = name == "global_batch" or (name == "accumulation" and value != 1)
        return f"{name}: {shown(value)}, {_UNSET[name] if follows else 'its default'}"

    def option(name: str, key: str, options: Mapping[str, object] | None, default: str) -> str:
        if options is not None and options.get(name, "auto") != "auto":
            return f"{shown(options[name])}, from {key}"
        return f"{default}; {key} changes it"

    def sourced(line: Line) -> Line:
        names = ours_of.get(line.key.replace("bfloat16.", "bf16."), ())
        block, _, name = line.key.rpartition(".")
        decided = {ours for ours in names if source_of(ours) == flag_of(ours)}
        if name == "warmup_max_lr" and line.fate != "auto":
            decided = set()  # its peak is not that of --lr
        if not decided and line.fate != "auto":
            return line
        if names:
            fate = "ignored" if line.fate == "mapped" else line.fate
            return replace(line, text="; ".join(map(one, names)), fate=fate)
        text = line.text
        if block == "optimizer.params":
            text = option(name, "optimizer_options", config.optimizer_options, "torch's default")
        elif block == "scheduler.params":
            default = shown(config.curve.options[name]) if config.curve is not None else "no effect"
            text = option(name, "schedule_options", config.schedule_options, default)
        return replace(line, text=text)

    return Report(report.source, tuple(map(sourced, report.lines)))
