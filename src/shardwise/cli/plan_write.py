"""A plan as a file that `shardwise train` runs as it is, with what the plan expects of the run."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.offload_blocks import offload_keys
from shardwise.keys import check_keys, flag_of
from shardwise.optim.kinds import BLOCK
from shardwise.plan.candidate import Candidate, planned_offload
from shardwise.plan.model.shapes import DecoderShape, llama_shape
from shardwise.plan.planning import Plan
from shardwise.plan.request import ModelRequest
from shardwise.plan.sizes import OPTIMIZERS
from shardwise.train.checks import check_micro_batches
from shardwise.train.config import TrainConfig, dump_config
from shardwise.train.optimizers import is_own

_STATE_LINES = ("param_shards", "param_full", "grad_shards", "optimizer_state")
# Optimizers of plans, as keys of a run.
_WRITABLE: dict[str, dict[str, object]] = {
    **{name: {"optimizer": name, "optimizer_options": None} for name in ("adamw", "adam", "sgd")},
    "adamw_bf16_moments": {"optimizer": "adamw", "optimizer_options": {"moments": "bf16"}},
    "adamw_8bit": {"optimizer": "adamw", "optimizer_options": {"moments": "8bit"}},
}
_OF_MOMENTS = {"bf16": "adamw_bf16_moments", "8bit": "adamw_8bit"}


def train_config_of(shape: DecoderShape, seq: int) -> TrainConfig | None:
    """Return the keys of `shardwise train` for a shape; None where its decoder has no such shape.

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


def planned_optimizer(config: TrainConfig) -> str:
    """Return the planner's name for a run's optimizer: by the state that it keeps.

    **Raises** ConfigError where a plan knows no such state.
    """
    name, options = str(config.optimizer), config.optimizer_options or {}
    if name == "sgd" and options.get("momentum"):
        return "sgd_momentum"
    if is_own(name, options):
        if options.get("moments") == "8bit" and options.get("block", BLOCK) != BLOCK:
            raise ConfigError(
                f"optimizer_options: a plan counts blocks of {BLOCK}; got {options['block']} in "
                "the file of the run"
            )
        return _OF_MOMENTS.get(str(options.get("moments")), name)
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer: a plan has {', '.join(OPTIMIZERS)}; got {name!r} in the file of the run"
        )
    return name


def check_trainable(name: str, candidate: Candidate, config: TrainConfig | None) -> None:
    """Check that `shardwise train` can run a candidate, before anything is planned.

    **Raises** ConfigError where the model is not the built-in decoder, or the candidate has what
    the engine does not do.
    """
    if config is None:
        raise ConfigError(
            f"write: `shardwise train` trains its own decoder, which cannot have the shape of "
            f"{name}; plan from a file for `shardwise train` or a preset like Llama, or take the "
            "settings that the plan prints into your own shardwise.shard(...)"
        )
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
    if candidate.optimizer not in (planned_optimizer(config), *_WRITABLE):
        raise ConfigError(
            f"write: expected the file's own optimizer or one of {', '.join(_WRITABLE)}, got "
            f"{candidate.optimizer!r}"
        )
    trainable_degrees(candidate, [candidate.degrees], config, has_accumulation=True)


def trainable_degrees(
    candidate: Candidate,
    degrees: Iterable[tuple[int, int, int]],
    config: TrainConfig,
    has_accumulation: bool = False,
) -> tuple[tuple[int, int, int], ...]:
    """Return those that a run can have. **Raises** ConfigError, with a reason, where none can.

    ``has_accumulation``: the candidate's is what the user asked for.
    """
    kept, refused = [], []
    for tp, pp, cp in degrees:
        values = _for_stages(pp, config).model_dump() | {"tp": tp, "pp": pp, "cp": cp}
        values |= {"ep": candidate.ep, "precision": candidate.precision}
        try:
            check_keys(TrainConfig, values, {}, Path("write"), "train")
            if has_accumulation:
                check_micro_batches(pp, candidate.accumulation)
        except ConfigError as error:
            refused.append(error)
        else:
            kept.append((tp, pp, cp))
    if refused and not kept:
        raise refused[0]
    return tuple(kept)


def _for_stages(pp: int, config: TrainConfig) -> TrainConfig:
    """Return the keys of a pipeline of experts, whose stages hand on no auxiliary loss.

    If the balance of experts is not decided, it is by biases.
    """
    decided = {"expert_balance", "expert_bias"} & config.model_fields_set
    if pp == 1 or not config.experts or decided:
        return config
    return config.model_copy(update={"expert_balance": 0.0, "expert_bias": True})


def train_file(plan: Plan, config: TrainConfig) -> str:
    """Return the YAML of a run of the built-in decoder under a plan that was checked."""
    candidate = plan.candidate
    names = {field.name for field in fields(candidate)} & TrainConfig.model_fields.keys()
    values = {name: getattr(candidate, name) for name in names - {"optimizer"}}
    if candidate.optimizer != planned_optimizer(config):
        values |= _WRITABLE[candidate.optimizer]
    step = next(m.ledger for m in plan.played.peaks if m.phase == "optimizer")
    moves_state = candidate.offload.moves_state  # a run counts host memory too, the plan the device
    moves = moves_state or candidate.offload.activations != "device"
    values |= {
        "activation_checkpointing": candidate.activation_checkpointing == "full",
        "accumulation_order": "breadth_first" if candidate.in_rounds else "depth_first",
        "offload": written_offload(candidate, config),
        "dp_replicate": candidate.num_replicas,
        "dp_shard": -1,
        "global_batch": None,
        "ranks": candidate.world_size,
        "seq": plan.seq,
        "predicted_step_s": plan.step_s,
        # A run counts gradients that are still alive after the step as state.
        "predicted_state_bytes": None
        if moves_state
        else sum(step.lines()[name] for name in _STATE_LINES),
        "predicted_peak_bytes": None if moves else plan.played.peak.ledger.total,
    }
    return dump_config(_for_stages(candidate.pp, config).model_copy(update=values))


def written_offload(candidate: Candidate, config: TrainConfig) -> str | dict[str, object] | None:
    """Return the key ``offload`` of a run as a plan has it; the run's own if that is the same."""
    if candidate.offload == planned_offload(config.offloaded):
        return config.offload
    return offload_keys(candidate.offload) or None


def check_target(name: str, path: Path | None) -> None:
    """Check before a long run that a file can be written there. **Raises** ConfigError."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"flag {flag_of(name)}: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"flag {flag_of(name)}: there is no folder {path.parent}; make it first")


def write_file(name: str, path: Path, text: str) -> None:
    """Write what a flag asked for. **Raises** ConfigError where the system refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"flag {flag_of(name)}: {path}: {error.strerror}") from None
