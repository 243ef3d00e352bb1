"""The keys of `shardwise train`, shared by YAML and flags.

`StepKeys` and `TrainConfig` define each key once: type, limits, default, help text, and panel of
the help. `load_config` merges a YAML file with flags, and raises a `ConfigError` that a user can
act on.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BeforeValidator, TypeAdapter, field_validator, model_validator

from shardwise.errors import ConfigError
from shardwise.homes import OffloadLike, offload_of
from shardwise.keys import check_keys, flag_of, key, names_in, read_keys, read_options, shown
from shardwise.plan.model.shapes import DecoderShape, Experts, llama_shape
from shardwise.plan.request import Count, RunOffload, StepKeys
from shardwise.precisions import plain_precision
from shardwise.train.curves import CURVES, SchedulerCurve, make_curve
from shardwise.train.optimizers import check_run_options

_Options = Annotated[dict[str, object] | None, BeforeValidator(read_options)]
_OPTIONS = {"optimizer_options", "schedule_options"}


class TrainConfig(StepKeys):
    """Every key of a training run; `check_run` decides some that are None."""

    dim: int = key(256, "Model", "width of the residual stream", gt=0)
    layers: int = key(4, "Model", "number of decoder blocks", gt=0)
    heads: int = key(8, "Model", "number of query heads", gt=0)
    kv_heads: int | None = key(None, "Model", "number of key/value heads; unset: as heads", gt=0)
    ffn_multiple: float = key(8 / 3, "Model", "hidden width of the SwiGLU over dim", gt=0)
    vocab: int | None = key(None, "Model", "vocabulary; unset: the tokenizer's size", gt=0)
    seq: int = key(256, "Model", "tokens in a window", gt=0)
    tied_head: bool = key(False, "Model", "share the embedding with the output head")
    dropout: float = key(
        0.0, "Model", "share of activations zeroed in training; 0 draws nothing", ge=0, lt=1
    )

    experts: int = key(0, "Experts", "experts of a layer; 0: a plain feed-forward", ge=0)
    experts_per_token: int = key(2, "Experts", "experts that each token is sent to", gt=0)
    expert_ffn_multiple: float | None = key(
        None, "Experts", "hidden width of an expert over dim; unset: ffn_multiple", gt=0
    )
    shared_experts: int = key(0, "Experts", "experts that every token goes through", ge=0)
    dense_layers: int = key(0, "Experts", "first layers without experts", ge=0)
    expert_scoring: Literal["softmax", "sigmoid"] = key(
        "softmax", "Experts", "how routers score experts: as Mixtral, or as DeepSeek-V3"
    )
    expert_balance: float = key(
        0.01, "Experts", "weight of the loss that keeps experts equally busy; 0: none", ge=0
    )
    expert_bias: bool = key(
        False, "Experts", "keep them equally busy by biases of the routers (DeepSeek-V3)"
    )

    precision: Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(plain_precision)] = key(
        "fp32", "Sharding", "compute dtype"
    )
    offload: RunOffload = key(
        None,
        "Sharding",
        "cpu: slices, gradients and the optimizer's step in host memory; nvme:FOLDER: its state in "
        "files; or fields of shardwise.Offload, such as {optimizer: cpu, fraction: 0.5}",
    )
    nearby_ranks: int | None = key(
        None,
        "Sharding",
        "ranks in a node, from which alone backward gathers what forward has left there (hpZ); "
        "unset: from all",
        ge=2,
    )
    overlap_step: bool = key(
        False, "Sharding", "run the optimizer's step behind the next forward pass"
    )
    activation_checkpointing: bool = key(
        False, "Sharding", "recompute each block in the backward pass"
    )

    micro_batch: Count = key(8, "Batch", "windows per data-parallel rank and pass", gt=0)
    global_batch: int | None = key(
        None, "Batch", "windows per step over all ranks; decides accumulation", gt=0
    )
    accumulation_order: Literal["depth_first", "breadth_first"] = key(
        "depth_first", "Batch", "breadth_first: all micro-batches through a layer before the next"
    )

    steps: int = key(200, "Optimizer", "optimizer updates to take", gt=0)
    optimizer: Literal[
        "adamw", "adam", "sgd", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd"
    ] = key("adamw", "Optimizer", "class of the optimizer")
    optimizer_options: _Options = key(
        None,
        "Optimizer",
        "more arguments of its class in torch.optim, such as eps; of adamw also moments: bf16 or "
        "8bit, see shardwise.optim",
    )
    lr: float = key(3e-4, "Optimizer", "peak learning rate", gt=0)
    min_lr: float = key(0.0, "Optimizer", "learning rate that the schedule ends at", ge=0)
    schedule: Literal[
        "constant", "cosine", "linear", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
    ] = key(
        "cosine",
        "Optimizer",
        "learning rate after the warm-up; or a curve of DeepSpeed, warm-up included",
    )
    schedule_options: _Options = key(
        None,
        "Optimizer",
        "options of a curve of DeepSpeed; total_num_steps: as steps; "
        "warmup_num_steps: auto: as warmup_steps",
    )
    warmup_steps: int = key(0, "Optimizer", "steps of linear warm-up", ge=0)
    weight_decay: float = key(0.1, "Optimizer", "decay of matrices", ge=0)
    beta1: float = key(0.9, "Optimizer", "decay of the first moment, in the Adams", ge=0, lt=1)
    beta2: float = key(0.95, "Optimizer", "decay of the second moment, in the Adams", ge=0, lt=1)
    grad_clip: float = key(1.0, "Optimizer", "largest gradient norm; 0 does not clip", ge=0)
    loss_scale: float = key(65536.0, "Optimizer", "first loss scale of fp16", gt=0)
    loss_scale_window: int = key(
        2000, "Optimizer", "steps without overflow before the loss scale doubles", gt=0
    )
    seed: int = key(0, "Optimizer", "seed of weights, data order and sample", ge=0)

    data: Path | None = key(
        None,
        "Data",
        "text, JSONL or `.npy` tokens, a file or a folder; unset: Python's standard library",
    )
    tokenizer: Path | None = key(None, "Data", "tokenizer.json; unset: bytes")
    eval_every: int = key(0, "Data", "steps between evaluations; 0: at the end only", ge=0)
    eval_windows: int = key(32, "Data", "held-out windows; 0 does not evaluate", ge=0)
    prompt: str = key("def ", "Data", "text that the sample continues", min_length=1)
    sample_tokens: int = key(160, "Data", "length of the sample at the end", ge=0)

    save_every: int = key(
        0, "Checkpoints", "steps between checkpoints, and one at the end; 0 saves none", ge=0
    )
    keep_last: int | None = key(None, "Checkpoints", "newest checkpoints to keep; unset: all", gt=0)
    keep_every: int | None = key(
        None, "Checkpoints", "beside keep_last, keep those of each multiple of this step", gt=0
    )
    resume: Literal["auto", "never"] | int = key(
        "never", "Checkpoints", "auto: from the newest checkpoint, if there is one; or from a step"
    )
    save_in_background: bool = key(
        True, "Checkpoints", "write checkpoints behind the steps that follow"
    )
    memory_every: int = key(
        0,
        "Checkpoints",
        "steps between copies of the state in the hosts' memory, which outlive the processes; 0: "
        "none",
        ge=0,
    )
    restarts: int = key(
        0, "Checkpoints", "how often ranks that fail are started again, by `ranks`", ge=0
    )
    check_gradients: bool = key(
        False,
        "Checkpoints",
        "compare one pass with one process that has all windows, before step 1",
    )
    check_replicas_every: int = key(
        0, "Checkpoints", "steps between comparisons of replicated state; 0: never", ge=0
    )
    replay_every: int = key(
        0, "Checkpoints", "steps between steps computed twice and compared; 0: never", ge=0
    )

    integrity: float = key(
        0.0,
        "Checkpoints",
        "share of the time for both checks in turns, such as 0.01; 0: only those asked for above",
        ge=0,
        lt=1,
    )
    on_fault: Literal["stop", "leave"] = key(
        "stop",
        "Checkpoints",
        "if a replayed step differs: end the run, or the node of the first rank named, so that "
        "torchrun goes on without it",
    )

    predicted_step_s: float | None = key(
        None, "Plan", "seconds per step that the plan expects; compared at the end", gt=0
    )
    predicted_state_bytes: int | None = key(
        None, "Plan", "state of a rank that the plan expects; compared at the end", gt=0
    )
    predicted_peak_bytes: int | None = key(
        None, "Plan", "most bytes of tensors that the plan expects; compared at the end", gt=0
    )

    output: Path = key(Path("runs/train"), "Run", "folder for metrics, config and tokens")
    overwrite: bool = key(False, "Run", "replace the metrics of an earlier run")
    observe: bool = key(
        True, "Run", "keep figures of all steps and ranks, timelines and memory in output/observed"
    )
    hang_timeout: float | None = key(
        None,
        "Run",
        "seconds that a wait for other ranks may last; unset: 5 minutes, longer for one at work",
        ge=4,
    )
    ranks: int | None = key(
        None, "Run", "local ranks to launch; under torchrun its own count is used", gt=0
    )
    threads: int | None = key(None, "Run", "CPU threads per rank; unset: cores / ranks", gt=0)

    @field_validator("resume", mode="before")
    @classmethod
    def _check_resume(cls, value: object) -> object:
        if value in ("auto", "never") or (str(value).isdecimal() and int(str(value)) > 0):
            return value
        raise ValueError("expected 'auto', 'never' or the step of a checkpoint")

    @model_validator(mode="after")
    def _check_keys_together(self) -> Self:
        if self.pp > 1 and self.accumulation_order == "breadth_first":
            raise ValueError(
                "accumulation_order: expected depth_first with pp, as pp_schedule is the order of "
                "a pipeline's passes, got breadth_first"
            )
        heads, kv_heads = self.heads, self.kv_heads or self.heads
        seq = f"seq {self.seq}" if self.cp == 1 else f"seq {self.seq} / cp {self.cp}"
        for name, value, what, size in (
            ("tp", self.tp, f"heads {heads}", heads),
            ("tp", self.tp, f"kv_heads {kv_heads}", kv_heads),
            ("ep", self.ep, f"experts {self.experts}", self.experts or 1),
            ("cp", self.cp, f"seq {self.seq}", self.seq),
            ("tp", self.tp, seq, self.seq // self.cp),
            ("kv_heads", kv_heads, f"heads {heads}", heads),
        ):
            if size % value:
                raise ValueError(f"{name}: expected a divisor of {what}, got {value}")
        part = f"heads {heads}" if self.tp == 1 else f"heads {heads} / tp {self.tp}"
        for is_wrong, message in (
            (
                self.experts and self.experts_per_token > self.experts,
                f"experts_per_token: expected at most experts {self.experts}, got "
                f"{self.experts_per_token}",
            ),
            (self.pp > self.layers, f"pp: expected at most layers {self.layers}, got {self.pp}"),
            (
                self.pp > 1 and self.experts and self.expert_balance,
                "pp: stages hand on tokens alone, and not the loss of expert_balance; set "
                "expert_balance to 0, and expert_bias to true",
            ),
            (
                self.dim % heads or self.dim // heads % 2,
                "heads: expected dim / heads to be a whole even number (rotary embeddings turn "
                f"pairs), got dim {self.dim} / heads {heads}",
            ),
            (
                self.pp > 1 and self.tied_head and self.layout != "rows",
                f"layout: expected rows with pp and tied_head, got {self.layout}",
            ),
            (
                self.pp > 1 and self.precision == "fp16",
                "precision: expected bf16 or fp32 with pp, got fp16",
            ),
            (
                self.warmup_steps > self.steps,
                f"warmup_steps: expected at most steps {self.steps}, got {self.warmup_steps}",
            ),
            (self.min_lr > self.lr, f"min_lr: expected at most lr {self.lr}, got {self.min_lr}"),
            (
                self.keep_every and not self.keep_last,
                "keep_every: expected keep_last beside it; without it all are kept",
            ),
            (
                self.restarts and self.resume != "auto",
                f"restarts: expected resume auto beside it, got {self.resume}",
            ),
            (  # as attention over parts of windows would raise at the first step
                self.cp > 1 and self.cp_method == "heads" and heads // self.tp % self.cp,
                f"cp_method: 'heads' needs a cp that divides {part}, got {self.cp}; take 'gather'",
            ),
            (
                self.cp > 1 and self.cp_method == "ring" and self.dropout,
                "cp_method: 'ring' needs no dropout; take 'gather'",
            ),
            (
                self.cp > 1 and self.cp_method == "ring" and self.seq % (2 * self.cp),
                f"cp_method: 'ring' needs 2 x cp {self.cp} to divide seq {self.seq}; take 'gather'",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_replicas_and_neighbours(self) -> Self:
        if self.nearby_ranks and self.stage != 3:
            raise ValueError(
                f"nearby_ranks: backward gathers nothing at stage {self.stage}; expected stage 3"
            )
        if self.nearby_ranks and max(self.tp, self.pp, self.cp, self.ep) > 1:
            raise ValueError("nearby_ranks: expected tp, pp, cp and ep 1 beside it")
        if self.local_steps and self.precision == "fp16":
            raise ValueError(
                "precision: expected bf16 or fp32 with local_steps, as each replica would have a "
                "loss scale of its own, got fp16"
            )
        return self

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        options, curve = self.optimizer_options or {}, self.curve
        check_run_options(self.optimizer, options, "optimizer_options")
        twice = {"lr", "betas", "weight_decay"} & options.keys()
        if twice:
            raise ValueError(
                f"optimizer_options: {min(twice)} has keys of its own: lr, beta1 and beta2, "
                "weight_decay"
            )
        if curve is None:
            if self.schedule_options:
                known = ", ".join(CURVES)
                raise ValueError(f"schedule_options: expected one of {known} as schedule")
            return self
        if any(isinstance(value, list) for value in (self.schedule_options or {}).values()):
            raise ValueError("schedule_options: expected one value each, not one per group")
        if self.warmup_steps not in (0, curve.options["warmup_num_steps"]) or self.min_lr:
            way = ", or give schedule_options {warmup_num_steps: auto}, which is warmup_steps"
            raise ValueError(
                f"schedule: {self.schedule} has a warm-up and a lowest rate of its own; leave "
                f"warmup_steps and min_lr out{'' if self.min_lr else way}"
            )
        return self

    @property
    def offloaded(self) -> OffloadLike:
        """The offload setting, in a form that `shard()` takes."""
        return offload_of(self.offload)

    def shape(self, vocab: int) -> DecoderShape:
        """Return the shape of the run's decoder."""

        def width(multiple: float) -> int:
            return 32 * max(1, round(multiple * self.dim / 32))

        ffn = width(self.ffn_multiple)
        kv_heads = self.kv_heads or self.heads
        shape = llama_shape(
            self.layers, self.dim, self.heads, kv_heads, ffn, vocab, tied=self.tied_head
        )
        if not self.experts:
            return shape
        experts = Experts(
            self.experts,
            self.experts_per_token,
            width(self.expert_ffn_multiple or self.ffn_multiple),
            shared=self.shared_experts,
            dense_layers=self.dense_layers,
            scoring=self.expert_scoring,
        )
        return replace(shape, experts=experts)

    @property
    def curve(self) -> SchedulerCurve | None:
        """The curve of DeepSpeed that the learning rate follows, or None."""
        if self.schedule not in CURVES:
            return None
        auto = {"total_num_steps": self.steps, "warmup_num_steps": self.warmup_steps}
        options = self.schedule_options or {}
        if "total_num_steps" in CURVES[self.schedule]:
            options = {"total_num_steps": "auto", **options}
        filled = {k: auto.get(k, v) if v == "auto" else v for k, v in options.items()}
        return make_curve(self.schedule, filled, "schedule_options")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step; the first one is 1.

        The warm-up rises in `warmup_steps` equal parts and reaches `lr` on its last step; the decay
        reaches `min_lr` on the last step of the run. A curve of DeepSpeed has its own options.
        """
        if self.curve is not None:
            return self.curve.learning_rate(step - 1, self.lr)
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        remaining = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.min_lr + (self.lr - self.min_lr) * remaining


def load_config(
    path: Path | None,
    flags: Mapping[str, object],
    beside: tuple[Path, Mapping[str, object]] | None = None,
) -> TrainConfig:
    """Read a YAML file of flat keys (None: the defaults); flags win over it.

    ``beside`` is another file and its keys.

    **Raises** ConfigError if the file is missing or not YAML, a key is unknown, a value is not
    allowed, or the two files differ and no flag decides.
    """
    values = read_keys(path) if path is not None else {}
    if beside is None:
        return check_keys(TrainConfig, values, flags, path, "train")
    other, other_values = beside
    lines = []
    for name in sorted(values.keys() & other_values.keys() - flags.keys()):
        first, second = values[name], other_values[name]
        if name in _OPTIONS and isinstance(first, dict) and isinstance(second, dict):
            second = {k: v for k, v in second.items() if k in first and v != "auto"}
            first = {k: v for k, v in first.items() if k in second}
        if _stored(name, first) != _stored(name, second):
            text = f"{name}: {path} says {shown(first)}, {other} says {shown(second)}"
            lines.append(f"{text}; change one, or give {flag_of(name)}")
    if lines:
        raise ConfigError("\n".join(lines))
    values = {**other_values, **_merge_options(values, other_values)}
    return check_keys(TrainConfig, values, _merge_options(flags, values), path or other, "train")


def _merge_options(given: Mapping[str, object], others: Mapping[str, object]) -> dict[str, object]:
    """Merge each key that holds options with the options of ``others``, which do not win."""
    merged = dict(given)
    for name in _OPTIONS & given.keys() & others.keys():
        try:
            other_options = read_options(others[name]) or {}
            options = read_options(given[name]) or {}
        except ValueError:
            continue  # `check_keys` raises
        merged[name] = {**other_options, **options}
    return merged


def _stored(name: str, value: object) -> object:
    """Return a value as the model stores it; `check_keys` raises later if it refuses it."""
    try:
        field = TrainConfig.model_fields[name]
        kind: TypeAdapter[object] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
        return kind.validate_python(value)
    except (KeyError, ValueError):
        return value


def dump_config(config: TrainConfig) -> str:
    """Write a config as YAML that `load_config` reads back to the same config."""
    values = config.model_dump(mode="json")
    return yaml.safe_dump({name: values[name] for name in names_in(TrainConfig)}, sort_keys=False)
