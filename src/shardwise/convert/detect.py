"""Open another system's checkpoint: the names of its files show its format."""

import re
from contextlib import suppress
from pathlib import Path

from shardwise.convert.dcp import open_dcp
from shardwise.convert.deepspeed import open_deepspeed
from shardwise.convert.huggingface import open_huggingface
from shardwise.convert.pieces import PieceSource
from shardwise.errors import ConfigError

FORMATS = {"hf": "Hugging Face safetensors", "dcp": "torch DCP", "deepspeed": "DeepSpeed ZeRO"}

_OURS = r"manifest\.json|rank\d{5,}\.json|step-\d{8,}"
_FOLDERS = {
    "hf": r"model\.safetensors(\.index\.json)?",
    "dcp": r"\.metadata|.*\.distcp",
    "deepspeed": r"latest|global_step\d+|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt",
}
_VERL = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_FILES = _FOLDERS | {"hf": r".*\.(safetensors|json)"}


def open_any(
    path: Path, tag: str | None = None, name: str | None = None
) -> tuple[str, PieceSource]:
    """Return the format's name (a key of `FORMATS`) and the source.

    ``path`` is the other checkpoint's folder or file. ``tag`` chooses one of DeepSpeed's, by
    default the one that ``latest`` names. ``name`` is the format; by default the files' names
    show it.

    **Raises** ConfigError when the format is not clear, when it is Shardwise's own, or when it has
    no tags; CheckpointError when the checkpoint is damaged, or not of this format.
    """
    _refuse_verl(path)
    found = name or _format_of(path)
    if tag is not None and found != "deepspeed":
        raise ConfigError(f"a tag (--tag) is for DeepSpeed; {path} is {FORMATS[found]}")
    if found == "hf":
        return found, open_huggingface(path)
    return found, open_dcp(path) if found == "dcp" else open_deepspeed(path, tag)


def _refuse_verl(path: Path) -> None:
    """Refuse the files that verl writes for each rank of its FSDP workers."""
    found = [path] if _VERL.fullmatch(path.name) else []
    with suppress(OSError):
        files = sorted(p for pattern in ("*.pt", "*/*.pt") for p in path.glob(pattern))
        found += [p for p in files if _VERL.fullmatch(p.name)]
    if found:
        home = found[0].parent
        raise ConfigError(
            f"{home} has the files of ranks that verl writes ({found[0].name}), pickles of "
            "DTensors. Let verl join them: `python -m verl.model_merger merge --backend fsdp "
            f"--local_dir {home} --target_dir merged`, then import `merged` (--from hf). That has "
            "the weights; the optimizer stays in verl's files"
        )


def _format_of(path: Path) -> str:
    is_file = path.is_file()
    try:
        names = [path.name] if is_file else [p.name for p in path.iterdir()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if any(re.fullmatch(_OURS, name) for name in names):
        raise ConfigError(f"{path} is a checkpoint of ours already: load it as it is")
    patterns = _FILES if is_file else _FOLDERS
    found = [f for f, p in patterns.items() if any(re.fullmatch(p, name) for name in names)]
    if len(found) == 1:
        return found[0]
    formats = " and ".join(FORMATS[f] for f in found) or "none of the formats that can be read"
    raise ConfigError(f"{path} looks like {formats}: say which (--from) of hf, dcp and deepspeed")
