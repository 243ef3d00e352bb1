"""Hugging Face transformers: models loaded into shards, saved from them, and trained by `Trainer`.

Reading order: ``recipes`` (which stored tensors make which parameter), ``fill`` (this rank's own
slices of them), ``missing`` (what a checkpoint does not have), ``saving``, ``prepared`` (what a
sharded model is given so that transformers treats it as its own), ``loading``, ``trainer``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.interop.transformers.loading import from_pretrained, load_weights
    from shardwise.interop.transformers.prepared import prepare
    from shardwise.interop.transformers.saving import save_pretrained
    from shardwise.interop.transformers.trainer import CheckpointCallback, Trainer, trainer_class

_HOMES = {
    "CheckpointCallback": "trainer",
    "Trainer": "trainer",
    "from_pretrained": "loading",
    "load_weights": "loading",
    "prepare": "prepared",
    "save_pretrained": "saving",
    "trainer_class": "trainer",
}

__all__ = [
    "CheckpointCallback",
    "Trainer",
    "from_pretrained",
    "load_weights",
    "prepare",
    "save_pretrained",
    "trainer_class",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from shardwise.versions import load_neighbour

    load_neighbour("transformers", wanted_by=f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
