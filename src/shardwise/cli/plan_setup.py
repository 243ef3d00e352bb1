"""The setup of a plan: model, cluster and candidate from a request, and the space of a search."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardwise.cli.run_settings import planned_keys, run_of_shape, trainable_degrees
from shardwise.errors import ConfigError
from shardwise.homes import Offload, offload_of
from shardwise.interop.foreign_settings import read_accelerate, read_deepspeed
from shardwise.keys import flag_of
from shardwise.plan.candidate import Candidate, Kernels, LossKind
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
from shardwise.plan.planning import Plan
from shardwise.plan.request import ModelRequest, PlanRequest
from shardwise.plan.searching import Limits, Space
from shardwise.plan.step.play import bytes_between_steps
from shardwise.quantities import format_bytes
from shardwise.stages import LayoutName
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.text import load_tokenizer

if TYPE_CHECKING:
    from shardwise.plan.model.models import ModelSource
    from shardwise.plan.planning import Model
    from shardwise.train.decoder import Decoder


_T = TypeVar("_T")
_PADDING_TO_MENTION = 0.03
_WINDOWS, _MOST_TOKENS = 48, 1 << 22  # of a rank, and of a step of large models
_MANY_RANKS = 512  # beyond which pipelines with contexts are tried too


@dataclass(frozen=True)
class PlanSetup:
    """The inputs of a plan, a search or a simulation.

    ``request`` has the keys of files too. ``tokens_per_step`` decides accumulation, if it is set.
    ``config`` is that of `shardwise train`, if the model is its decoder.
    """

    model: Model
    cluster: Cluster
    candidate: Candidate
    prices_of: Callable[[Candidate], Pricer]
    request: ModelRequest
    tokens_per_step: int | None
    notes: tuple[str, ...]
    config: TrainConfig | None

    @property
    def given(self) -> Set[str]:
        """Settings that the user decided, by a flag or in a file: a search varies the others."""
        return self.request.model_fields_set

    @property
    def is_written(self) -> bool:
        """True if the plan is written as a file of `shardwise train`."""
        return isinstance(self.request, PlanRequest) and self.request.write is not None


def set_up(name: str | None, request: ModelRequest) -> PlanSetup:
    """Resolve a request into a model, a cluster, a candidate and prices.

    A plan that is written is one of the decoder of `shardwise train`, also for a preset of its
    shape.

    **Raises** ConfigError naming the flag, file or key.
    """
    if name is None:
        raise ConfigError(
            "MODEL: name a preset, a config.json, file.py:factory or a YAML of `shardwise train`; "
            "`shardwise plan --list` has the presets, `shardwise plan --params 7e9` needs no model"
        )
    flags = request.model_fields_set
    file_keys: dict[str, object] = {}
    notes: tuple[str, ...] = ()
    for read, path in ((read_deepspeed, request.deepspeed), (read_accelerate, request.accelerate)):
        if path is not None:
            file_keys, report = read(path)
            ignored = (report.ignored | report.auto).items()
            notes = tuple(f"{path}: {key} not used: {why}" for key, why in ignored)
    config = load_config(Path(name), {}) if name.endswith((".yaml", ".yml")) else None
    if config is None:
        request = request.over(file_keys, file_keys.keys())
    else:
        decided = config.model_fields_set | file_keys.keys()
        request = request.over(planned_keys(config) | file_keys, decided)
    calibration = read_calibration(request.calibration) if request.calibration else None
    cluster = _cluster(request, request.ranks, calibration)
    candidate = _candidate(request, cluster)
    source = None if config is not None else _find_source(name, candidate)
    is_written = isinstance(request, PlanRequest) and request.write is not None
    has_layout = "layout" in request.given or (config is not None and not is_written)
    if is_written and source is not None and source.shape is not None:
        config = run_of_shape(source.shape, source.seq)
    model = _model(name, source, config, request.seq, candidate)
    varies = isinstance(request, PlanRequest) and request.search
    if not (varies or has_layout):
        candidate, layout_notes = _with_layout(candidate, model)
        notes += layout_notes
    fills = not varies or "micro_batch" in request.given
    candidate, tokens = _with_batch(candidate, request, flags, model.seq, fills=fills)
    config = config.model_copy(update={"seq": model.seq}) if config is not None else None
    prices_of = _prices(cluster, calibration)
    return PlanSetup(model, cluster, candidate, prices_of, request, tokens, notes, config)


def at_ranks(setup: PlanSetup, ranks: int) -> PlanSetup:
    """Return the setup on a cluster of another size, with another number of shards.

    **Raises** ConfigError where the ranks do not divide, or the setup is of a calibration.
    """
    if setup.request.calibration is not None:
        raise ConfigError("sweep: a calibration is of one number of ranks; leave one of them out")
    candidate = setup.candidate
    others = candidate.world_size // candidate.num_shards
    if ranks % others:
        raise ConfigError(f"sweep: {ranks} ranks do not divide by {others} (replicas x degrees)")
    cluster = _cluster(setup.request, ranks, None)
    candidate = replace(candidate, num_shards=ranks // others, copies=_copies(cluster))
    return replace(setup, cluster=cluster, candidate=candidate, prices_of=_prices(cluster, None))


def _cluster(request: ModelRequest, ranks: int | None, calibration: Calibration | None) -> Cluster:
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
        cluster = cluster_of(calibration)
    else:
        per_node = request.gpus_per_node
        ranks = ranks if ranks is not None else per_node or 8
        try:
            cluster = make_cluster(request.gpu, ranks, per_node, request.link, request.network)
        except ConfigError as error:
            message = str(error).replace("num_gpus", flag_of("ranks"))
            raise ConfigError(message.replace("gpus_per_node", flag_of("gpus_per_node"))) from None
    host = cluster.node.host
    host = replace(
        host,
        memory_bytes=request.host_memory or host.memory_bytes,
        nvme_bytes=request.disk_space or host.nvme_bytes,
    )
    return replace(cluster, node=replace(cluster.node, host=host))


def _candidate(request: ModelRequest, cluster: Cluster) -> Candidate:
    names = {field.name for field in fields(Candidate)}
    settings = {name: value for name, value in request if name in names and value is not None}
    # Gloo sends point to point, as the engine does there.
    is_gpu = cluster.node.accelerator.asynchronous
    transport = "coalesced" if is_gpu else "point_to_point"
    settings |= {
        "offload": offload_of(request.offload),
        "transport": transport,
        "copies": _copies(cluster),
    }
    candidate = Candidate(**settings)
    moves_inputs = candidate.offload.activations != "device"
    if moves_inputs and candidate.activation_checkpointing != "full":
        raise ConfigError(
            "offload: inputs of checkpointed blocks go to the host, and no block is "
            "checkpointed whole; add --activation-checkpointing full"
        )
    axes = request.axes.over(cluster.num_ranks)
    return replace(candidate, num_replicas=axes.dp_replicate, num_shards=axes.dp_shard)


def _copies(cluster: Cluster) -> int:
    """Return the number of further hosts that keep a rank's state in memory (`Checkpoints`)."""
    return min(1, cluster.num_nodes - 1)


def _find_source(name: str, candidate: Candidate) -> Preset | ModelSource:
    """Return the source of a name; a preset needs no torch, unless its units are given."""
    is_path = "/" in name or ":" in name or name.endswith((".json", ".py")) or not name.strip()
    if not is_path and not Path(name).is_dir() and candidate.units is None:
        return find_preset(name)
    return find_model(name)  # loads torch, so all else is checked before


def _model(
    name: str,
    source: Preset | ModelSource | None,
    config: TrainConfig | None,
    seq: int | None,
    candidate: Candidate,
) -> Model:
    """Return the model by the formulas of its shape, if it has one, otherwise the traced one.

    Tracing works for units of any classes, modules without formulas, and dropout. It has no
    degrees, and blocks are checkpointed whole or not at all.
    """
    has_units = candidate.units is not None
    is_split = candidate.world_size != candidate.data_parallel or candidate.ep > 1
    is_plain = candidate.activation_checkpointing in ("none", "full")
    is_eager = (candidate.kernels, candidate.loss) == ("eager", "eager")
    needs_shape = is_split or not is_plain or not is_eager
    if source is None:
        assert config is not None  # without a source there is the config of a file
        vocab = config.vocab or load_tokenizer(config.tokenizer).vocab
        if needs_shape or config.experts or not (has_units or config.dropout):
            return ShapedModel(Path(name).name, config.shape(vocab), seq or config.seq)
        source = _decoder_source(Path(name).name, config, vocab)
    shape = source.shape
    if shape is not None and (not has_units or shape.experts is not None):
        if isinstance(source, Preset):
            return ShapedModel(source.name, shape, seq or source.seq)
        eager = source.eager if config is None else "decoder"  # that of `shardwise train`
        return ShapedModel(source.name, shape, source.window(seq), eager=eager, notes=source.notes)
    if needs_shape:
        flags = "those flags" if shape is None else "--units"
        raise ConfigError(
            f"model: {name} is planned by tracing it, which shows no tensor, pipeline, context or "
            "expert degree, no checkpointing of parts of a block, and no kernels but eager ones; "
            f"leave {flags} out, or give a preset or a config.json of nearly its shape"
        )
    assert not isinstance(source, Preset)
    from shardwise.plan.model.models import TracedModel

    return TracedModel(source, seq)


def _decoder_source(name: str, config: TrainConfig, vocab: int) -> ModelSource:
    from shardwise.plan.model.models import module_source
    from shardwise.train.decoder import Decoder

    def build(checkpointed: bool) -> Decoder:
        update = {"activation_checkpointing": checkpointed}
        return Decoder(config.model_copy(update=update), vocab)

    return module_source(name, build, config.seq)


def _with_layout(candidate: Candidate, model: Model) -> tuple[Candidate, tuple[str, ...]]:
    """Return the candidate with the best layout if the user named none, and a note about it."""
    if candidate.optimizer == "muon":  # it reads whole matrices
        return replace(candidate, layout="matrices"), ()
    flat, tape = replace(candidate, layout="flat"), model.tape(candidate)
    rows_bytes, flat_bytes = (
        sum(bytes_between_steps(tape, choice.with_context_shards).bytes_by_place.values())
        for choice in (candidate, flat)
    )
    saved = rows_bytes - flat_bytes
    if saved <= _PADDING_TO_MENTION * flat_bytes:
        return candidate, ()
    return flat, (
        f"layout flat is chosen: rows would take {format_bytes(saved)} more a rank, which is "
        'padding; pass layout="flat" to shard() too, or plan rows by --layout rows',
    )


def assumed_notes(setup: PlanSetup) -> tuple[str, ...]:
    """Name the settings of a model's kernels that the user has not decided.

    There are none for `shardwise train`, which has one implementation, and for traced modules.
    """
    names = ("kernels", "loss", "optimizer_kernel")
    assumed = [
        f"{flag_of(name)} {getattr(setup.candidate, name)}"
        for name in names
        if name not in setup.given
    ]
    if not assumed or setup.config is not None or not isinstance(setup.model, ShapedModel):
        return ()
    return (f"assumed: {', '.join(assumed)}; other kernels take other memory and time",)


def padding_notes(plan: Plan) -> tuple[str, ...]:
    """Return a note about padding if another layout would save much of it."""
    padding, shards = plan.played.padding_bytes, plan.played.device.param_shards
    candidate = plan.candidate
    if candidate.layout != "rows" or padding <= _PADDING_TO_MENTION * shards:
        return ()
    parts = str(candidate.num_shards * candidate.cp)
    if candidate.ep > 1:
        parts += f", and experts by {candidate.expert_shards},"
    return (
        f"rows that do not divide by {parts} cost {format_bytes(padding)} of "
        f"padding a rank ({padding / max(shards, 1):.1%} of its shards); --layout flat costs none",
    )


def _with_batch(
    candidate: Candidate, request: ModelRequest, flags: Set[str], seq: int, *, fills: bool
) -> tuple[Candidate, int | None]:
    """Return the candidate with the accumulation of its batch, and the tokens that decide it.

    A flag's tokens are met within one per cent, a file's batch exactly. With ``fills`` False, a
    search decides accumulation.
    """
    micro_batch, ranks = candidate.micro_batch, candidate.data_parallel
    tokens, unit, name = request.tokens_per_step, 1, "tokens_per_step"
    if tokens is None:
        windows = request.global_batch
        if windows is None:
            return candidate, None
        if request.accumulation is not None:
            changed = flags & {"accumulation", "micro_batch", "ranks", "dp_replicate"}
            if not changed and windows != micro_batch * candidate.accumulation * ranks:
                raise ConfigError(
                    f"global_batch: {windows} are not micro_batch {micro_batch} x accumulation "
                    f"{candidate.accumulation} x {ranks} ranks; leave one of them out, or say "
                    "--ranks"
                )
            return candidate, None
        tokens, unit, name = windows * seq, seq, "global_batch"
    if not fills:
        return candidate, tokens
    per_pass = micro_batch * ranks * seq
    accumulation = round(tokens / per_pass)
    allowed = tokens // 100 if unit == 1 else 0
    if not accumulation or abs(accumulation * per_pass - tokens) > allowed:
        raise ConfigError(
            f"{name}: expected a multiple of {per_pass // unit:,} (micro_batch {micro_batch} x "
            f"{ranks} ranks{f' x {seq} tokens' if unit == 1 else ''}), got {tokens // unit:,}; "
            f"take {max(accumulation, 1) * per_pass // unit:,}, or change micro_batch or ranks"
        )
    return replace(candidate, accumulation=accumulation), tokens


def _prices(cluster: Cluster, calibration: Calibration | None) -> Callable[[Candidate], Pricer]:
    if calibration is None:
        return lambda candidate: Prices(cluster, candidate)
    return lambda candidate: CalibratedPrices(calibration, candidate)


def space_of(setup: PlanSetup) -> Space:
    """Return the space of a search, which varies every setting that the user did not decide.

    A plan that is written has no offloading, and no degrees that `shardwise train` refuses.

    **Raises** ConfigError where it refuses all of them.
    """
    base, given, model = setup.candidate, setup.given, setup.model
    ranks, node = setup.cluster.num_ranks, setup.cluster.node
    is_wide = isinstance(model, ShapedModel) and setup.config is None
    varies_all = is_wide and not setup.is_written

    def values_of(name: str, base: _T, *tried: _T) -> tuple[_T, ...]:
        """Return the user's value of a setting, or the values to try."""
        return (base,) if name in given or not tried else tried

    degrees = _degrees(setup) if is_wide else (base.degrees,)
    if setup.is_written and setup.config is not None:
        degrees = trainable_degrees(base, degrees, setup.config, "accumulation" in given)
    # Muon steps on whole matrices. Finer units are parts of a block of the built-in decoder.
    layouts: tuple[LayoutName, ...]
    layouts = ("matrices",) if base.optimizer == "muon" else ("rows", "flat")
    units: tuple[tuple[str, ...] | None, ...] = (None,)
    if setup.config is not None and not isinstance(model, ShapedModel):
        units = (None, ("Attention", "FeedForward", "TokenEmbedding"))
    num_experts = model.num_experts if isinstance(model, ShapedModel) else 0
    most = min(num_experts, ranks)
    spreads = [n for n in (1 << i for i in range(10)) if n <= most and not num_experts % n]
    return Space(
        base,
        stages=values_of("stage", base.stage, 0, 1, 2, 3),
        layouts=values_of("layout", base.layout, *layouts),
        units=values_of("units", base.units, *units),
        num_shards=(base.num_shards,) if {"dp_replicate", "dp_shard"} & given else (),
        prefetch_units=(None,) if "prefetch_bytes" in given else (1, 0, 2),
        bucket_bytes=values_of("bucket_bytes", base.bucket_bytes, 1 << 20, 25 << 20),
        reduce_every=(base.reduce_every,),
        activation_checkpointing=values_of(
            "activation_checkpointing",
            base.activation_checkpointing,
            *(("none", "per_op", "full") if varies_all else ("none", "full")),
        ),
        micro_batches=(base.micro_batch,) if "micro_batch" in given else (),
        offloads=(base.offload,) if setup.is_written else _offloads(setup),
        degrees=degrees,
        expert_degrees=values_of("ep", base.ep, *(spreads if varies_all else ())),
        kernels=_kernels(setup) if varies_all else (None,),
        narrows=is_wide,
        fills_pipelines=setup.is_written or (is_wide and "accumulation" not in given),
        may_move_inputs="offload" not in given and node.accelerator.asynchronous,
    )


def _degrees(setup: PlanSetup) -> tuple[tuple[int, int, int], ...]:
    """Return the tensor, pipeline and context degrees that a search tries.

    They are powers of two. Tensor groups are within a node; pipelines with contexts are tried on
    the largest clusters only.
    """
    base, given, ranks = setup.candidate, setup.given, setup.cluster.num_ranks
    most = {"tp": setup.cluster.node.num_accelerators, "pp": 16, "cp": 8}
    choices = [
        (getattr(base, name),)
        if name in given
        else [n for n in (1, 2, 4, 8, 16) if n <= min(top, ranks)]
        for name, top in most.items()
    ]
    return tuple(
        degrees
        for degrees in product(*choices)
        if not ranks % prod(degrees) and (min(degrees[1:]) == 1 or ranks > _MANY_RANKS)
    )


def _kernels(setup: PlanSetup) -> tuple[tuple[Kernels, LossKind], ...]:
    """Return the pairs of kernels and losses to try: the user's, or all."""
    base, given = setup.candidate, setup.given
    losses: dict[Kernels, tuple[LossKind, ...]] = {
        "compiled": ("fused", "compiled"),
        "eager": ("fused", "eager"),
    }
    return tuple(
        (kernels, loss)
        for kernels, possible in losses.items()
        for loss in ((base.loss,) if "loss" in given else possible)
        if "kernels" not in given or kernels == base.kernels
    )


def _offloads(setup: PlanSetup) -> tuple[Offload, ...]:
    """Return the offload settings to try; on a CPU there is no offload."""
    offload = setup.candidate.offload
    # If the user gave activations only, all offloads of state are tried with them.
    is_given = "offload" in setup.given and (offload.moves_state or offload.activations == "device")
    if is_given or not setup.cluster.node.accelerator.asynchronous:
        return (offload,)
    full = Offload(optimizer="cpu"), Offload("cpu", optimizer="cpu")
    choices = [Offload(), Offload(optimizer="cpu", fraction=0.5), *full]
    choices += [replace(choice, step_on="device") for choice in full]
    return tuple(replace(choice, activations=offload.activations) for choice in choices)


def limits_of(setup: PlanSetup) -> Limits:
    """Return the limits of a search's plans."""
    request = setup.request
    assert isinstance(request, PlanRequest)  # others have no search
    return Limits(
        max_memory_bytes=request.max_memory,
        tokens_per_step=setup.tokens_per_step or _compared_tokens(setup),
        target_tokens_per_s=request.target_tokens_per_s,
    )


def _compared_tokens(setup: PlanSetup) -> int | None:
    """Return the tokens of a step at which plans are compared, if the user has given none.

    They are some 100 thousand of each rank, in windows that many micro-batches divide, and at most
    ``_MOST_TOKENS`` of all ranks. None if the user has decided accumulation.
    """
    base, given = setup.candidate, setup.given
    if "accumulation" in given:
        return None
    window_tokens = setup.cluster.num_ranks * setup.model.seq  # with one window on each rank
    most = max(1, _MOST_TOKENS // window_tokens)
    windows = _WINDOWS * max(1, 2048 // setup.model.seq)
    if "micro_batch" in given:
        windows = base.micro_batch
    elif windows > most:
        windows = 1 << most.bit_length() - 1
    return windows * window_tokens
