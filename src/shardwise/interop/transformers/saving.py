"""`prepare` a sharded model for transformers, and ``save_pretrained`` of one.

Note [Sharded at load time]
transformers has its own way to shard a model while it loads it. Its `Trainer` then leaves the model
on its device, does not wrap it, lets all ranks take part in a save, and delays reductions by
``set_requires_gradient_sync``. A model of Shardwise needs just that, so it carries the mark of such
models: an attribute, and an empty ``distributed_config`` in its config, which is never written to
``config.json``. transformers cannot resume such models; the `Trainer` of this package can.

Note [A part at a time]
transformers writes parameters under the names of the hub. For that it may split a parameter (the
experts of a mixture) or join several, on the whole state at once. Here its function runs first on
tensors without memory, which gives every file's header, then on one part of the state at a time,
gathered on the ranks that write. A part is one tensor if converting tensors one by one gives the
same names; else a layer; else, if a conversion goes across layers, the whole state.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.container import build_header, dtype_name, memory_of
from shardwise.convert.export import index_text, plan_files
from shardwise.convert.huggingface import INDEX_FILE, WEIGHTS_FILE
from shardwise.engine.api import engine_of
from shardwise.engine.model import compare_load, note_managed
from shardwise.errors import ConfigError, StateError
from shardwise.interop.full_weights import FullWeights, State, named_weights
from shardwise.interop.peft import save_adapter
from shardwise.quantities import parse_size
from shardwise.tensor.plain_state import cut_state_dict

M = TypeVar("M", bound=nn.Module)
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | Path,
    *,
    is_main_process: bool | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    **options: Any,
) -> None:
    """Write the whole model, in its master dtype, as a folder that ``from_pretrained`` loads.

    Every rank calls it; rank 0 writes. The arguments are those of transformers. With a
    ``state_dict``, or inside ``gathered(model)``, transformers' own method runs. The files get
    their names when all weights are written.

    **Cost** as of `interop.stream` to the ranks that write. They hold one part of the state in
    memory: one parameter, or those of a layer if the names of the hub need it.

    **Raises** ConfigError for an unsupported option; on all ranks when a write fails on one.
    """
    stock = type(model).save_pretrained
    engine = engine_of(model)
    options = {k: v for k, v in options.items() if v is not None}
    if state_dict is not None or engine.suspended:
        options |= {} if is_main_process is None else {"is_main_process": is_main_process}
        stock(model, save_directory, state_dict=state_dict, **options)
        return
    _check(model, options)
    max_bytes = _bytes_of(max_shard_size)  # checked first: transformers removes earlier weights
    engine.finish_pending_work("save_pretrained()")
    writes = model.should_save_on_this_rank(is_main_process is not False)  # a rank 0 only
    options |= {"state_dict": {}, "is_main_process": writes}  # all but the weights
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for the empty state_dict
    try:
        on_all_ranks(engine.comm.control, lambda: stock(model, save_directory, **options))
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    _write(Plan(model, max_bytes, save_original_format), save_directory, writes)


def save_weights(model: nn.Module, folder: str | Path, *, writes: bool) -> None:
    """Write the state dict of a sharded module of any class to ``model.safetensors``.

    Every rank calls it, with ``writes`` on one of them. Tied tensors are written under one name.

    **Cost** and **Raises** as of `save_pretrained`.
    """
    _check(model, {})
    engine_of(model).finish_pending_work("save_weights()")
    if writes:
        Path(folder).mkdir(parents=True, exist_ok=True)
    _write(Plan(model, None, save_original_format=False), folder, writes)


def _write(plan: Plan, folder: str | Path, writes: bool) -> None:
    """Gather part by part on the ranks that write. See Note [A part at a time]."""
    failures: list[Exception] = []
    control = engine_of(plan.model).all_ranks
    flags = control.exchange(bytes([writes]))
    members = control.members or (dist.get_rank(),)
    ranks = [rank for rank, flag in zip(members, flags, strict=True) if flag[0]]
    with ExitStack() as stack:
        write: Callable[[str, torch.Tensor], None] | None = None
        if writes:
            try:
                write = stack.enter_context(_files(Path(folder), plan))
            except OSError as error:
                failures.append(error)
        weights = FullWeights(plan.model, "save_pretrained", ranks or members)
        groups = plan.groups if ranks else []
        for name, tensor in weights.stream(plan.tensors, groups, plan.revert, 0):
            if failures or write is None:  # the other ranks still gather
                continue
            try:
                write(name, tensor)
            except OSError as error:
                failures.append(error)

        def finish() -> None:
            if failures:
                raise failures[0]
            stack.close()

        on_all_ranks(engine_of(plan.model).comm.control, finish)


def _check(model: nn.Module, options: Mapping[str, object]) -> None:
    """Refuse unsupported options and models before anything is written."""
    broken = engine_of(model).status.unusable
    if broken is not None:
        raise StateError(f"save_pretrained: the parameters are not to be used: {broken}")
    for name in ("push_to_hub", "variant", "distributed_checkpoint"):
        if options.get(name):
            raise ConfigError(
                f"save_pretrained({name}={options[name]!r}): not for a sharded model. Leave it "
                "out: what is written is an ordinary folder, which can be uploaded or renamed"
            )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "save_pretrained: the model has adapters of PEFT inside (add_adapter()); build it with "
            "peft.get_peft_model() instead, whose save_pretrained() works"
        )


def _bytes_of(size: int | str) -> int:
    """Return the bytes of a number, or of text such as "5GB"."""
    try:
        num_bytes = parse_size(str(size))
    except ValueError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ConfigError(f"max_shard_size={size!r}: expected bytes, or text such as '5GB'")
    return num_bytes


class Plan:
    """The file of each tensor, and the tensors that are converted together.

    See Note [A part at a time].
    """

    def __init__(self, model: nn.Module, max_bytes: int | None, save_original_format: bool) -> None:
        self.model = model
        self._reverts = save_original_format
        self.tensors = named_weights(model)
        empty = {
            name: torch.empty(t.shape, dtype=t.dtype, device="meta")
            for name, t in self.tensors.items()
        }
        whole = self.revert(dict(empty))
        for groups in ([[name] for name in empty], _by_layer(empty), [list(empty)]):
            self.groups, made = groups, State()
            for names in groups:
                made |= self.revert({name: empty[name] for name in names})
            if {k: v.shape for k, v in made.items()} == {k: v.shape for k, v in whole.items()}:
                break
        stored = [(n, dtype_name(t.dtype, n), tuple(t.shape)) for n, t in made.items()]
        self.files = plan_files(stored, max_bytes)

    def revert(self, state: State) -> State:
        """Return tensors as they are stored."""
        if not self._reverts or not isinstance(self.model, PreTrainedModel):
            return state
        found: State = revert_weight_conversion(self.model, state)
        return found


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group names by their layer; a name outside of layers is a group of its own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        groups.setdefault(found[0] if found else name, []).append(name)
    return list(groups.values())


@contextmanager
def _files(folder: Path, plan: Plan) -> Iterator[Callable[[str, torch.Tensor], None]]:
    """Yield a function that writes a tensor to its place; the files get their names at the end.

    They are removed if the block fails.
    """
    mark = secrets.token_hex(4)
    temporary = {name: folder / f".{name}.{mark}.tmp" for name in plan.files}
    places: dict[str, tuple[BinaryIO, int]] = {}

    def write(key: str, tensor: torch.Tensor) -> None:
        file, begin = places[key]
        file.seek(begin)
        file.write(memory_of(tensor.cpu().contiguous()))

    try:
        with ExitStack() as stack:
            for name, stored in plan.files.items():
                header = build_header(stored, {"format": "pt"})
                file = stack.enter_context(temporary[name].open("xb"))
                file.write(header)
                places.update((each.key, (file, len(header) + each.begin)) for each in stored)
            try:
                yield write
            except BaseException:  # on a full disk closing fails again
                for opened, _ in places.values():
                    with suppress(OSError):
                        opened.close()
                raise
        for name, path in temporary.items():
            os.replace(path, folder / name)
        stale = INDEX_FILE if WEIGHTS_FILE in plan.files else WEIGHTS_FILE
        (folder / stale).unlink(missing_ok=True)  # of an earlier save
        if len(plan.files) > 1:
            assert isinstance(plan.model, PreTrainedModel)  # others have one file
            text = index_text(plan.files, total_parameters=plan.model.num_parameters())
            (folder / INDEX_FILE).write_text(text, encoding="utf-8")
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


# -- a model that transformers treats as its own: see Note [Sharded at load time]
def prepare(model: M) -> M:
    """Let transformers train, save and generate with a sharded model; return the model.

    Afterwards transformers' own ``Trainer`` trains it (Note [Sharded at load time]). Every rank
    calls ``model.save_pretrained(folder)``, which writes the whole model, and ``model.generate()``,
    which runs until all ranks are finished; their lengths may differ. ``model.to()`` its own device
    changes nothing. `from_pretrained` and the `Trainer` of this package call it themselves.

    **State** attributes of this one model; no class of transformers changes.
    """
    engine_of(model)
    for module in model.modules():
        if callable(getattr(module, "generate", None)):
            # transformers' flag for "its forward needs all ranks", which generate() reads
            note_managed(module)
    vars(model)["to"] = partial(_to, model)
    vars(model)["load_state_dict"] = partial(_load_state_dict, model)
    if isinstance(model, PreTrainedModel):
        vars(model)["save_pretrained"] = partial(save_pretrained, model)
        vars(model)["resize_token_embeddings"] = _refuse_resize
        model._is_distributed_loading_by_transformers = True  # there the mark is a property
    elif hasattr(model, "peft_config"):
        vars(model)["save_pretrained"] = partial(_save_adapters, model)
        vars(model)["is_distributed_loading_by_transformers"] = True
    else:  # Trainer would save a model of another class without gathering it
        return model
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig) and not getattr(config, "distributed_config", None):
        config.distributed_config = DistributedConfig()
    return model


def _save_adapters(model: Any, save_directory: str | Path, **options: Any) -> None:
    """``save_pretrained`` of a PEFT model. Every rank calls it; rank 0 writes."""
    if engine_of(model).suspended:  # inside gathered(), as in save_adapter()
        type(model).save_pretrained(model, save_directory, **options)
        return
    adapters = options.pop("selected_adapters", None)
    options.pop("is_main_process", None)
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"save_pretrained: {', '.join(given)} not for a sharded PEFT model; save without, or "
            "inside `with shardwise.gathered(model):`"
        )
    save_adapter(model, save_directory, adapters)


def _refuse_resize(*args: object, **kwargs: object) -> NoReturn:
    raise ConfigError(
        "resize_token_embeddings: the model is sharded, and its shards keep their shapes. Resize "
        "the plain model before shard(); after from_pretrained(), resize a plain copy and save it"
    )


def _load_state_dict(
    model: nn.Module, state_dict: Mapping[str, object], *args: Any, **kwargs: Any
) -> object:
    """Load full tensors too: each rank cuts its slice, because DTensors load only DTensors."""
    compare_load(model, state_dict)  # before the cut, which hides differences between ranks
    return type(model).load_state_dict(model, cut_state_dict(model, state_dict), *args, **kwargs)


def _to(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Do nothing if the model is on this device; else call ``to``, which sharded models refuse."""
    asked: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = asked[:2]
    here = engine_of(model).comm.device
    indices = (None, here.index, 0) if here.type == "cpu" else (None, here.index)
    is_here = device is None or (device.type == here.type and device.index in indices)
    if dtype is None and is_here:
        return model
    return type(model).to(model, *args, **kwargs)
