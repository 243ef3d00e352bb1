"""Checks the keys of a Hugging Face config: misspelt names, and sizes that cannot be.

transformers takes any key and gives what is missing its default, so that a slip plans another
model.
"""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.keys import read_json, shown

_SIZES = frozenset(
    (
        *("hidden_size", "n_embd", "d_model", "dim", "head_dim", "vocab_size"),
        *("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"),
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"),
        *("max_position_embeddings", "n_positions"),
        *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"),
    )
)
# Older names that transformers itself still reads, and what a hub adds.
_ALSO_READ = (
    *("torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor", "n_ctx"),
    *("auto_map", "quantization_config", "task_specific_params"),
    *("output_attentions", "attn_implementation"),
)
_NEAR = 0.8
_MOST_KEYS = 1000


def read_config(path: Path) -> dict[str, Any]:
    """Return what a ``config.json`` says, its sizes checked. **Raises** ConfigError."""
    try:
        config = read_json(path)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"model: {path}: expected a Hugging Face config with the key model_type")
    if len(config) > _MOST_KEYS or max(map(len, config)) > _MOST_KEYS:
        raise ConfigError(f"model: {path}: expected at most {_MOST_KEYS} keys, of such a length")
    check_sizes(config, path)
    return config


def check_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Check that every size is a whole number above 0 (or null). **Raises** ConfigError."""
    for name in sorted(_SIZES & config.keys()):
        value = config[name]
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_integer and value > 0):
            raise ConfigError(
                f"model: {path}: {name}: expected a whole number above 0, got {shown(value)}"
            )


def unknown_keys(config: Mapping[str, Any], kind: type, path: Path) -> list[str]:
    """Return the keys that a config class does not know and that are near none of its own.

    **Raises** ConfigError for a key that is nearly one which the config leaves out.
    """
    known = _known(kind)
    unknown = [k for k in config if k not in known and not k.startswith("_")]
    for name in unknown:
        near = get_close_matches(name, known - config.keys(), n=1, cutoff=_NEAR)
        if near:
            raise ConfigError(
                f"model: {path}: {name!r} is no key of {kind.__name__}; did you mean {near[0]!r}?"
            )
    return unknown


def _known(kind: type) -> set[str]:
    known = {"model_type", *_ALSO_READ, *getattr(kind, "attribute_map", {})}
    for base in kind.__mro__:
        known |= set(inspect.get_annotations(base))
        if "__init__" in vars(base):
            known |= set(inspect.signature(vars(base)["__init__"]).parameters)
    try:
        known |= set(kind().to_dict())
    except Exception:  # some classes have no defaults; the names above are enough
        return known
    return known
