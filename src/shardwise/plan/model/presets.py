"""Models by name: decoders of published shapes and windows, and what a user's words stand for.

Source: the ``config.json`` of each on the Hugging Face hub; GPT-3: Brown et al. 2020, table 2.1.
Parameter counts follow from the shapes and are tested against the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.plan.model.config_keys import read_config
from shardwise.plan.model.shapes import DecoderShape, gpt_shape, llama_shape
from shardwise.spelling import did_you_mean

if TYPE_CHECKING:
    from shardwise.plan.model.models import ModelSource


@dataclass(frozen=True)
class Preset:
    """A named decoder and its usual window in tokens."""

    name: str
    shape: DecoderShape
    seq: int


def _qwen2(
    layers: int, dim: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = False
) -> DecoderShape:
    shape = llama_shape(layers, dim, heads, kv_heads, ffn, vocab, tied=tied)
    return replace(shape, qkv_bias=True)


def _qwen3(
    layers: int, dim: int, heads: int, kv_heads: int, ffn: int, tied: bool = False
) -> DecoderShape:
    shape = llama_shape(layers, dim, heads, kv_heads, ffn, 151936, tied=tied)
    return replace(shape, qk_norm=True, head_dim=128)


def _gemma(layers: int, dim: int, heads: int, kv_heads: int, ffn: int) -> DecoderShape:
    return replace(llama_shape(layers, dim, heads, kv_heads, ffn, 256000, tied=True), head_dim=256)


def _mpt(layers: int, dim: int, heads: int) -> DecoderShape:
    """Return an MPT as released: ALiBi, no biases (not the benchmark's, `shapes.mpt_shape`)."""
    shape = gpt_shape(layers, dim, heads, 50432)
    return replace(shape, norm_bias=False, qkv_bias=False, bias=False)


_SHAPES: dict[str, tuple[int, DecoderShape]] = {
    "demo": (256, llama_shape(4, 256, 8, 8, 672, 256)),
    "llama-2-7b": (4096, llama_shape(32, 4096, 32, 32, 11008, 32000)),
    "llama-2-13b": (4096, llama_shape(40, 5120, 40, 40, 13824, 32000)),
    "llama-2-70b": (4096, llama_shape(80, 8192, 64, 8, 28672, 32000)),
    "llama-3-8b": (8192, llama_shape(32, 4096, 32, 8, 14336, 128256)),
    "llama-3-70b": (8192, llama_shape(80, 8192, 64, 8, 28672, 128256)),
    "llama-3-405b": (8192, llama_shape(126, 16384, 128, 8, 53248, 128256)),
    "llama-3.2-1b": (8192, llama_shape(16, 2048, 32, 8, 8192, 128256, tied=True)),
    "llama-3.2-3b": (8192, llama_shape(28, 3072, 24, 8, 8192, 128256, tied=True)),
    "tinyllama-1.1b": (2048, llama_shape(22, 2048, 32, 4, 5632, 32000)),
    "qwen2.5-0.5b": (4096, _qwen2(24, 896, 14, 2, 4864, 151936, tied=True)),
    "qwen2.5-1.5b": (4096, _qwen2(28, 1536, 12, 2, 8960, 151936, tied=True)),
    "qwen2.5-3b": (4096, _qwen2(36, 2048, 16, 2, 11008, 151936, tied=True)),
    "qwen2.5-7b": (4096, _qwen2(28, 3584, 28, 4, 18944, 152064)),
    "qwen2.5-14b": (4096, _qwen2(48, 5120, 40, 8, 13824, 152064)),
    "qwen2.5-32b": (4096, _qwen2(64, 5120, 40, 8, 27648, 152064)),
    "qwen2.5-72b": (4096, _qwen2(80, 8192, 64, 8, 29568, 152064)),
    "qwen3-0.6b": (4096, _qwen3(28, 1024, 16, 8, 3072, tied=True)),
    "qwen3-4b": (4096, _qwen3(36, 2560, 32, 8, 9728, tied=True)),
    "qwen3-8b": (4096, _qwen3(36, 4096, 32, 8, 12288)),
    "mistral-7b": (8192, llama_shape(32, 4096, 32, 8, 14336, 32000)),
    "gemma-2b": (8192, _gemma(18, 2048, 8, 1, 16384)),
    "gemma-7b": (8192, _gemma(28, 3072, 16, 16, 24576)),
    "smollm-135m": (2048, llama_shape(30, 576, 9, 3, 1536, 49152, tied=True)),
    "smollm-360m": (2048, llama_shape(32, 960, 15, 5, 2560, 49152, tied=True)),
    "smollm-1.7b": (2048, llama_shape(24, 2048, 32, 32, 8192, 49152, tied=True)),
    "gpt2": (1024, gpt_shape(12, 768, 12, 50257, positions=1024)),
    "gpt2-medium": (1024, gpt_shape(24, 1024, 16, 50257, positions=1024)),
    "gpt2-large": (1024, gpt_shape(36, 1280, 20, 50257, positions=1024)),
    "gpt2-xl": (1024, gpt_shape(48, 1600, 25, 50257, positions=1024)),
    "gpt3-175b": (2048, gpt_shape(96, 12288, 96, 50257, positions=2048)),
    "mpt-7b": (2048, _mpt(32, 4096, 32)),
    "mpt-30b": (8192, _mpt(48, 7168, 64)),
}


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_SHAPES)


def find_preset(name: str) -> Preset:
    """Return a preset by its name, in any case.

    **Raises** ConfigError for an unknown name, with the nearest ones.
    """
    key = name.lower()
    if key not in _SHAPES:
        hint = did_you_mean(key, _SHAPES, n=3, cutoff=0.4) or "."
        raise ConfigError(f"model: no preset {name!r}{hint} There are {', '.join(_SHAPES)}")
    seq, shape = _SHAPES[key]
    return Preset(key, shape, seq)


def find_model(text: str, *, seq: int = 2048) -> ModelSource:
    """Return the source that a user's words name: preset, ``config.json`` or folder, ``file:name``.

    ``seq`` is the window where the model itself has no usual one.

    **Cost** torch is imported, once the words name something.
    **Raises** ConfigError when they name nothing, saying what is near.
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
