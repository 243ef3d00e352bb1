"""Sources of modules to plan for: a shape, a Hugging Face config, or a function of the user.

A `ModelSource` builds its module on the meta device. Nothing is allocated or downloaded.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.keys import near_miss
from shardwise.plan.candidate import ALL_DEGREES, Candidate
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.layers import Implementation
from shardwise.plan.model.shapes import DecoderShape, read_config, shape_from_config
from shardwise.plan.model.tape import Tape
from shardwise.plan.model.tracing import trace
from shardwise.quantities import format_count
from shardwise.spelling import did_you_mean

MakeBatch = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], Tensor]
# Families with layers that transformers writes as Llama's, for which there are formulas.
_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
# Older keys that transformers still reads, and keys that a hub adds.
_ALSO_READ = (
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "n_ctx",
    "auto_map",
    "quantization_config",
    "task_specific_params",
    "output_attentions",
    "attn_implementation",
)


@dataclass(frozen=True)
class ModelSource:
    """Functions that build a module on meta, make its batch, and compute its loss.

    ``build(checkpointed)`` returns a new module; ``make_batch(micro_batch, seq)`` and
    ``loss(model, batch)`` are called on fake tensors. ``seq`` is the usual window, ``max_seq`` the
    longest that the model takes (None: any). ``shape`` is set if there are formulas for the model
    too; ``eager`` is the implementation of its layers. ``batch_hint`` is added to the error of a
    module that fails; it describes the batch.
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
    batch_hint: str = ""

    def window(self, seq: int | None) -> int:
        """Return the tokens of a window: ``seq``, or the usual ones. **Raises** ConfigError."""
        length = self.seq if seq is None else seq
        if length < 1 or (self.max_seq is not None and length > self.max_seq):
            most = "" if self.max_seq is None else f" to {self.max_seq}"
            raise ConfigError(f"seq={length}: {self.name} takes windows of 1{most} tokens")
        return length


class TracedModel:
    """The tapes of a source's module for windows of ``seq`` tokens.

    A tape depends on a candidate's micro-batch, precision, checkpointing and units alone, so a
    search over stages, ranks and buffers traces once per combination of those.

    **Raises** ConfigError for a window that the model does not take.
    """

    def __init__(self, source: ModelSource, seq: int | None = None) -> None:
        self.name = source.name
        self.seq = source.window(seq)
        self._source = source
        self._tapes: dict[object, Tape] = {}
        self._notes = dict.fromkeys(source.notes)
        self._modules = {False: source.build(False)}

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self._modules[False].parameters())

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the tapes so far were made."""
        return tuple(self._notes)

    def check_degrees(self, candidate: Candidate) -> None:
        """Refuse degrees that split the model itself. **Raises** ConfigError, naming one."""
        for name in ALL_DEGREES:
            degree = getattr(candidate, name)
            if degree != 1:
                raise ConfigError(
                    f"{name}={degree}: a traced module is whole on each rank; plan a preset or a "
                    "config by its shape instead"
                )

    def tape(self, candidate: Candidate) -> Tape:
        """Return one rank's micro-batch. It is traced at the first call.

        **Raises** ConfigError if the candidate splits the model itself, or checkpoints in part.
        """
        self.check_degrees(candidate)
        checkpointing = candidate.activation_checkpointing
        if checkpointing not in ("none", "full"):
            raise ConfigError(
                f"activation_checkpointing={checkpointing!r}: a traced module knows 'none' and "
                "'full'"
            )
        dtype = candidate.dtypes.compute
        key = (candidate.micro_batch, dtype, checkpointing, candidate.units)
        if key not in self._tapes:
            self._tapes[key] = self._trace(candidate)
        return self._tapes[key]

    def _trace(self, candidate: Candidate) -> Tape:
        checkpointed = candidate.activation_checkpointing == "full"
        if checkpointed not in self._modules:
            self._modules[checkpointed] = self._source.build(checkpointed)
        try:
            tape = trace(
                self._modules[checkpointed],
                lambda: self._source.make_batch(candidate.micro_batch, self.seq),
                self._source.loss,
                name=self.name,
                compute_dtype=candidate.dtypes.compute,
                units=candidate.units,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}{self._source.batch_hint}") from error
        params = [p for u in tape.units for p in u.params if not p.gets_grad]
        if params:
            count = format_count(sum(prod(p.shape) for p in params))
            self._notes[
                f"{count} trained parameters ({params[0].name}, ...) get no gradient, and so no "
                "optimizer state; if they are experts that the data chooses, their work is not "
                "counted"
            ] = None
        return tape


def shape_source(name: str, shape: DecoderShape, seq: int) -> ModelSource:
    """Return the source of a plain decoder of a shape.

    **Raises** ConfigError, when it is built, for a mixture of experts: no trace shows its routing.
    """

    def build(checkpointed: bool) -> nn.Module:
        if shape.experts is not None:
            raise ConfigError(
                "model: a mixture of experts cannot be traced from its shape, since its routing "
                "depends on values; plan it by the formulas of its shape"
            )
        return PlainDecoder(shape, checkpointed)

    return replace(module_source(name, build, seq), max_seq=shape.positions or None, shape=shape)


def module_source(name: str, build: Callable[[bool], nn.Module], seq: int) -> ModelSource:
    """Return the source of a module that takes ids and targets and returns its loss.

    ``build(checkpointed)`` is called on the meta device.
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
    shape, error = None, None
    try:
        shape = shape_from_config(config)
    except ConfigError as unknown:
        error = unknown
    if importlib.util.find_spec("transformers") is None:
        if shape is None:
            raise ConfigError(
                f"{error}. transformers is not installed; with it (`pip install transformers`) any "
                "of its causal language models can be planned"
            ) from None
        note = (
            f"transformers is not installed: {name} is planned as a plain decoder of its shape; "
            "`pip install transformers` plans the class itself"
        )
        return replace(shape_source(name, shape, seq), notes=(note,))
    from transformers import CONFIG_MAPPING

    family = str(config["model_type"])
    if family not in CONFIG_MAPPING:
        hint = did_you_mean(family, CONFIG_MAPPING, n=3)
        raise ConfigError(
            f"model: {path}: model_type {family!r} is unknown to the installed transformers{hint}"
        )
    kind: Any = CONFIG_MAPPING[family]
    keys = _unknown_keys(config, kind, path)
    notes = [f"{path}: no keys of {kind.__name__}: {', '.join(keys)}"] if keys else []
    is_known = family in _LIKE_LLAMA
    if shape is not None and not is_known:
        notes.append(
            f"{name} is planned as a plain decoder of its shape, without dropout; --units with the "
            f"class of its layers traces {kind.__name__.removesuffix('Config')} itself"
        )
    return ModelSource(
        name=name,
        seq=seq,
        build=lambda checkpointed: _build_huggingface(kind, config, checkpointed, path),
        make_batch=lambda *sizes: dict.fromkeys(("input_ids", "labels"), _ids(*sizes)),
        loss=_huggingface_loss,
        max_seq=longest if isinstance(longest, int) else None,
        shape=shape,
        eager="transformers" if is_known else "decoder",
        notes=tuple(notes),
    )


def _unknown_keys(config: Mapping[str, Any], kind: type, path: Path) -> list[str]:
    """Return the keys that a config class does not know and that are near none of its keys.

    **Raises** ConfigError for a key that is nearly one which the config leaves out.
    """
    known = {"model_type", *_ALSO_READ, *getattr(kind, "attribute_map", {})}
    for base in kind.__mro__:
        known |= set(inspect.get_annotations(base))
        if "__init__" in vars(base):
            known |= set(inspect.signature(vars(base)["__init__"]).parameters)
    with suppress(Exception):  # some classes have no defaults; the names above are enough
        known |= set(kind().to_dict())
    unknown = [k for k in config if k not in known and not k.startswith("_")]
    for name in unknown:
        near = get_close_matches(name, known - config.keys(), n=1, cutoff=0.8)
        if near:
            raise ConfigError(
                f"model: {path}: {name!r} is no key of {kind.__name__}; did you mean {near[0]!r}?"
            )
    return unknown


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


def _huggingface_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with _windows_not_packed():
        loss: Tensor = model(**batch).loss
    return loss


@contextmanager
def _windows_not_packed() -> Iterator[None]:
    """Tell transformers that each window is one text.

    It reads this from the values of the positions. Fake tensors have no values, so it would build
    a mask that a run without packing does not have.
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
    """Recompute each layer in backward, by the model's own method or else layer by layer.

    **Raises** ConfigError if the model has neither such a method nor a list of layers.
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
    make_batch = getattr(file, "example_batch", None) and _function(file, "example_batch", path)
    loss = getattr(file, "loss", None) and _function(file, "loss", path)
    name = f"{path.name}:{attribute}"
    model = _call_factory(factory, name)

    def build(checkpointed: bool) -> nn.Module:
        made = _call_factory(factory, name)
        if checkpointed:
            checkpoint_layers(made)
        return made

    batch_hint = (
        f"; it was fed int64 token ids, as {path} has no example_batch(micro_batch, seq): write "
        "one that returns what the model takes, such as images, and loss(model, batch)"
    )
    return ModelSource(
        name=name,
        seq=seq,
        build=build,
        make_batch=make_batch or _ids,
        loss=loss or _next_token_loss,
        notes=tuple(_notes(model)),
        batch_hint="" if make_batch else batch_hint,
    )


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_planned_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    sys.modules[spec.name] = module  # a dataclass in the file looks itself up by this name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"model: importing {path}: {_one_line(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _function(file: ModuleType, name: str, path: Path) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(file, name, None)
    if function is None or not callable(function):
        names = [n for n, v in vars(file).items() if callable(v) and not n.startswith("_")]
        hint = near_miss(name, names, f"; it has {', '.join(names) or 'none'}")
        raise ConfigError(f"model: {path} has no function {name!r}{hint}")
    return function


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
