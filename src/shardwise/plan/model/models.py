"""Where modules to plan for come from: a preset, a Hugging Face config, or the user's own file.

A `ModelSource` builds its module on the meta device, so nothing is allocated and no weights are
needed; nothing is downloaded.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.keys import near_miss
from shardwise.plan.model.activations import Implementation
from shardwise.plan.model.config_keys import read_config, unknown_keys
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.shapes import DecoderShape, shape_from_config
from shardwise.spelling import did_you_mean

MakeBatch = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], Tensor]
# Families whose layers transformers writes as Llama's, which formulas know.
_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelSource:
    """How to build a module on meta, what to feed it, and what to call its loss.

    ``build(checkpointed)`` gives a new module; ``make_batch(micro_batch, seq)`` and
    ``loss(model, batch)`` are called on fake tensors. ``seq`` is the usual window, ``max_seq`` the
    longest that the model takes (None: any). ``shape`` is there where formulas
    know the model too, and ``eager`` says how its layers are written. ``fed`` is what a user whose
    module fails should know of its batch.
    """

    name: str
    seq: int
    build: Callable[[bool], nn.Module]
    make_batch: MakeBatch
    loss: Loss
    max_seq: int | None = None
    shape: DecoderShape | None = None
    eager: Implementation = "decoder"
    notes: tuple[str, ...] = ()
    fed: str = ""

    def window(self, seq: int | None) -> int:
        """Return the tokens of a window: ``seq``, or the usual ones. **Raises** ConfigError."""
        asked = self.seq if seq is None else seq
        if asked < 1 or (self.max_seq is not None and asked > self.max_seq):
            most = "" if self.max_seq is None else f" to {self.max_seq}"
            raise ConfigError(f"seq={asked}: {self.name} takes windows of 1{most} tokens")
        return asked


def shape_source(name: str, shape: DecoderShape, seq: int) -> ModelSource:
    """Return the source of a plain decoder of a shape.

    **Raises** ConfigError, when it is built, for a mixture of experts: no trace shows its routing.
    """
    source = module_source(name, lambda checkpointed: _traceable(shape, checkpointed), seq)
    return replace(source, max_seq=shape.positions or None, shape=shape)


def _traceable(shape: DecoderShape, checkpointed: bool) -> nn.Module:
    if shape.experts is not None:
        raise ConfigError(
            "model: a mixture of experts cannot be traced from its shape, since its routing "
            "depends on values; plan it by the formulas of its shape"
        )
    return PlainDecoder(shape, checkpointed)


def module_source(name: str, build: Callable[[bool], nn.Module], seq: int) -> ModelSource:
    """Return the source of a module that takes ids and targets and returns its loss.

    ``build(checkpointed)`` is called on the meta device. So the built-in decoder comes in.
    """
    return ModelSource(
        name=name,
        seq=seq,
        build=lambda checkpointed: _on_meta(lambda: build(checkpointed)),
        make_batch=lambda micro_batch, seq: (_ids(micro_batch, seq), _ids(micro_batch, seq)),
        loss=lambda model, batch: model(*batch),
    )


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _ids(micro_batch: int, seq: int) -> Tensor:
    return torch.zeros(micro_batch, seq, dtype=torch.int64)


# -- Hugging Face
def huggingface_source(path: Path) -> ModelSource:
    """Return the source of a causal language model from its ``config.json``, offline.

    With transformers installed it is the very class that trains; without it a Llama- or GPT-2-like
    config becomes a plain decoder of its shape.

    **Raises** ConfigError when the file is not there or not a config, its ``model_type`` is
    unknown, a key is misspelt, or a size is not above 0.
    """
    config = read_config(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    seq = min(longest, 4096) if isinstance(longest, int) and longest > 0 else 2048
    if importlib.util.find_spec("transformers") is None:
        source = shape_source(name, _shape_without_transformers(config), seq)
        note = (
            f"transformers is not installed: {name} is planned as a plain decoder of its shape; "
            "`pip install transformers` plans the class itself"
        )
        return replace(source, notes=(note,))
    kind = _config_class(config, path)
    unknown = unknown_keys(config, kind, path)
    notes = [f"{path}: no keys of {kind.__name__}: {', '.join(unknown)}"] if unknown else []
    shape, is_known = _shape_or_none(config), config["model_type"] in _LIKE_LLAMA
    if shape is not None and not is_known:
        notes.append(
            f"{name} is planned as a plain decoder of its shape, without dropout; --units with the "
            f"class of its layers traces {kind.__name__.removesuffix('Config')} itself"
        )
    return ModelSource(
        name=name,
        seq=seq,
        build=lambda checkpointed: _build_huggingface(kind, config, checkpointed, path),
        make_batch=_labelled,
        loss=_huggingface_loss,
        max_seq=longest if isinstance(longest, int) else None,
        shape=shape,
        eager="transformers" if is_known else "decoder",
        notes=tuple(notes),
    )


def _shape_without_transformers(config: dict[str, Any]) -> DecoderShape:
    try:
        return shape_from_config(config)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. transformers is not installed; with it (`pip install transformers`) any of "
            "its causal language models can be planned"
        ) from None


def _shape_or_none(config: dict[str, Any]) -> DecoderShape | None:
    try:
        return shape_from_config(config)
    except ConfigError:
        return None


def _config_class(config: dict[str, Any], path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    kind = str(config["model_type"])
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING, n=3)
        raise ConfigError(
            f"model: {path}: model_type {kind!r} is unknown to the installed transformers{hint}"
        )
    return CONFIG_MAPPING[kind]


def _build_huggingface(
    kind: Any, config: dict[str, Any], checkpointed: bool, path: Path
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    def build(attention: str) -> nn.Module:
        settings = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
        made = kind.from_dict({**settings, "use_cache": False})
        options = {"dtype": torch.float32, "attn_implementation": attention}
        return _on_meta(lambda: AutoModelForCausalLM.from_config(made, **options))

    try:
        try:
            model = build("sdpa")
        except ValueError as error:
            if "attention" not in str(error):
                raise
            model = build("eager")
    except Exception as error:  # each class checks its config in its own way
        raise ConfigError(f"model: {path}: {' '.join(str(error).split())}") from error
    if checkpointed:
        checkpoint_layers(model)
    return model


def _labelled(micro_batch: int, seq: int) -> dict[str, Tensor]:
    ids = _ids(micro_batch, seq)
    return {"input_ids": ids, "labels": ids}


def _huggingface_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with _windows_not_packed():
        loss: Tensor = model(**batch).loss
    return loss


@contextmanager
def _windows_not_packed() -> Iterator[None]:
    """Tell transformers that each window is one text, which it reads from the positions' values.

    On fake tensors it cannot, and would build a mask that no run without packing has.
    """
    from transformers import masking_utils

    reads: Any = getattr(masking_utils, "find_packed_sequence_indices", None)
    if reads is None:
        yield
        return

    def not_packed(*args: Any, **kwargs: Any) -> None:
        reads(*args, **kwargs)

    masking_utils.find_packed_sequence_indices = not_packed
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = reads


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute each layer in backward: as the model itself offers it, else layer by layer.

    **Raises** ConfigError when the model offers nothing and has no list of layers.
    """
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable = getattr(model, name, None)
        if enable is not None:
            enable({"use_reentrant": False})
            return
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        raise ConfigError(
            "activation_checkpointing: the model has no gradient_checkpointing_enable and no "
            "ModuleList of layers; apply torch.utils.checkpoint in its forward and leave this out"
        )
    for layer in lists[0]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


# -- the user's own file
def factory_source(path: Path, attribute: str, *, seq: int = 2048) -> ModelSource:
    """Return the source of a module that a function in the user's file builds.

    ``attribute()`` is called under ``torch.device("meta")``. The file may also have
    ``example_batch(micro_batch, seq)`` (default: int64 token ids of that shape) and
    ``loss(model, batch)`` (default: next-token cross-entropy of ``model(batch)``, or of its
    ``.logits``).

    **Raises** ConfigError when the file, the function, or the call fails.
    """
    file = _import_file(path)
    factory = _function(file, attribute, path)
    assert factory is not None
    make_batch = _function(file, "example_batch", path, required=False)
    loss = _function(file, "loss", path, required=False) or _next_token_loss
    name = f"{path.name}:{attribute}"
    model = _call_factory(factory, name)

    def build(checkpointed: bool) -> nn.Module:
        made = _call_factory(factory, name)
        if checkpointed:
            checkpoint_layers(made)
        return made

    fed = (
        f"; it was fed int64 token ids, as {path} has no example_batch(micro_batch, seq): write "
        "one that returns what the model takes, such as images, and loss(model, batch)"
    )
    notes = tuple(_notes(model))
    fed = "" if make_batch else fed
    return ModelSource(name, seq, build, make_batch or _ids, loss, notes=notes, fed=fed)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_planned_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours, as `python file.py` has them
    sys.modules[spec.name] = module  # what a dataclass in the file looks itself up by
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"model: importing {path}: {_one_line(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _function(file: ModuleType, name: str, path: Path, required: bool = True) -> Any:
    found = getattr(file, name, None)
    if found is None and not required:
        return None
    if not callable(found):
        names = [n for n, v in vars(file).items() if callable(v) and not n.startswith("_")]
        hint = near_miss(name, names, f"; it has {', '.join(names) or 'none'}")
        raise ConfigError(f"model: {path} has no function {name!r}{hint}")
    return found


def _call_factory(factory: Callable[[], Any], name: str) -> nn.Module:
    try:
        model = _on_meta(factory)
    except Exception as error:
        raise ConfigError(
            f"model: {name}() under torch.device('meta'): {_one_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {name}() returned a {type(model).__name__}, expected a Module")
    if next(model.parameters(), None) is None:
        raise ConfigError(f"model: {name}() returned a module without parameters")
    return model


def _notes(model: nn.Module) -> Iterator[str]:
    real = [n for n, p in model.named_parameters() if not p.is_meta]
    if real:
        yield (
            f"{len(real)} parameters ({real[0]}, ...) were allocated although the model was built "
            "on meta; planning does not need them"
        )
    times: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        times.setdefault(id(param), []).append(name)
    for names in times.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} are one parameter, counted once"


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    logits: Tensor = getattr(out, "logits", out)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
