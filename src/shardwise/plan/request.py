"""The keys of a training step for `shardwise train`, `plan` and `simulate`.

`StepKeys` defines what a run and a plan have under the same name; `TrainConfig` and `ModelRequest`
add their own. A setting is decided if it is in ``model_fields_set``.
"""

import re
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveInt, model_validator

from shardwise.axes import Axes
from shardwise.errors import ConfigError
from shardwise.homes import offload_of, resolve_offload
from shardwise.keys import flag_of, key, read_fields, read_options
from shardwise.outer import Windows
from shardwise.plan.candidate import (
    Checkpointing,
    ContextMethod,
    Kernels,
    PipelineSchedule,
)
from shardwise.precisions import GatherName, ReduceName, plain_precision
from shardwise.quantities import SIZES, parse_count, parse_size
from shardwise.stages import LayoutName, ReduceEvery

_MOST_MICRO_BATCH = 10**6
_LONGEST = 1 << 24  # tokens of a window
_MOST = 1 << 40  # windows, tokens or micro-batches; larger numbers are typing errors


def _read_count(value: object) -> object:
    """Return a count that is written as 7e9 or 4M, and anything but text unchanged."""
    try:
        return parse_count(value) if isinstance(value, str) else value
    except ConfigError:
        raise ValueError("expected a whole number, such as 7e9, 7B, 1.3T or 350M") from None


def _read_tokens(value: object) -> object:
    """Return a count that may be written in powers of two, as 4Mi."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]I)\s*", str(value).upper())
    return int(match[1]) * SIZES[match[2]] if match else _read_count(value)


def _read_size(value: object) -> object:
    """Return the bytes of a size above 0; a few bytes without a unit are refused as a slip."""
    size = parse_size(value) if isinstance(value, str) else value
    if isinstance(size, int) and size <= 0:
        raise ValueError("expected more than 0 bytes")
    if isinstance(size, int) and size < 1 << 20 and not str(value).strip()[-1:].isalpha():
        raise ValueError(f"expected a size with its unit, such as {value}GiB or {value}GB")
    return size


def _read_offload(value: str | Mapping[str, object], *, names_folders: bool) -> object:
    """Read `cpu`, `nvme:FOLDER` or fields of `shardwise.Offload`; refuse what `shard()` refuses."""
    value = read_fields(value)
    resolve_offload(offload_of(value), names_folders=names_folders)
    return value


def _read_windows(value: object) -> object:
    """Return the fields of the settings of `LocalSteps`, with their defaults."""
    if value is None or isinstance(value, Windows):
        return None if value is None else value.fields
    is_number = isinstance(value, str) and not value.lstrip().startswith("{")
    is_fields = isinstance(value, str | dict) and not is_number
    return Windows.of_fields(read_options(value) if is_fields else value).fields


def read_words(value: object) -> object:
    """Return words that are written with commas between."""
    words = value.split(",") if isinstance(value, str) else value
    if words is not None and not (
        isinstance(words, list | tuple) and all(isinstance(w, str) and w.strip() for w in words)
    ):
        raise ValueError("expected names, separated by commas")
    return words if words is None else tuple(word.strip() for word in words)


Count = Annotated[int, BeforeValidator(_read_count)]
Words = Annotated[tuple[str, ...] | None, BeforeValidator(read_words)]
_Counts = Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(read_words)]
RunOffload = Annotated[
    str | dict[str, object] | None, BeforeValidator(partial(_read_offload, names_folders=True))
]
_PlannedOffload = Annotated[
    str | dict[str, object] | None, BeforeValidator(partial(_read_offload, names_folders=False))
]
_Windows = Annotated[dict[str, object] | None, BeforeValidator(_read_windows)]
_Room = Annotated[int | None, BeforeValidator(_read_size)]


class StepKeys(BaseModel):
    """The keys of a step that a run and a plan have under the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp_replicate: int = key(
        1, "Degrees", "groups of ranks that hold a full set of shards each (hybrid)", gt=0
    )
    dp_shard: int = key(-1, "Degrees", "ranks that share the state; -1: those that are left", ge=-1)
    ep: int = key(1, "Degrees", "ranks that share the experts, cut out of dp_shard x cp x tp", gt=0)
    tp: int = key(1, "Degrees", "ranks that share each layer (tensor parallelism)", gt=0)
    pp: int = key(1, "Degrees", "stages of a pipeline, of consecutive blocks each", gt=0)
    pp_schedule: PipelineSchedule = key(
        "1f1b", "Degrees", "the order of a pipeline's passes; accumulation is its micro-batches"
    )
    cp: int = key(1, "Degrees", "ranks that share each window (context parallelism)", gt=0)
    cp_method: ContextMethod = key("gather", "Degrees", "how attention sees whole windows under cp")

    stage: Literal[0, 1, 2, 3] = key(3, "Sharding", "ZeRO stage")
    layout: LayoutName = key("rows", "Sharding", "how parameters are cut")
    gather: GatherName | None = key(
        None, "Sharding", "encoding of matrices that are gathered; unset: the compute dtype"
    )
    reduce: ReduceName | None = key(
        None, "Sharding", "encoding of matrices' gradients that are reduced; unset: none"
    )
    gather_block: int = key(
        256, "Sharding", "elements that share a scale, with gather or reduce", gt=0, multiple_of=16
    )
    reduce_every: ReduceEvery | None = key(
        None, "Sharding", "when gradients are reduced; unset: as the stage says"
    )
    units: Words = key(
        None,
        "Sharding",
        "classes gathered as one, with commas; unset: blocks, and modules as large",
    )
    prefetch_bytes: int | None = key(
        None, "Sharding", "full parameters gathered ahead; unset: the largest unit", ge=0
    )
    bucket_bytes: int | None = key(
        None, "Sharding", "gradients collected before a reduction starts; unset: 1 MiB", ge=0
    )

    local_steps: _Windows = key(
        None,
        "Sharding",
        "steps after which replicas are synchronised, instead of in every step; or fields: "
        "{every: 50, outer: nesterov, lr: 0.7, momentum: 0.9, state: fp32, send: fp32, streams: 1}",
    )

    micro_batch: Count = key(
        1, "Batch", "windows per data-parallel rank and pass", gt=0, le=_MOST_MICRO_BATCH
    )
    accumulation: Count | None = key(
        None,
        "Batch",
        "micro-batches per step; unset: 1, or as the whole batch says",
        gt=0,
        le=_MOST,
    )

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        if self.gather is not None and self.stage == 0:
            raise ValueError(f"gather: nothing is gathered at stage 0, got {self.gather}")
        if self.local_steps is not None and self.dp_replicate == 1:
            raise ValueError("local_steps: replicas step locally with it; give dp_replicate, as 2")
        if self.local_steps is not None and self.pp > 1:
            raise ValueError(f"local_steps: expected pp 1 beside it, got {self.pp}")
        return self

    @property
    def axes(self) -> Axes:
        """The degrees of parallelism."""
        return Axes(self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep)


class ModelRequest(StepKeys):
    """The keys of a model's step on a cluster."""

    model_config = ConfigDict(allow_inf_nan=False)

    seq: Count | None = key(
        None, "Model", "tokens in a window; unset: the model's own", gt=0, le=_LONGEST
    )

    ranks: Count | None = key(
        None, "Cluster", "number of devices; unset: one node", gt=0, le=1 << 20
    )
    gpu: str = key("h100-sxm", "Cluster", "device by name; `shardwise plan --list` has them")
    gpus_per_node: int | None = key(None, "Cluster", "devices in a node; unset: usual", gt=0)
    link: str | None = key(None, "Cluster", "link inside a node; unset: the device's own")
    network: str | None = key(None, "Cluster", "link between nodes, per device; unset: usual")
    host_memory: _Room = key(None, "Cluster", "memory of a node's host, e.g. 512GiB; unset: usual")
    disk_space: _Room = key(
        None, "Cluster", "space for files on a node's disks, e.g. 3.8TB; unset: usual, if known"
    )
    calibration: Path | None = key(
        None, "Cluster", "file of `shardwise bench --calibrate`; replaces the catalogue's figures"
    )

    precision: Annotated[str, BeforeValidator(plain_precision)] = key(
        "bf16", "Sharding", "fp32, bf16, fp16, or zero_paper: the ZeRO paper's 16 bytes"
    )
    activation_checkpointing: Checkpointing = key(
        "none",
        "Step",
        "what is computed again in backward: none; selective, attention's scores, as Megatron-LM "
        "has it, with flash attention nothing; per_op, all but attention and every second "
        "product, as torchtitan's selective; full, whole blocks",
    )
    kernels: Kernels = key(
        "eager", "Step", "eager PyTorch, or compiled by torch.compile; a plan says if it is open"
    )
    loss: Literal["eager", "held", "chunked", "compiled", "fused"] = key(
        "eager",
        "Step",
        "cross-entropy of all logits in float32 (held: and the caller keeps them till backward "
        "ends, as torchtitan's loop of 2024), of chunks of them, compiled, or fused with the head; "
        "a plan says if it is open",
    )
    optimizer_kernel: Literal["fused", "foreach", "loop"] = key(
        "fused", "Step", "how torch runs the optimizer"
    )

    offload: _PlannedOffload = key(
        None,
        "Offload",
        "where state rests, as a run has it: cpu, nvme, nvme:FOLDER or fields of shardwise.Offload",
    )
    global_batch: int | None = key(None, "", "windows per step, of a file; it has no flag")
    tokens_per_step: Annotated[int | None, BeforeValidator(_read_tokens)] = key(
        None,
        "Batch",
        "tokens of all ranks in a step (4Mi = 4194304); decides accumulation",
        gt=0,
        le=10**18,
    )
    optimizer: str = key("adamw", "Batch", "optimizer by name")

    save_every: int = key(
        0, "Checkpoints", "steps between checkpoints, each from a copy on the host; 0: none", ge=0
    )
    memory_every: int = key(
        0, "Checkpoints", "steps between copies of the state in the hosts' memory; 0: none", ge=0
    )

    deepspeed: Path | None = key(None, "Files", "DeepSpeed JSON beside the model")
    accelerate: Path | None = key(None, "Files", "accelerate YAML beside the model")

    list_: bool = key(False, "Output", "list models, devices and links, and end")
    json_: bool = key(False, "Output", "print JSON: bytes as integers, units in the keys")

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.accumulation is not None and self.tokens_per_step is not None:
            raise ValueError("accumulation: leave it out beside tokens_per_step, which decides it")
        if self.deepspeed is not None and self.accelerate is not None:
            raise ValueError("deepspeed: give it or accelerate, not both")
        return self

    @property
    def given(self) -> dict[str, object]:
        """The keys that the user decided, with their values."""
        decided = self.model_fields_set
        return {name: value for name, value in self if name in decided and value is not None}

    def over(self, values: Mapping[str, object], decided: Set[str]) -> Self:
        """Return these keys with those of files where the user gave no flag.

        The result's ``model_fields_set`` has the ``decided`` keys of the files too. Keys of other
        models are left out, and a file's accumulation beside the flag of tokens, which decides it.
        """
        given = self.given.keys()
        out = given | ({"accumulation"} if "tokens_per_step" in given else set())
        names = ModelRequest.model_fields.keys() - out
        made = self.model_copy(update={name: values[name] for name in names & values.keys()})
        made.model_fields_set.intersection_update(given | (names & decided))
        return made


class PlanRequest(ModelRequest):
    """A step's keys, those of a search, and the files to write."""

    params: Annotated[int | None, BeforeValidator(_read_count)] = key(
        None,
        "Model",
        "number of parameters (7e9, 7B): accounting alone, without a model",
        gt=0,
        le=10**18,
    )

    search: bool = key(False, "Search", "vary what is not given and show the best plans")
    max_memory: _Room = key(
        None, "Search", "most memory of a device, e.g. 40GiB; unset: all that it has"
    )
    target_tokens_per_s: float | None = key(
        None, "Search", "tokens per second that a plan has to reach", gt=0
    )

    write: Path | None = key(None, "Output", "write the plan as a file for `shardwise train`")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        for name in ("max_memory", "target_tokens_per_s"):
            if getattr(self, name) is not None and not self.search:
                raise ValueError(f"{name}: it limits a search; add --search")
        return self

    @model_validator(mode="after")
    def _check_accounting(self) -> Self:
        used = {"params", "ranks", "stage", "precision", "optimizer", "dp_replicate"}
        unused = sorted(self.model_fields_set - used - {"accumulation", "reduce_every", "json_"})
        if self.params is not None and unused:
            flags = ", ".join(map(flag_of, unused))
            raise ValueError(f"params: an accounting without a model has no use for {flags}")
        return self


class SimulateRequest(ModelRequest):
    """A step's keys, and what happens in the cluster while it runs."""

    straggler: float = key(1.0, "Scenario", "how often as long the slowest device takes", ge=1)
    slow_link: float = key(1.0, "Scenario", "how often as long the slowest link takes", ge=1)
    mtbf_hours: float | None = key(
        None, "Scenario", "mean hours between failures of one device", gt=0
    )
    restart_s: float = key(420.0, "Scenario", "seconds from a failure until it trains again", ge=0)
    checkpoint_interval_s: float = key(1800.0, "Scenario", "seconds between saves", gt=0)
    checkpoint_stall_s: float | None = key(
        None, "Scenario", "seconds a save stops training; unset: a copy to the host", ge=0
    )
    sweep: _Counts = key(None, "Scenario", "numbers of ranks to compare: 8,64,512")
    trace: Path | None = key(None, "Output", "write the step as a Chrome trace (Perfetto opens it)")
