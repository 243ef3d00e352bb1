"""DeepSpeed's universal checkpoints: a folder for each parameter, with whole weights and states.

They are made of ZeRO's files by DeepSpeed's own converter. The model's files stay as they were;
``zero/optimizer_state.pt`` has the groups and, of stage 3, the step counts.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from shardwise.checkpoint.files import RealFiles
from shardwise.checkpoint.source import Kind, TensorInfo
from shardwise.convert.deepspeed_parts import NAMES, Part, Shapes, Trained, stage_of
from shardwise.convert.foreign import is_plain_name
from shardwise.convert.torch_file import TorchFile
from shardwise.convert.torch_names import StoredTensor
from shardwise.errors import CheckpointError, DamagedCheckpoint

UNIVERSAL = "zero"
_WEIGHTS = "fp32.pt"


def read_universal(folder: Path, shapes: Sequence[Shapes]) -> Trained:
    """Read the tables of all parameters' files.

    **Raises** DamagedCheckpoint when a parameter is missing or has another size.
    """
    home = folder / UNIVERSAL
    common = TorchFile(home / "optimizer_state.pt", NAMES)
    trained = Trained(stage_of(common.value, common.where))
    trained.add_groups(common, common.value["param_groups"], shapes)
    inner = common.value.get("optimizer_state_dict") or {}
    for number, of_flat in enumerate(shapes):
        state = inner["state"].get(number, {}) if "state" in inner else {}
        for name, shape in of_flat.items():
            if not is_plain_name(name):
                raise CheckpointError(
                    f"{home}: parameter {name!r:.80} is no plain name of a folder"
                )
            if "step" in state:
                trained.add_scalar(name, "step", common.plain(state["step"], "step"), common)
            _add_param(trained, home / name, name, shape)
    return trained


def _add_param(trained: Trained, folder: Path, name: str, shape: tuple[int, ...]) -> None:
    files = [entry.name for entry in RealFiles().list(folder)] if folder.is_dir() else []
    if _WEIGHTS not in files:
        raise DamagedCheckpoint(f"{folder / _WEIGHTS} is missing; load another checkpoint")
    for file_name in (_WEIGHTS, *(f for f in files if f.endswith(".pt") and f != _WEIGHTS)):
        file = TorchFile(folder / file_name, NAMES)
        stored: Any = file.value["param"] if isinstance(file.value, Mapping) else file.value
        key = "" if file_name == _WEIGHTS else file_name.removesuffix(".pt")
        if not isinstance(stored, StoredTensor) or (key and not stored.shape and shape):
            trained.add_scalar(name, key, file.plain(stored, key), file)
        elif stored.numel != prod(shape):
            raise DamagedCheckpoint(
                f"{file.where}: {stored.numel} elements; '{name}' of shape {shape} has "
                f"{prod(shape)}"
            )
        else:
            kind: Kind = "optimizer" if key else "param"
            info = TensorInfo(kind, name, stored.dtype, shape, key)
            trained.parts[info] = [Part(0, stored.numel, file, stored, 0)]
