"""Load Hugging Face weights into shards: each rank reads its own, none holds the whole model.

Note [The plain loader, but for the weights]
Everything but the reading of weights is transformers' own ``from_pretrained``: the config and its
overrides, the dtype, the model built on the meta device, the renamed and joined keys, the report on
missing weights, the generation config. It reads the weights in two methods of the model's class. So
it is called on a subclass made for the one call, which replaces these two. Afterwards the model
gets its own class back. No class of transformers changes.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import build_glob_alternation
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _get_model_class
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.restore import tensors_differ
from shardwise.checkpoint.source import Source
from shardwise.config import PrecisionLike, Schedule, Units, UnitsLike
from shardwise.convert.huggingface import open_huggingface, open_weight_files
from shardwise.engine.api import engine_of, is_sharded, shard
from shardwise.engine.model import noted_state
from shardwise.engine.renamed import move_renamed
from shardwise.errors import CheckpointError, ConfigError
from shardwise.interop.transformers.saving import prepare
from shardwise.interop.transformers.weights import (
    Recipe,
    initialise_missing,
    match_keys,
    read_weights,
)
from shardwise.surface.model import sharded_class
from shardwise.unit.materialize import leave_unwritten

_REFUSED = {
    "device_map": "a sharded model is where its mesh is",
    "distributed_config": "Shardwise does the sharding; say how by stage= and mesh=",
    "tp_plan": "a tensor-parallel model cannot be sharded",
    "quantization_config": "quantized weights have no shards",
    "state_dict": "the weights are read from files; give their folder",
    "gguf_file": "the weights are read from safetensors files",
    "output_loading_info": "read the report that is logged",
}
_RENAMED = ("reduce_every", "prefetch_bytes")  # parameters of version 0.1


def from_pretrained(
    path: str | Path,
    *,
    model_class: Any = None,
    stage: int = 3,
    precision: PrecisionLike = "fp32",
    layout: str = "rows",
    units: UnitsLike = None,
    mesh: DeviceMesh | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Any:
    """Load a model of transformers from local safetensors files straight into shards.

    Every rank calls it. The result is that of `shardwise.shard` and `prepare` on transformers'
    ``from_pretrained``, values and dtypes to the bit. ``path`` is a folder with ``config.json`` and
    ``model.safetensors`` or an index of several, or a name in the local cache of the hub.
    ``model_class`` is a model's class or an Auto class; by default the class that ``config.json``
    names. ``stage`` to ``prefetch_bytes`` are those of `shardwise.shard`; ``options`` go to
    transformers (``dtype=``, ``attn_implementation=``, ``num_labels=`` and other config entries).

    **Cost** reads this rank's slice of each parameter. The sources of a conversion that is not by
    rows are read whole (Note [Conversions by rows]), as are two copies of a tied weight, to compare
    them. In memory: the shards, 64 MiB, and one module's parameters.

    **Raises** ConfigError for options that contradict sharding; CheckpointError for weights that
    are no safetensors; transformers' own errors for a model or a shape that does not fit.
    """
    for name, reason in _REFUSED.items():
        if options.get(name) is not None:
            raise ConfigError(f"{name}: not with sharded weights: {reason}")
    chosen = Units.of(units)
    if chosen.init is not None:
        raise ConfigError("units.init: from_pretrained fills the model from the file; leave it out")
    settings: dict[str, Any] = {
        "stage": stage,
        "precision": precision,
        "layout": layout,
        "mesh": mesh,
        "units": replace(chosen, init=leave_unwritten),
        "schedule": schedule,
    }
    old = {name: options.pop(name) for name in _RENAMED if name in options}
    move_renamed(settings, old, "from_pretrained")
    options.setdefault("local_files_only", True)
    own = _class_of(path, model_class, options)
    body = {  # see Note [The plain loader, but for the weights]
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "_load_pretrained_model": staticmethod(partial(_shard_and_read, settings)),
        "_finalize_model_loading": staticmethod(_finalize),
    }
    model = type(own)(own.__name__, (own,), body).from_pretrained(path, **options)
    model.__class__ = sharded_class(own)
    return prepare(model)


def load_weights(model: Any, path: str | Path) -> None:
    """Read Hugging Face's safetensors weights into a model that is sharded already.

    Every rank calls it. ``path`` is a folder, a file or an index. Missing weights keep their values
    and are reported in the log, as by transformers. A model of another library reads its own names.
    A model that `fully_shard` has sharded on the meta device gets its memory here; its missing
    weights are then drawn by the model's own rules, as by `from_pretrained`.

    **Cost** as of `from_pretrained`.

    **Raises** CheckpointError when there are no such weights, or one has another shape; ConfigError
    when a module on the meta device has a buffer that no file holds and no rule fills.
    """
    had_memory = not any(param.is_meta for param in model.parameters())
    if not had_memory:
        _give_memory(model)
    engine_of(model).finish_pending_work("load_weights()")
    source = open_huggingface(Path(path))
    report = _report_of(model)
    is_theirs = isinstance(model, transformers.PreTrainedModel)
    mapping = get_model_conversion_mapping(model) if is_theirs else []
    recipes = match_keys(model, source.tensors, mapping, report)
    if report.mismatched_keys:
        name, there, here = min(report.mismatched_keys)
        raise CheckpointError(
            f"{source.where}: '{name}' has shape {tuple(there)} there and {tuple(here)} here; load "
            "weights of this model, or build the model from their config"
        )
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    _read(model, source, recipes, dtypes, report)
    if not had_memory and is_theirs:
        initialise_missing(model, recipes.keys(), dtypes)
    if not is_theirs:
        _check_names(model, source, report)
        return
    for name in model.all_tied_weights_keys:
        report.missing_keys.discard(name)
    _log_report(model, str(path), report)


def _give_memory(model: nn.Module) -> None:
    """Give a model that `fully_shard` has sharded on the meta device its slices, uninitialised."""
    state = noted_state(model)
    if state is None or not is_sharded(model):
        return  # the caller refuses it
    if not isinstance(model, transformers.PreTrainedModel):
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if buffer.is_meta and name not in saved:
                raise ConfigError(
                    f"load_weights: buffer '{name}' is on the meta device, no file holds it, and a "
                    f"{type(model).__name__} has no rule of transformers that fills it; call "
                    "model.to_empty(device=...) first and fill it"
                )
    model.to_empty(device=state.device)
    for module in model.modules():  # transformers' rules skip modules that they saw on meta
        vars(module).pop("_is_hf_initialized", None)


def _shard_and_read(
    settings: Mapping[str, Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    expected_keys: Any = None,
) -> tuple[LoadStateDictInfo, None]:
    """Shard the model, which is on the meta device, and read its values."""
    if load_config.hf_quantizer is not None:
        method = getattr(load_config.hf_quantizer, "quantization_config", None)
        kind = getattr(method, "quant_method", None)
        raise ConfigError(
            f"from_pretrained: the weights are quantized{f' ({kind})' if kind else ''}, and "
            "quantized weights cannot be sharded; give the path of weights in a float dtype, "
            "and no quantization_config"
        )
    files = checkpoint_files or ()
    others = [f for f in files if not f.endswith(".safetensors")]
    if others or not files:
        what = f"{others[0]} is no safetensors file" if others else "there are no weights"
        raise CheckpointError(
            f"{what}; load it with transformers and save_pretrained() it as safetensors"
        )
    source = open_weight_files([Path(f) for f in files])
    report = _report_of(model)
    mapping = load_config.weight_mapping or []
    recipes = match_keys(model, source.tensors, mapping, report)
    model._weight_conversions = [used for used in mapping if used.was_used()]
    _set_dtypes(model, recipes, load_config.dtype_plan or {})
    _tie(model, source, recipes, report)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    shard(model, **settings)
    _read(model, source, recipes, dtypes, report)
    initialise_missing(model, recipes.keys(), dtypes)
    return report, None


def _finalize(model: Any, load_config: Any, report: LoadStateDictInfo) -> LoadStateDictInfo:
    """Report missing and unexpected weights and other shapes, as transformers does."""
    where = str(load_config.pretrained_model_name_or_path)
    _log_report(model, where, report, load_config.ignore_mismatched_sizes)
    return report


def _class_of(path: str | Path, model_class: Any, options: Mapping[str, Any]) -> Any:
    """Return the class of the model: the given one, or the choice of an Auto class or config."""
    is_auto = isinstance(model_class, type) and issubclass(model_class, _BaseAutoModelClass)
    if model_class is not None and not is_auto:
        return model_class
    where = {k: options[k] for k in ("local_files_only", "subfolder", "revision") if k in options}
    config = options.get("config") or transformers.AutoConfig.from_pretrained(path, **where)
    if is_auto:
        mapping = model_class._model_mapping
        if type(config) not in mapping:
            raise ConfigError(
                f"model_class={model_class.__name__} has no model for a {type(config).__name__}, "
                f"which is the config in {path}; give another class, or none"
            )
        return _get_model_class(config, mapping)
    names = getattr(config, "architectures", None) or ()
    found = next((c for n in names if (c := getattr(transformers, n, None)) is not None), None)
    if found is None:
        raise ConfigError(
            f"{path}: its config names {', '.join(names) or 'no architecture'}, which is no class "
            "of transformers; give model_class="
        )
    return found


def _report_of(model: nn.Module) -> LoadStateDictInfo:
    return LoadStateDictInfo(
        missing_keys=set(model.state_dict()),
        unexpected_keys=set(),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def _check_names(model: nn.Module, source: Source, report: LoadStateDictInfo) -> None:
    """Refuse weights of another model. Tied weights are stored under one name."""
    state = model.state_dict(keep_vars=True)
    read = {id(state[name]) for name in state if name not in report.missing_keys}
    missing = sorted(n for n in report.missing_keys if id(state[n]) not in read)
    if missing or report.unexpected_keys:
        raise CheckpointError(
            f"{source.where} is not of this {type(model).__name__}: it lacks {missing[:3]} "
            f"and has {sorted(report.unexpected_keys)[:3]} beyond"
        )


def _log_report(
    model: Any, where: str, report: LoadStateDictInfo, ignores_shapes: bool = False
) -> None:
    """Log the report on rank 0; raise on all ranks where transformers would."""
    log = logging.getLogger("transformers.modeling_utils")
    if engine_of(model).comm.control.rank != 0:
        log = logging.Logger("silent", logging.CRITICAL + 1)
    model._adjust_missing_and_unexpected_keys(report)
    log_state_dict_report(model, where, ignores_shapes, report, log)


def _read(
    model: nn.Module,
    source: Source,
    recipes: Mapping[str, Recipe],
    dtypes: Mapping[str, torch.dtype],
    report: LoadStateDictInfo,
) -> None:
    """Read the weights on all ranks; if one fails, the model is unusable until the next load."""
    engine = engine_of(model)
    why = f"reading {source.where} did not come to its end; load the weights again"
    with engine.status.writing(why):
        on_all_ranks(
            engine.comm.control, lambda: read_weights(model, source, recipes, dtypes, report)
        )


def _set_dtypes(
    model: nn.Module, names: Collection[str], dtype_plan: Mapping[str, torch.dtype]
) -> None:
    """Cast the parameters that the model keeps in another dtype; all are on meta."""
    if not dtype_plan:
        return
    pattern, pattern_of_group, _ = build_glob_alternation(list(dtype_plan))
    for name in names:
        found = pattern.search(name)
        if found is not None and found.lastgroup is not None:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            dtype = dtype_plan[pattern_of_group[found.lastgroup]]
            for tensors in (module._parameters, module._buffers):
                before = tensors.get(attribute)
                if before is not None and before.dtype != dtype:
                    after: Any = before.detach().to(dtype)
                    if isinstance(before, nn.Parameter):
                        after = nn.Parameter(after, requires_grad=before.requires_grad)
                    tensors[attribute] = after


def _tie(model: Any, source: Source, recipes: dict[str, Recipe], report: LoadStateDictInfo) -> None:
    """Tie what transformers ties; if both weights are stored, only if they are equal."""
    for target, original in list(model.all_tied_weights_keys.items()):
        if target not in recipes or original not in recipes:
            continue
        pair = recipes[target], recipes[original]
        infos = [recipe.sources[0][1] for recipe in pair if recipe.converter is None]
        # Converted tensors count as different.
        if len(infos) == 2 and not tensors_differ(source, *infos):
            del recipes[target]
            report.missing_keys.add(target)
        else:
            del model.all_tied_weights_keys[target]
            logging.getLogger("transformers.modeling_utils").warning(
                f"the config ties {original} to {target}, but they are stored with different "
                "values: they are not tied. tie_word_embeddings=False silences this"
            )
    model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
