"""PEFT's adapters on a sharded model: written and read in PEFT's own files.

Training needs nothing from here: ``shard(get_peft_model(model, config))`` finds the units inside
PEFT's wrapping, keeps the frozen base in its own dtype, and gives gradients and optimizer state to
the adapters alone. So does `fully_shard`, called on blocks, and last on what PEFT returns.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.engine.api import engine_of
from shardwise.engine.gathered import gathered
from shardwise.errors import ConfigError
from shardwise.tensor.plain_state import owner_of
from shardwise.versions import load_neighbour


def save_adapter(model: nn.Module, path: str | Path, adapters: Sequence[str] | None = None) -> None:
    """Write the adapters of a sharded PEFT model as ``save_pretrained`` writes them.

    Every rank calls it; the first one writes. ``PeftModel.from_pretrained`` loads the folder.
    ``adapters`` names some of several (default: all).

    **Cost** the adapters gathered on every rank; the base is not.

    **Raises** ConfigError where the model is no sharded PeftModel or has no such adapter,
    CheckpointError on all ranks where the first cannot write.
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
    """Read an adapter's values into one that the sharded PEFT model has; every rank calls it.

    The model had an adapter of that shape before it was sharded: by ``get_peft_model``,
    ``add_adapter`` or ``PeftModel.from_pretrained``. Values are cast to its dtype.

    **Cost** the adapter's file read on every rank, and the adapter gathered once.

    **Raises** ConfigError where the model is no sharded PeftModel or has no such adapter; on all
    ranks where one finds no adapter in the folder, or tensors that are not the adapter's, naming
    them; CheckpointError on all ranks where one cannot read. Nothing is changed then.
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
    values: dict[str, Any] = {}
    on_all_ranks(control, lambda: values.update(_read(peft, path)))
    with _in_full(model, wanted, writeback=True):
        on_all_ranks(control, lambda: _fill(peft, model, wanted, values, path, adapter))


def _read(peft: Any, path: str | Path) -> dict[str, Any]:
    """Return what PEFT saved in a folder; it takes others for names on a server."""
    names = (peft.utils.SAFETENSORS_WEIGHTS_NAME, peft.utils.WEIGHTS_NAME)
    if not any((Path(path) / name).is_file() for name in names):
        raise ConfigError(
            f"load_adapter: {path} is no folder with an {names[0]} in it; save_adapter() and "
            "save_pretrained() write one"
        )
    found: dict[str, Any] = peft.load_peft_weights(str(path), device="cpu")
    return found


def _fill(
    peft: Any,
    model: nn.Module,
    wanted: dict[str, DTensor],
    values: dict[str, Any],
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
        return  # PEFT fills the one parameter apart, and raises where it cannot
    absent = set(result.missing_keys)
    found = {id(p) for name, p in wanted.items() if name not in absent}  # tied names share one
    missing = sorted(n for n, p in wanted.items() if n in absent and id(p) not in found)
    extra = sorted(result.unexpected_keys)
    if missing or extra:
        raise ConfigError(
            f"load_adapter: {path} does not fit adapter '{adapter}': it lacks "
            f"{_few(missing)} and has {_few(extra)} beyond; is it of the same LoraConfig?"
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "nothing") + more


def _configs_of(model: nn.Module) -> dict[str, Any]:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        raise ConfigError(
            f"model: this {type(model).__name__} is no PeftModel; adapters of your own are "
            "ordinary parameters: `with shardwise.gathered(*params) as fulls:` reads them"
        )
    return configs


def _params_of(peft: Any, model: nn.Module, adapter: str) -> dict[str, DTensor]:
    """Return what PEFT saves of an adapter: the sharded parameters by their names."""
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
    """Tell whether the adapter is a prompt: PEFT saves what its encoder gives, not parameters."""
    return bool(_configs_of(model)[adapter].is_prompt_learning)


@contextmanager
def _in_full(model: nn.Module, wanted: dict[str, DTensor], writeback: bool) -> Iterator[None]:
    """Put full, ordinary parameters in the place of the wanted ones, for a while."""
    engine = engine_of(model)
    params = list({id(p): p for p in wanted.values()}.values())
    with gathered(*params, writeback=writeback) as fulls:
        by_id = {id(p): full for p, full in zip(params, fulls, strict=True)}
        places = [
            (module._parameters, attribute, param)
            for module in model.modules()
            for attribute, param in module._parameters.items()
            if id(param) in by_id
        ]
        for table, attribute, param in places:
            table[attribute] = by_id[id(param)]
        try:
            with engine.conditions.suspended():  # a prompt encoder runs, with what is full
                yield
        finally:
            for table, attribute, param in places:
                table[attribute] = param
