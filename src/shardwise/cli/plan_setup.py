"""From the keys of a request to a model, a cluster and a candidate, and what a search varies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.axes import Axes
from shardwise.cli.plan_write import (
    ALIKE,
    EAGER,
    planned_optimizer,
    train_config_of,
    trainable_degrees,
)
from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.interop.foreign_keys import Report
from shardwise.interop.foreign_settings import read_accelerate, read_deepspeed
from shardwise.keys import flag_of
from shardwise.plan.candidate import ALL_DEGREES, Candidate, Kernels, LossKind
from shardwise.plan.machine.calibration import (
    CalibratedPrices,
    Calibration,
    cluster_of,
    read_calibration,
)
from shardwise.plan.machine.hardware import Cluster, make_cluster
from shardwise.plan.machine.pricing import Pricer, Prices
from shardwise.plan.model.presets import Preset, find_model, find_preset
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import Model, Plan
from shardwise.plan.request import ModelRequest, PlanRequest, offload_asked
from shardwise.plan.space import Limits, Space
from shardwise.plan.step.play import resting_state
from shardwise.precisions import GatherName, ReduceName
from shardwise.quantities import format_bytes
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.text import load_tokenizer

if TYPE_CHECKING:
    from shardwise.config import LayoutName
    from shardwise.plan.model.models import ModelSource
    from shardwise.train.decoder import Decoder


_PADDING_TO_MENTION = 0.03
_DEFAULTS = {
    **EAGER,
    "stage": 3,
    "precision": "bf16",
    "micro_batch": 1,
    "accumulation": 1,
    "activation_checkpointing": "none",
    "optimizer": "adamw",
}


@dataclass(frozen=True)
class Setup:
    """Everything that a plan, a search or a simulation starts from.

    ``given`` are the names of settings that the user decided, by a flag or in a file: a search
    varies the others. ``tokens_per_step`` is what decides accumulation, if anything does.
    ``config`` is that of `shardwise train`, where the model is its decoder.
    """

    model: Model
    cluster: Cluster
    candidate: Candidate
    prices_of: Callable[[Candidate], Pricer]
    given: frozenset[str]
    tokens_per_step: int | None
    degrees: tuple[tuple[int, int, int], ...]
    notes: tuple[str, ...]
    config: TrainConfig | None


def set_up(name: str | None, request: ModelRequest, *, to_train: bool = False) -> Setup:
    """Resolve a request into a model, a cluster, a candidate and prices.

    ``to_train``: plan the decoder of `shardwise train`, also where a preset has its shape.

    **Raises** ConfigError naming the flag, file or key.
    """
    if name is None:
        raise ConfigError(
            "MODEL: name a preset, a config.json, file.py:factory or a YAML of `shardwise train`; "
            "`shardwise plan --list` has the presets, `shardwise plan --params 7e9` needs no model"
        )
    foreign = _foreign(request)
    config = load_config(Path(name), {}) if name.endswith((".yaml", ".yml")) else None
    is_ours = config is not None
    flags = {k: v for k, v in request.model_dump().items() if k in request.model_fields_set}
    flags = {k: v for k, v in flags.items() if v is not None}
    decided = {**(foreign[0] if foreign else {}), **flags}
    if "tokens_per_step" in flags:
        decided.pop("accumulation", None)  # a file's; beside the flag it is refused
    values = {**(_of_train(config) if config is not None else {}), **decided}
    given = set(decided) | (config.model_fields_set if config is not None else set())
    calibration = read_calibration(request.calibration) if request.calibration else None
    cluster = _cluster(request, values, calibration)
    candidate = _candidate(values, cluster)
    if not {"accumulation", "micro_batch", "ranks", "dp_replicate", "tokens_per_step"} & set(flags):
        _check_batch(candidate, values)
    source = None if is_ours else _find(name, candidate)
    if to_train and source is not None and source.shape is not None:
        config = train_config_of(source.shape, source.seq)
    tries_batches = isinstance(request, PlanRequest) and request.search
    degrees = request.degrees if isinstance(request, PlanRequest) else None
    model = _model(name, source, config, request.seq, candidate)
    notes: tuple[str, ...] = ()
    if foreign is not None:
        report = foreign[1]
        ignored = (report.ignored | report.auto).items()
        notes = tuple(f"{report.source}: {key} not used: {why}" for key, why in ignored)
    if not (tries_batches or "layout" in given or (is_ours and not to_train)):
        candidate, why = _with_layout(candidate, model)
        notes += why
    tokens = _tokens_per_step(values, flags, model)
    if tokens is not None and not (tries_batches and "micro_batch" not in given):
        candidate = _fill_batch(candidate, tokens, model.seq, values)
    prices_of = _prices(cluster, calibration)
    given_names = frozenset(given)
    return Setup(
        *(model, cluster, candidate, prices_of, given_names, tokens, degrees or (), notes, config)
    )


def at_ranks(setup: Setup, request: ModelRequest, ranks: int) -> Setup:
    """Return the same setup on a cluster of another size: more shards, all else as it is.

    **Raises** ConfigError where the ranks do not divide, or the setup is of a calibration.
    """
    if request.calibration is not None:
        raise ConfigError("sweep: a calibration is of one number of ranks; leave one of them out")
    candidate = setup.candidate
    others = candidate.world_size // candidate.num_shards
    if ranks % others:
        raise ConfigError(f"sweep: {ranks} ranks do not divide by {others} (replicas x degrees)")
    cluster = _cluster(request, {"ranks": ranks}, None)
    return replace(
        setup,
        cluster=cluster,
        candidate=replace(candidate, num_shards=ranks // others),
        prices_of=_prices(cluster, None),
    )


def _with_layout(candidate: Candidate, model: Model) -> tuple[Candidate, tuple[str, ...]]:
    """Return the candidate with the layout that a user who named none should take, and why."""
    if candidate.optimizer == "muon":  # it reads whole matrices
        return replace(candidate, layout="matrices"), ()
    flat, tape = replace(candidate, layout="flat"), model.tape(candidate)
    rows_bytes, flat_bytes = (
        sum(resting_state(tape, each.with_context_shards).bytes_by_place.values())
        for each in (candidate, flat)
    )
    saved = rows_bytes - flat_bytes
    if saved <= _PADDING_TO_MENTION * flat_bytes:
        return candidate, ()
    return flat, (
        f"layout flat is chosen: rows would rest in {format_bytes(saved)} more a rank, which is "
        'padding; pass layout="flat" to shard() too, or plan rows by --layout rows',
    )


def padding_notes(made: Plan) -> tuple[str, ...]:
    """Tell of padding that is worth another layout."""
    padding, shards = made.played.padding_bytes, made.played.resting.param_shards
    candidate = made.candidate
    if candidate.layout != "rows" or padding <= _PADDING_TO_MENTION * shards:
        return ()
    parts = str(candidate.num_shards * candidate.cp)
    if candidate.ep > 1:
        parts += f", and experts by {candidate.expert_shards},"
    return (
        f"rows that do not divide by {parts} cost {format_bytes(padding)} of "
        f"padding a rank ({padding / max(shards, 1):.1%} of its shards); --layout flat costs none",
    )


def _foreign(request: ModelRequest) -> tuple[dict[str, Any], Report] | None:
    if request.deepspeed is not None:
        return read_deepspeed(request.deepspeed)
    return read_accelerate(request.accelerate) if request.accelerate is not None else None


def _of_train(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a run of `shardwise train` in the names of a request."""
    names = (*ALIKE, *ALL_DEGREES, "dp_replicate", "dp_shard", "global_batch", "ranks")
    found = {name: getattr(config, name) for name in names}
    found["activation_checkpointing"] = "full" if config.activation_checkpointing else "none"
    found["optimizer"] = planned_optimizer(config)
    if config.offload is not None:
        found["offload"] = config.offload
    return {name: value for name, value in found.items() if value is not None}


def _cluster(
    request: ModelRequest, values: Mapping[str, Any], calibration: Calibration | None
) -> Cluster:
    ranks = values.get("ranks")
    if calibration is not None:
        for name in ("gpu", "gpus_per_node", "link", "network"):
            if name in request.model_fields_set:
                raise ConfigError(
                    f"{name}: a calibration has measured the machine; leave --calibration or "
                    f"{flag_of(name)} out"
                )
        if ranks not in (None, calibration.num_ranks):
            raise ConfigError(
                f"calibration: {request.calibration} was measured with {calibration.num_ranks} "
                f"ranks at once, {ranks} are asked for; measure again with "
                f"`shardwise bench --calibrate --ranks {ranks}`"
            )
        return _with_room(cluster_of(calibration), request)
    per_node = request.gpus_per_node
    ranks = ranks if ranks is not None else per_node or 8
    try:
        made = make_cluster(request.gpu, ranks, per_node, request.link, request.network)
    except ConfigError as error:
        message = str(error).replace("num_gpus", flag_of("ranks"))
        raise ConfigError(message.replace("gpus_per_node", flag_of("gpus_per_node"))) from None
    return _with_room(made, request)


def _with_room(cluster: Cluster, request: ModelRequest) -> Cluster:
    """Return the cluster with as much room off the devices as its user has said."""
    asked = {"memory_bytes": request.host_memory, "nvme_bytes": request.disk_space}
    given: dict[str, Any] = {name: size for name, size in asked.items() if size is not None}
    host = replace(cluster.node.host, **given)
    return replace(cluster, node=replace(cluster.node, host=host))


def _candidate(values: Mapping[str, Any], cluster: Cluster) -> Candidate:
    names = (*ALIKE, *EAGER, "activation_checkpointing", "optimizer", *ALL_DEGREES)
    chosen = {k: v for k, v in {**_DEFAULTS, **values}.items() if k in names}
    offload = offload_asked(values)
    if offload.activations != "device" and chosen["activation_checkpointing"] != "full":
        raise ConfigError(
            "offload_activations: inputs of checkpointed blocks go to the host, and no block is "
            "checkpointed whole; add --activation-checkpointing full"
        )
    on_cpu = not cluster.node.accelerator.asynchronous  # gloo, as the engine has it there
    candidate = Candidate(
        **chosen, offload=offload, transport="point_to_point" if on_cpu else "coalesced"
    )
    axes = Axes(
        dp_replicate=values.get("dp_replicate", 1),
        dp_shard=values.get("dp_shard", -1),
        **{name: getattr(candidate, name) for name in ALL_DEGREES},
    ).over(cluster.num_ranks)
    return replace(candidate, num_replicas=axes.dp_replicate, num_shards=axes.dp_shard)


def _find(name: str, candidate: Candidate) -> Preset | ModelSource:
    """Return what a name stands for; a preset needs no torch, unless its units are named."""
    is_name = not (
        "/" in name or ":" in name or name.endswith((".json", ".py")) or not name.strip()
    )
    if is_name and not Path(name).is_dir() and candidate.units is None:
        return find_preset(name)
    return find_model(name)  # loads torch, so all else is checked before


def _model(
    name: str,
    source: Preset | ModelSource | None,
    config: TrainConfig | None,
    seq: int | None,
    candidate: Candidate,
) -> Model:
    """Return the model by the formulas of its shape, if it has one, else the traced one.

    A trace shows units of any classes, modules without formulas, and dropout. It shows no degrees,
    and only blocks that are checkpointed whole or not at all.
    """
    plain = candidate.units is None
    if source is None and config is not None:
        if (plain and not config.dropout) or _needs_shape(candidate) or config.experts:
            return ShapedModel(Path(name).name, config.shape(_vocab(config)), seq or config.seq)
        source = _decoder_source(Path(name).name, config)
    assert source is not None  # there is a file's config, or what a name stands for
    shape = source.shape
    if shape is not None and (plain or shape.experts is not None):
        if isinstance(source, Preset):
            return ShapedModel(source.name, shape, seq or source.seq)
        eager = source.eager if config is None else "decoder"  # `shardwise train` runs its own
        return ShapedModel(source.name, shape, source.window(seq), eager=eager, notes=source.notes)
    if _needs_shape(candidate):
        raise ConfigError(
            f"model: {name} is planned by tracing it, which shows no tensor, pipeline, context or "
            "expert degree, no checkpointing of parts of a block, and no kernels but eager ones; "
            + ("leave --units out" if shape is not None else _without_shape(name))
        )
    assert not isinstance(source, Preset)
    from shardwise.plan.model.traced import TracedModel

    return TracedModel(source, seq)


def _without_shape(name: str) -> str:
    """Say why there are no formulas for a model, and what a user can plan in its place."""
    if name.endswith(".py") or ".py:" in name:
        return "give a preset or a config.json of a decoder"
    return (
        "the formulas do not know this config's family; leave those flags out, or give a preset of "
        "nearly its shape"
    )


def _needs_shape(candidate: Candidate) -> bool:
    """Tell whether a trace of the module cannot show the candidate."""
    is_split = candidate.world_size != candidate.data_parallel or candidate.ep > 1
    is_plain = candidate.activation_checkpointing in ("none", "full")
    return is_split or not is_plain or (candidate.kernels, candidate.loss) != ("eager", "eager")


def _decoder_source(name: str, config: TrainConfig) -> ModelSource:
    from shardwise.plan.model.models import module_source
    from shardwise.train.decoder import Decoder

    vocab = _vocab(config)

    def build(checkpointed: bool) -> Decoder:
        update = {"activation_checkpointing": checkpointed}
        return Decoder(config.model_copy(update=update), vocab)

    return module_source(name, build, config.seq)


def _vocab(config: TrainConfig) -> int:
    return config.vocab or load_tokenizer(config.tokenizer).vocab


def _check_batch(candidate: Candidate, values: Mapping[str, Any]) -> None:
    """Check that a file's batch keys agree, if it has all of them."""
    if "global_batch" not in values or "accumulation" not in values:
        return
    product = candidate.micro_batch * candidate.accumulation * candidate.data_parallel
    if values["global_batch"] != product:
        raise ConfigError(
            f"global_batch: {values['global_batch']} are not micro_batch {candidate.micro_batch} x "
            f"accumulation {candidate.accumulation} x {candidate.data_parallel} ranks; leave one "
            "of them out, or say --ranks"
        )


def _tokens_per_step(
    values: Mapping[str, Any], flags: Mapping[str, Any], model: Model
) -> int | None:
    """Return what a step is asked to have: by a flag, or in a file that leaves accumulation out."""
    if "tokens_per_step" in flags:
        return int(flags["tokens_per_step"])
    if "global_batch" in values and "accumulation" not in values:
        return int(values["global_batch"]) * model.seq
    return None


def _fill_batch(
    candidate: Candidate, tokens: int, seq: int, values: Mapping[str, Any]
) -> Candidate:
    """Decide accumulation by the tokens of a step, within one per cent; a file's batch exactly."""
    per_pass = candidate.micro_batch * candidate.data_parallel * seq
    accumulation = round(tokens / per_pass)
    name = "tokens_per_step" if "tokens_per_step" in values else "global_batch"
    allowed = tokens // 100 if name == "tokens_per_step" else 0
    if not accumulation or abs(accumulation * per_pass - tokens) > allowed:
        unit = 1 if name == "tokens_per_step" else seq
        nearest = max(accumulation, 1) * per_pass // unit
        raise ConfigError(
            f"{name}: expected a multiple of {per_pass // unit:,} (micro_batch "
            f"{candidate.micro_batch} x {candidate.data_parallel} ranks"
            + (f" x {seq} tokens), " if unit == 1 else "), ")
            + f"got {tokens // unit:,}; take {nearest:,}, or change micro_batch or ranks"
        )
    return replace(candidate, accumulation=accumulation)


def _prices(cluster: Cluster, calibration: Calibration | None) -> Callable[[Candidate], Pricer]:
    if calibration is None:
        return lambda candidate: Prices(cluster, candidate)
    return lambda candidate: CalibratedPrices(calibration, candidate)


_WINDOWS, _MOST_TOKENS = 48, 1 << 22  # of a rank, and of a step of large models
_MANY_RANKS = 512  # beyond which pipelines with contexts are tried too


def space_of(
    setup: Setup,
    *,
    to_train: bool = False,
    gathers: Sequence[GatherName | None] | None = None,
    reduces: Sequence[ReduceName | None] | None = None,
) -> Space:
    """Return what a search varies: every setting that the user did not decide.

    ``gathers`` and ``reduces``: formats to compare; without, the user's. ``to_train``: no
    offloading, and no degrees that `shardwise train` refuses.

    **Raises** ConfigError where it refuses all of them.
    """
    base, given = setup.candidate, setup.given
    is_wide = isinstance(setup.model, ShapedModel) and setup.config is None
    degrees = setup.degrees or (_degrees(setup) if is_wide else (base.degrees,))
    if to_train and setup.config is not None:
        degrees = trainable_degrees(base, degrees, setup.config, "accumulation" in given)
    checkpointing = ("none", "full") if to_train or not is_wide else ("none", "per_op", "full")
    # Muon steps on whole matrices; finer units are the parts of a block, where the decoder is ours.
    layouts: tuple[LayoutName, ...] = ("rows", "flat")
    layouts = ("matrices",) if base.optimizer == "muon" else layouts
    units: tuple[tuple[str, ...] | None, ...] = (None,)
    if setup.config is not None and not isinstance(setup.model, ShapedModel):
        units = (None, ("Attention", "FeedForward", "TokenEmbedding"))
    return Space(
        base,
        stages=(base.stage,) if "stage" in given else (0, 1, 2, 3),
        layouts=(base.layout,) if "layout" in given else layouts,
        units=(base.units,) if "units" in given else units,
        num_shards=(base.num_shards,) if {"dp_replicate", "dp_shard"} & given else (),
        prefetch_units=(None,) if "prefetch_bytes" in given else (1, 0, 2),
        bucket_bytes=(base.bucket_bytes,) if "bucket_bytes" in given else (1 << 20, 25 << 20),
        reduce_every=(base.reduce_every,),
        gathers=gathers or (base.gather,),
        reduces=reduces or (base.reduce,),
        activation_checkpointing=(
            (base.activation_checkpointing,)
            if "activation_checkpointing" in given
            else checkpointing
        ),
        micro_batches=(base.micro_batch,) if "micro_batch" in given else (),
        offloads=(base.offload,) if to_train else _offloads(setup),
        degrees=degrees,
        expert_degrees=_expert_degrees(setup) if is_wide and not to_train else (base.ep,),
        kernels=_kernels(setup) if is_wide and not to_train else (None,),
        narrows=is_wide,
        fills_pipelines=to_train or (is_wide and "accumulation" not in given),
        may_move_inputs=not given & {"offload", "offload_activations"}
        and setup.cluster.node.accelerator.asynchronous,
    )


def _degrees(setup: Setup) -> tuple[tuple[int, int, int], ...]:
    """Return the tensor, pipeline and context degrees that are worth asking about.

    Powers of two; tensor groups within a node, and pipelines with contexts on the largest clusters
    alone.
    """
    base, given, ranks = setup.candidate, setup.given, setup.cluster.num_ranks
    most = {"tp": min(setup.cluster.node.num_accelerators, ranks), "pp": 16, "cp": 8}
    powers = [1, 2, 4, 8, 16]
    choices = [
        (getattr(base, name),) if name in given else [n for n in powers if n <= min(top, ranks)]
        for name, top in most.items()
    ]
    return tuple(
        each
        for each in product(*choices)
        if not ranks % prod(each) and (min(each[1:]) == 1 or ranks > _MANY_RANKS)
    )


def _expert_degrees(setup: Setup) -> tuple[int, ...]:
    """Return the degrees over which experts may be spread: powers of two that divide them."""
    base, model = setup.candidate, setup.model
    num = model.num_experts if isinstance(model, ShapedModel) else 0
    if "ep" in setup.given or not num:
        return (base.ep,)
    most = min(num, setup.cluster.num_ranks)
    return tuple(n for n in (1 << i for i in range(10)) if n <= most and not num % n)


def _kernels(setup: Setup) -> tuple[tuple[Kernels, LossKind], ...]:
    """Return kernels with losses: what the user has decided, else all that may be."""
    base, given = setup.candidate, setup.given
    pairs: tuple[tuple[Kernels, LossKind], ...] = (
        *(("compiled", "fused"), ("compiled", "compiled")),
        *(("eager", "fused"), ("eager", "eager")),
    )
    if "loss" in given:
        pairs = (("compiled", base.loss), ("eager", base.loss))
    if "kernels" in given:
        pairs = tuple(pair for pair in pairs if pair[0] == base.kernels)
    return pairs


def limits_of(setup: Setup, request: PlanRequest) -> Limits:
    """Return what the plans of a search have to keep to."""
    memory = request.max_memory
    return Limits(
        max_memory_bytes=memory if isinstance(memory, int) else None,
        tokens_per_step=setup.tokens_per_step or _compared_tokens(setup),
        target_tokens_per_s=request.target_tokens_per_s,
    )


def _compared_tokens(setup: Setup) -> int | None:
    """Return the tokens of a step at which plans are compared, where the user has named none.

    Some 100 thousand of each rank, whose windows many micro-batches divide, and no more than
    ``_MOST_TOKENS`` of all. None where the user has decided accumulation, or there can be none.
    """
    base, given = setup.candidate, setup.given
    if "accumulation" in given or base.step_in_backward:
        return None
    each = setup.cluster.num_ranks * setup.model.seq
    most = max(1, _MOST_TOKENS // each)
    windows = _WINDOWS * max(1, 2048 // setup.model.seq)
    if "micro_batch" in given:
        windows = base.micro_batch
    elif windows > most:
        windows = 1 << most.bit_length() - 1
    return windows * each


def _offloads(setup: Setup) -> tuple[Offload, ...]:
    """Return where state may rest; a device that is the host has nowhere else."""
    offload = setup.candidate.offload
    inputs = {"offload_activations"}
    is_given = {name for name in setup.given - inputs if name.startswith("offload")}
    if is_given or not setup.cluster.node.accelerator.asynchronous:
        return (offload,)
    wholly = Offload(optimizer="cpu"), Offload("cpu", optimizer="cpu")
    found = [Offload(), Offload(optimizer="cpu", fraction=0.5), *wholly]
    found += [replace(each, step_on="device") for each in wholly]
    return tuple(replace(each, activations=offload.activations) for each in found)
