"""Lightning's checkpoints: the model and its optimizers in shards, the rest as values.

Note [One folder per Lightning checkpoint]
The path that Lightning gives (``.../epoch=0-step=10.ckpt``) becomes the folder of a Shardwise
checkpoint: parameters and optimizer state by slices, verified. Lightning's other state (loops,
callbacks, schedulers, hyperparameters) is in its ``extra``, under the name ``lightning``, as plain
values: nothing is pickled. Every rank can also read a file that another strategy wrote.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import remove_checkpoint
from shardwise.checkpoint.save_load import holds_checkpoint, load, save
from shardwise.checkpoint.values import encode
from shardwise.engine.model import compare_load
from shardwise.errors import CheckpointError, ConfigError
from shardwise.tensor.plain_state import PLAIN_SCALARS, cut_like, cut_state_dict
from shardwise.tensor.replaced import params_of

_STRATEGY_SAVES = ("state_dict", "optimizer_states")
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")

State = dict[str, object]  # of one parameter, in an optimizer


class _AsOne:
    """Several optimizers as one: their groups in order, their states by parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for o in optimizers for group in o.param_groups]
        self.state = {param: state for o in optimizers for param, state in o.state.items()}
        params = [p for group in self.param_groups for p in group["params"]]
        if len(params) != len(set(params)):
            raise ConfigError(
                "configure_optimizers: a parameter is in two optimizers, so a checkpoint could not "
                "tell whose state is whose; give each parameter to one"
            )


@contextmanager
def _as_one(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
    """Yield an optimizer for `save` and `load`: the only one, or all as one, or None."""
    if len(optimizers) < 2:
        yield optimizers[0] if optimizers else None
        return
    one = _AsOne(optimizers)
    yield one
    for optimizer in optimizers:
        params = params_of(optimizer)
        found = {p: one.state[p] for p in params if p in one.state}
        optimizer.state.clear()
        optimizer.state.update(found)


def check_hyper_parameters(*owners: object) -> None:
    """Refuse hyperparameters that a checkpoint cannot hold, before training.

    **Raises** ConfigError naming the LightningModule or DataModule, and the value's place.
    """
    for owner in owners:
        found = getattr(owner, "hparams", None)
        if not found:
            continue
        try:
            encode(_with_text(found), f"{type(owner).__name__}.hparams")
        except CheckpointError as error:
            raise ConfigError(
                f"{error}. Or leave it out: self.save_hyperparameters(ignore=[...])"
            ) from error


def _with_text(value: object) -> object:
    """Return plain containers with paths as text."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_text(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(_with_text, value))
    if type(value) is list:
        return list(map(_with_text, value))
    return value


def save_lightning(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    checkpoint: Mapping[str, object],
) -> None:
    """Save Lightning's dump and the sharded state; every rank calls it.

    Without ``optimizer_states`` in ``checkpoint`` (``weights_only``) the optimizers are left out.
    See Note [One folder per Lightning checkpoint].

    **Raises** CheckpointError on all ranks, with the place of a value that is no data.
    """
    whole = "optimizer_states" in checkpoint
    rest = {key: value for key, value in checkpoint.items() if key not in _STRATEGY_SAVES}
    rest.update({key: _with_text(rest[key]) for key in _HYPER_PARAMETERS if key in rest})
    with _as_one(optimizers if whole else ()) as optimizer:
        save(path, module, optimizer, extra={"lightning": rest}, replace=True)


def load_lightning(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, object]:
    """Load the sharded state; return Lightning's other state. Every rank calls it.

    ``weights_only`` is torch.load's, for a file of another strategy.

    **Raises** CheckpointError naming the path when it is neither.
    """
    if path.is_file():
        return _load_file(path, module, optimizers, strict=strict, weights_only=weights_only)
    with _as_one(optimizers) as optimizer:
        loaded = load(path, module, optimizer, strict=strict)
    rest = loaded.extra.get("lightning")
    if not isinstance(rest, dict):
        raise CheckpointError(
            f"{path}: a checkpoint, but not one that a Lightning Trainer saved; load its state "
            "with shardwise.load() in your LightningModule's on_fit_start, without ckpt_path="
        )
    return rest


def remove_lightning(path: Path) -> None:
    """Remove a checkpoint that `save_lightning` wrote, and nothing else; one rank calls it."""
    files = Files()
    if holds_checkpoint(files, path):
        remove_checkpoint(files, path)


def _load_file(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, object]:
    checkpoint: dict[str, Any] = torch.load(
        path, map_location="cpu", weights_only=weights_only, mmap=True
    )
    values = checkpoint.pop("state_dict")
    compare_load(module, values)  # before the cut, which hides differences between ranks
    module.load_state_dict(cut_state_dict(module, values), strict=strict)
    states = checkpoint.pop("optimizer_states", [])
    if optimizers and len(states) != len(optimizers):
        raise CheckpointError(
            f"{path}: it has the state of {len(states)} optimizers, and there are "
            f"{len(optimizers)} here (a file saved with weights_only=True has none: load it with "
            "load_from_checkpoint(), and fit without ckpt_path=)"
        )
    for optimizer, state in zip(optimizers, states, strict=False):
        _load_full_state(optimizer, state)
    return checkpoint


@torch.no_grad()
def _load_full_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state of full tensors; each rank keeps its slices."""
    params = params_of(optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    states: dict[int, State] = {}
    for number, param in zip(numbers, params, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            is_full = isinstance(value, torch.Tensor) and value.shape == param.shape
            cuts = is_full and key not in PLAIN_SCALARS
            states.setdefault(number, {})[key] = cut_like(param, value) if cuts else value
    optimizer.load_state_dict({**saved, "state": states})
