"""Hugging Face transformers: load models into shards, save them, and train them by `Trainer`."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily
from shardwise.versions import load_neighbour

if TYPE_CHECKING:
    from shardwise.interop.transformers.loading import from_pretrained as from_pretrained
    from shardwise.interop.transformers.loading import load_weights as load_weights
    from shardwise.interop.transformers.parallel import parallelize as parallelize
    from shardwise.interop.transformers.saving import prepare as prepare
    from shardwise.interop.transformers.saving import save_pretrained as save_pretrained
    from shardwise.interop.transformers.trainer import ObserveCallback as ObserveCallback
    from shardwise.interop.transformers.trainer import Trainer as Trainer
    from shardwise.interop.transformers.trainer import trainer_class as trainer_class

_NAMES = {
    "loading": ("from_pretrained", "load_weights"),
    "parallel": ("parallelize",),
    "saving": ("prepare", "save_pretrained"),
    "trainer": ("ObserveCallback", "Trainer", "trainer_class"),
}
_HOMES = {name: f"{__name__}.{file}" for file, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(
    __name__, _HOMES, lambda name: load_neighbour("transformers", wanted_by=f"{__name__}.{name}")
)
