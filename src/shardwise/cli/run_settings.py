"""The conversion between the keys of a run and those of a plan."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.offload_blocks import offload_keys
from shardwise.keys import check_keys
from shardwise.optim.kinds import BLOCK
from shardwise.plan.candidate import Candidate, planned_offload
from shardwise.plan.model.shapes import DecoderShape, llama_shape
from shardwise.plan.planning import Plan
from shardwise.plan.request import ModelRequest
from shardwise.plan.sizes import OPTIMIZERS
from shardwise.train.checks import check_micro_batches
from shardwise.train.config import TrainConfig, dump_config
from shardwise.train.optimizers import is_shardwise_adamw

_STATE_LINES = ("param_shards", "param_full", "grad_shards", "optimizer_state")
_PLANNED_BY_MOMENTS = {"bf16": "adamw_bf16_moments", "8bit": "adamw_8bit"}
# Optimizers of plans, as keys of a run.
_WRITABLE: dict[str, dict[str, object]] = {
    **{name: {"optimizer": name, "optimizer_options": None} for name in ("adamw", "adam", "sgd")},
    **{
        name: {"optimizer": "adamw", "optimizer_options": {"moments": moments}}
        for moments, name in _PLANNED_BY_MOMENTS.items()
    },
}


def planned_keys(config: TrainConfig) -> dict[str, object]:
    """Return the keys of a run that are set, with a plan's names and values.

    **Raises** ConfigError where a plan does not know the optimizer's state, and for micro-batches
    in an order that no plan has.
    """
    if config.accumulation_order != "depth_first":
        raise ConfigError(
            "accumulation_order: plans have depth_first alone; take the key out of the file"
        )
    if config.nearby_ranks is not None:
        raise ConfigError(
            "nearby_ranks: a plan gathers from all ranks, for backward too, and has no second "
            "copy; take the key out of the file"
        )
    values = {name: value for name, value in config if value is not None}
    values["activation_checkpointing"] = "full" if config.activation_checkpointing else "none"
    return values | {"optimizer": _planned_optimizer(config)}


def _planned_optimizer(config: TrainConfig) -> str:
    """Return the planner's name for a run's optimizer: by the state that it keeps."""
    name, options = str(config.optimizer), config.optimizer_options or {}
    if name == "sgd" and options.get("momentum"):
        return "sgd_momentum"
    if is_shardwise_adamw(name, options):
        if options.get("moments") == "8bit" and options.get("block", BLOCK) != BLOCK:
            raise ConfigError(
                f"optimizer_options: a plan counts blocks of {BLOCK}; got {options['block']} in "
                "the file of the run"
            )
        return _PLANNED_BY_MOMENTS.get(str(options.get("moments")), name)
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer: a plan has {', '.join(OPTIMIZERS)}; got {name!r} in the file of the run"
        )
    return name


def run_of_shape(shape: DecoderShape, seq: int) -> TrainConfig | None:
    """Return a run of a shape; None where the decoder of `shardwise train` has no such shape.

    It has no biases, no learned positions, no norms of queries and keys, and gated feed-forwards
    and experts whose widths are multiples of 32.
    """
    experts = shape.experts
    sizes = shape.layers, shape.dim, shape.heads, shape.kv_heads, shape.ffn, shape.vocab
    plain = replace(llama_shape(*sizes), tied=shape.tied, experts=experts)
    widths = (shape.ffn, experts.ffn if experts is not None else 0)
    if plain != shape or shape.dim % (2 * shape.heads) or any(width % 32 for width in widths):
        return None
    values: dict[str, object] = {
        "dim": shape.dim,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn_multiple": shape.ffn / shape.dim,
        "vocab": shape.vocab,
        "tied_head": shape.tied,
        "seq": seq,
    }
    if experts is not None:
        values |= {
            "experts": experts.num,
            "experts_per_token": experts.top_k,
            "expert_ffn_multiple": experts.ffn / shape.dim,
            "shared_experts": experts.shared,
            "dense_layers": experts.dense_layers,
            "expert_scoring": experts.scoring,
        }
    return TrainConfig.model_validate(values)


def run_of(candidate: Candidate, config: TrainConfig) -> TrainConfig:
    """Return a run of the built-in decoder with a candidate's settings; the rest is ``config``'s.

    Stages of a pipeline hand on no auxiliary loss. If ``config`` does not decide how experts are
    balanced, those of a pipeline are balanced by biases.

    **Raises** ConfigError where `shardwise train` has no such setting.
    """
    offload = candidate.offload
    if "nvme" in (offload.params, offload.grads, offload.optimizer):
        raise ConfigError(
            "write: the files of a run rest in a folder, and the plan has none; say it, as in "
            "--offload nvme:/local/ssd"
        )
    if candidate.activation_checkpointing not in ("none", "full"):
        raise ConfigError(
            "write: `shardwise train` checkpoints each block or none, not "
            f"{candidate.activation_checkpointing}"
        )
    planned_only = ModelRequest.model_fields.keys() - TrainConfig.model_fields
    for field in fields(candidate):
        if field.name in planned_only and getattr(candidate, field.name) != field.default:
            raise ConfigError(
                f"write: `shardwise train` has {field.name} {field.default}; leave the flag out"
            )
    names = {field.name for field in fields(candidate)} & TrainConfig.model_fields.keys()
    values = dict(config) | {name: getattr(candidate, name) for name in names - {"optimizer"}}
    if candidate.optimizer != _planned_optimizer(config):
        if candidate.optimizer not in _WRITABLE:
            raise ConfigError(
                f"write: expected the file's own optimizer or one of {', '.join(_WRITABLE)}, got "
                f"{candidate.optimizer!r}"
            )
        values |= _WRITABLE[candidate.optimizer]
    is_same_offload = offload == planned_offload(config.offloaded)
    values |= {
        "activation_checkpointing": candidate.activation_checkpointing == "full",
        "offload": config.offload if is_same_offload else offload_keys(offload) or None,
        "dp_replicate": candidate.num_replicas,
        "dp_shard": -1,
        "global_batch": None,
        "ranks": candidate.world_size,
    }
    is_decided = {"expert_balance", "expert_bias"} & config.model_fields_set
    if candidate.pp > 1 and config.experts and not is_decided:
        values |= {"expert_balance": 0.0, "expert_bias": True}
    return check_keys(TrainConfig, values, {}, Path("write"), "train")


def check_writable(name: str, candidate: Candidate, config: TrainConfig | None) -> None:
    """Check that `shardwise train` can run a candidate of the model ``name``.

    **Raises** ConfigError if it cannot, or the model is not the built-in decoder.
    """
    if config is None:
        raise ConfigError(
            f"write: `shardwise train` trains its own decoder, which cannot have the shape of "
            f"{name}; plan from a file for `shardwise train` or a preset like Llama, or take the "
            "settings that the plan prints into your own shardwise.shard(...)"
        )
    run_of(candidate, config)
    check_micro_batches(candidate.pp, candidate.accumulation)


def trainable_degrees(
    candidate: Candidate,
    degrees: Iterable[tuple[int, int, int]],
    config: TrainConfig,
    has_accumulation: bool,
) -> tuple[tuple[int, int, int], ...]:
    """Return the degrees (tp, pp, cp) that a run can have.

    ``has_accumulation``: the candidate's is what the user asked for.

    **Raises** ConfigError, with a reason, if a run refuses all of them.
    """
    kept, refused = [], []
    for tp, pp, cp in degrees:
        try:
            run_of(replace(candidate, tp=tp, pp=pp, cp=cp), config)
            if has_accumulation:
                check_micro_batches(pp, candidate.accumulation)
        except ConfigError as error:
            refused.append(error)
        else:
            kept.append((tp, pp, cp))
    if refused and not kept:
        raise refused[0]
    return tuple(kept)


def planned_yaml(plan: Plan, config: TrainConfig) -> str:
    """Return the YAML of a run under a plan, with what the plan expects of it."""
    candidate, offload = plan.candidate, plan.candidate.offload
    step = next(m.ledger for m in plan.played.peaks if m.phase == "optimizer")
    # A run counts gradients that are still alive after the step as state, and host memory too.
    state_bytes = sum(step.lines()[name] for name in _STATE_LINES)
    is_moved = offload.moves_state or offload.activations != "device"
    expected = {
        "predicted_step_s": plan.step_s,
        "predicted_state_bytes": None if offload.moves_state else state_bytes,
        "predicted_peak_bytes": None if is_moved else plan.played.peak.ledger.total,
    }
    return dump_config(run_of(candidate, config).model_copy(update=expected))
