"""Models by name: decoders of published shapes, and sources for a user's text, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.plan.model.shapes import DecoderShape, gpt_shape, llama_shape, read_config
from shardwise.plan.sizes import read_table
from shardwise.spelling import did_you_mean

if TYPE_CHECKING:
    from shardwise.plan.model.models import ModelSource


@dataclass(frozen=True)
class Preset:
    """A named decoder and its usual window in tokens."""

    name: str
    shape: DecoderShape
    seq: int


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(read_table("presets"))


def find_preset(name: str) -> Preset:
    """Return a preset by its name, in any case.

    **Raises** ConfigError for an unknown name, with the nearest ones.
    """
    key = name.lower()
    rows = read_table("presets")
    if key not in rows:
        hint = did_you_mean(key, rows, n=3, cutoff=0.4) or "."
        raise ConfigError(f"model: no preset {name!r}{hint} There are {', '.join(rows)}")
    sizes = {field: value for field, value in rows[key].items() if field != "seq"}
    return Preset(key, _shape_of(**sizes), rows[key]["seq"])


def _shape_of(kind: str, **sizes: Any) -> DecoderShape:
    """Return the shape of a row of the table, with what its kind has in common."""
    if kind == "gpt":
        return gpt_shape(**sizes)
    if kind == "mpt":  # as released: ALiBi, no biases
        shape = gpt_shape(vocab=50432, **sizes)
        return replace(shape, norm_bias=False, qkv_bias=False, bias=False)
    if kind == "gemma":
        return replace(llama_shape(vocab=256000, tied=True, **sizes), head_dim=256)
    if kind == "qwen3":
        return replace(llama_shape(vocab=151936, **sizes), qk_norm=True, head_dim=128)
    return replace(llama_shape(**sizes), qkv_bias=kind == "qwen2")


def find_model(text: str, *, seq: int = 2048) -> ModelSource:
    """Return the source of a preset, a ``config.json`` or its folder, or a ``file.py:function``.

    ``seq`` is the window of a model that has no usual one.

    **Cost** imports torch, if the text names a model.
    **Raises** ConfigError for any other text, with the nearest name.
    """
    if not text.strip():
        raise ConfigError("model: the name is empty; `shardwise plan --list` has the presets")
    file, _, attribute = text.rpartition(":")
    path = Path(file if file.endswith(".py") else text)
    if path.suffix == ".py":
        if not file.endswith(".py"):
            raise ConfigError(f"model: {text}: name the function that builds it, {text}:factory")
        if not path.is_file():
            raise ConfigError(f"model: {path}: cannot be read: no such file")
    elif path.suffix == ".json" or path.is_dir():
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            raise ConfigError(f"model: {path}: cannot be read: No such file or directory")
        read_config(path)
    elif "/" in text:
        raise ConfigError(
            f"model: {text!r} is no file here; expected a preset ({preset_names()[1]}, ...), a "
            "config.json or the folder it is in, or file.py:factory. Nothing is downloaded"
        )
    else:
        preset = find_preset(text)
    from shardwise.plan.model import models

    if path.suffix == ".py":
        return models.factory_source(path, attribute, seq=seq)
    if path.suffix == ".json":
        return models.huggingface_source(path)
    return models.shape_source(preset.name, preset.shape, preset.seq)
