"""Write and read PEFT's adapters of a sharded model, in PEFT's own files.

Training does not need this file: ``shard(get_peft_model(model, config))`` finds the units inside
PEFT's wrappers, keeps the frozen base in its own dtype, and gives gradients and optimizer state to
the adapters alone. So does `fully_shard`, called on blocks and last on the PeftModel.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.names import list_names
from shardwise.surface.gathered import gathered
from shardwise.tensor.plain_state import owner_of
from shardwise.versions import load_neighbour


def save_adapter(model: nn.Module, path: str | Path, adapters: Sequence[str] | None = None) -> None:
    """Write the adapters of a sharded PEFT model as ``save_pretrained`` writes them.

    Every rank calls it; rank 0 writes. ``PeftModel.from_pretrained`` loads the folder.
    ``adapters`` names some of several (default: all).

    **Cost** the adapters are gathered on every rank; the base is not.

    **Raises** ConfigError when the model is no sharded PeftModel or has no such adapter,
    CheckpointError on all ranks when rank 0 cannot write.
    """
    peft = load_neighbour("peft", "save_adapter()")
    control = engine_of(model).comm.control
    names = list(adapters) if adapters is not None else list(_configs_of(model))
    wanted = {name: p for adapter in names for name, p in _params_of(peft, model, adapter).items()}

    def write() -> None:
        model.save_pretrained(  # type: ignore[operator]  # of a PeftModel
            str(path), selected_adapters=names, is_main_process=control.rank == 0
        )

    with _in_full(model, wanted, writeback=False):
        on_all_ranks(control, write)


def load_adapter(model: nn.Module, path: str | Path, adapter: str = "default") -> None:
    """Read an adapter's values into an adapter of the sharded PEFT model; every rank calls it.

    The model must have had an adapter of that shape before it was sharded: by ``get_peft_model``,
    ``add_adapter`` or ``PeftModel.from_pretrained``. Values are cast to its dtype.

    **Cost** every rank reads the adapter's file; the adapter is gathered once.

    **Raises** ConfigError when the model is no sharded PeftModel or has no such adapter; on all
    ranks when one finds no adapter in the folder, or other tensors than the adapter's, naming them;
    CheckpointError on all ranks when one cannot read. Nothing is changed then.
    """
    peft = load_neighbour("peft", "load_adapter()")
    control = engine_of(model).comm.control
    wanted = _params_of(peft, model, adapter)
    if _is_prompt(model, adapter) and len(wanted) > 1:
        raise ConfigError(
            f"load_adapter: adapter '{adapter}' computes its prompt by layers, and the file has "
            "their result alone; shardwise.load() restores the layers, to train on; "
            "PeftModel.from_pretrained(base, path) before sharding takes the file, to generate"
        )
    values: dict[str, torch.Tensor] = {}
    on_all_ranks(control, lambda: values.update(_read(peft, path)))
    with _in_full(model, wanted, writeback=True):
        on_all_ranks(control, lambda: _fill(peft, model, wanted, values, path, adapter))


def _read(peft: ModuleType, path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors in PEFT's file of a folder. PEFT itself would ask the hub for others."""
    names = (peft.utils.SAFETENSORS_WEIGHTS_NAME, peft.utils.WEIGHTS_NAME)
    if not any((Path(path) / name).is_file() for name in names):
        raise ConfigError(
            f"load_adapter: {path} is no folder with an {names[0]} in it; save_adapter() and "
            "save_pretrained() write one"
        )
    found: dict[str, torch.Tensor] = peft.load_peft_weights(str(path), device="cpu")
    return found


def _fill(
    peft: ModuleType,
    model: nn.Module,
    wanted: dict[str, DTensor],
    values: dict[str, torch.Tensor],
    path: str | Path,
    adapter: str,
) -> None:
    """Put the values of a file into the full parameters, all of them or none."""
    try:
        result = peft.set_peft_model_state_dict(model, values, adapter)
    except (KeyError, RuntimeError) as error:  # a wrapper's tensor is missing; another shape
        raise ConfigError(
            f"load_adapter: {path} does not fit adapter '{adapter}': {error}"
        ) from error
    if _is_prompt(model, adapter):
        return  # PEFT fills its one parameter in another way, and raises if it cannot
    absent = set(result.missing_keys)
    found = {id(p) for name, p in wanted.items() if name not in absent}  # tied names share one
    missing = sorted(n for n, p in wanted.items() if n in absent and id(p) not in found)
    extra = sorted(result.unexpected_keys)
    if missing or extra:
        raise ConfigError(
            f"load_adapter: {path} does not fit adapter '{adapter}': it lacks "
            f"{list_names(missing, 3) or 'nothing'} and has {list_names(extra, 3) or 'nothing'} "
            "beyond; is it of the same LoraConfig?"
        )


def _configs_of(model: nn.Module) -> dict[str, Any]:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        raise ConfigError(
            f"model: this {type(model).__name__} is no PeftModel; adapters of your own are "
            "ordinary parameters: `with shardwise.gathered(*params) as fulls:` reads them"
        )
    return configs


def _params_of(peft: ModuleType, model: nn.Module, adapter: str) -> dict[str, DTensor]:
    """Return the sharded parameters that PEFT saves of an adapter, by name."""
    configs = _configs_of(model)
    if adapter not in configs:
        raise ConfigError(
            f"adapter={adapter!r}: the model has no such adapter; it has "
            f"{', '.join(map(repr, configs))}"
        )
    state = model.state_dict(keep_vars=True)
    if _is_prompt(model, adapter):
        encoder = f"prompt_encoder.{adapter}."
        return {n: p for n, p in state.items() if n.startswith(encoder)}
    saved = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    ids = {id(value) for value in saved.values()}
    return {n: p for n, p in state.items() if id(p) in ids and owner_of(p) is not None}


def _is_prompt(model: nn.Module, adapter: str) -> bool:
    """Tell whether the adapter is a prompt: PEFT saves its encoder's output, not parameters."""
    return bool(_configs_of(model)[adapter].is_prompt_learning)


@contextmanager
def _in_full(model: nn.Module, wanted: dict[str, DTensor], writeback: bool) -> Iterator[None]:
    """Replace the wanted parameters by full, ordinary ones in the block."""
    owners = list({id(p): owner_of(p) for p in wanted.values()}.values())
    with gathered(*(owner.sharded for owner in owners), writeback=writeback) as fulls:
        for owner, full in zip(owners, fulls, strict=True):
            owner.put_in_modules(full)
        try:
            # A prompt encoder runs on the full parameters.
            with engine_of(model).status.suspended():
                yield
        finally:
            for owner in owners:
                owner.put_in_modules(owner.sharded)
