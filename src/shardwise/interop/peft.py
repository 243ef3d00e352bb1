"""PEFT's adapters on a sharded model: written and read in PEFT's own files.

Training needs nothing from here: ``shard(get_peft_model(model, config))`` finds the units inside
PEFT's wrapping, keeps the frozen base in its own dtype, and gives gradients and optimizer state to
the adapters alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpoint.together import together
from shardwise.engine.api import engine_of
from shardwise.engine.gathered import gathered
from shardwise.errors import ConfigError
from shardwise.versions import load_neighbour
from shardwise.unit.tensor import ShardTensor


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

    with _whole(model, wanted, writeback=False):
        together(control, write)


def load_adapter(model: nn.Module, path: str | Path, adapter: str = "default") -> None:
    """Read an adapter's values into one that the sharded PEFT model has; every rank calls it.

    The model had an adapter of that shape before ``shard()``: by ``get_peft_model``,
    ``add_adapter`` or ``PeftModel.from_pretrained``. Values are cast to its dtype.

    **Cost** the adapter's file read on every rank, and the adapter gathered once.

    **Raises** ConfigError where the model is no sharded PeftModel or has no such adapter, and
    where the file's tensors are not the adapter's, naming them; nothing is changed then.
    """
    peft = load_neighbour("peft", "load_adapter()")
    engine_of(model)
    wanted = _params_of(peft, model, adapter)
    values = peft.load_peft_weights(str(path), device="cpu")
    with _whole(model, wanted, writeback=True):
        try:
            result = peft.set_peft_model_state_dict(model, values, adapter)
        except (KeyError, RuntimeError) as error:  # a wrapper's tensor is missing; another shape
            raise ConfigError(
                f"load_adapter: {path} does not fit adapter '{adapter}': {error}"
            ) from error
        missing = sorted(wanted.keys() & set(result.missing_keys))
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


def _params_of(peft: Any, model: nn.Module, adapter: str) -> dict[str, ShardTensor]:
    """Return what PEFT saves of an adapter: the sharded parameters by their names."""
    configs = _configs_of(model)
    if adapter not in configs:
        raise ConfigError(f"adapter '{adapter}': the model has {', '.join(map(repr, configs))}")
    state = model.state_dict(keep_vars=True)
    saved = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    ids = {id(value) for value in saved.values()}
    return {n: p for n, p in state.items() if id(p) in ids and isinstance(p, ShardTensor)}


@contextmanager
def _whole(model: nn.Module, wanted: dict[str, ShardTensor], writeback: bool) -> Iterator[None]:
    """Put full, ordinary parameters in the place of the wanted ones, for a while."""
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
            yield
        finally:
            for table, attribute, param in places:
                table[attribute] = param
