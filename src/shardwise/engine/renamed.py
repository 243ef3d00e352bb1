"""Parameters of version 0.1, which are accepted until version 0.4 with a warning."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.axes import Axes
from shardwise.comm.listener import WAITS
from shardwise.config import Schedule, Units
from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

_REMOVAL = "the old name goes with version 0.4"
# For each old parameter, the setting that holds it today, and its class.
_SETTINGS: dict[str, tuple[str, type[Schedule | Units]]] = {
    **dict.fromkeys(("prefetch_bytes", "bucket_bytes", "reduce_every"), ("schedule", Schedule)),
    **dict.fromkeys(("optional", "experts", "placements", "init"), ("units", Units)),
}
_AXES = ("replicate_axis", "shard_axis")


def move_renamed(settings: dict[str, Any], old: Mapping[str, Any], caller: str) -> None:
    """Move old parameters to their new places in ``settings``, with a warning of each.

    ``settings`` has ``mesh``, ``units`` and ``schedule``.

    **Raises** TypeError for any other name, with the nearest one.
    """
    known = (*_SETTINGS, *_AXES, "hang_timeout")
    for name in old:
        if name not in known:
            hint = did_you_mean(name, (*settings, *known))
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    axes = [(name, old[name]) for name in _AXES if old.get(name) is not None]
    for name, _ in axes:
        _warn_of_setting(caller, name, 'a slice of the mesh: mesh["replicate", "shard"]')
    if axes:  # first, so that a refusal of another setting reaches the ranks of these axes
        settings["mesh"] = _slice(settings["mesh"], axes)
    for name, value in old.items():
        if name in _SETTINGS:
            setting, kind = _SETTINGS[name]
            _warn_of_setting(
                caller, name, f"{setting}=shardwise.config.{kind.__name__}({name}=...)"
            )
            settings[setting] = replace(kind.of(settings[setting]), **{name: value})
    if old.get("hang_timeout") is not None:
        _warn_of_setting(caller, "hang_timeout", "shardwise.debug.watch(seconds), called before")
        WAITS.set_limit(old["hang_timeout"])


def _warn_of_setting(caller: str, old: str, new: str) -> None:
    warnings.warn(f"{caller}({old}=) is now {new}; {_REMOVAL}", FutureWarning, stacklevel=4)


def _slice(mesh: DeviceMesh | Axes | None, axes: Sequence[tuple[str, str]]) -> DeviceMesh:
    """Return a mesh's slice of the named axes. **Raises** ConfigError for unknown names."""
    mesh = mesh.mesh if isinstance(mesh, Axes) else mesh
    if axes[-1][0] != "shard_axis":
        raise ConfigError(f"replicate_axis={axes[0][1]!r}: name shard_axis too")
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"{axes[0][0]}={axes[0][1]!r}: name axes only together with mesh=")
    names = tuple(mesh.mesh_dim_names or ())
    for setting, name in axes:
        if name not in names:
            raise ConfigError(f"{setting}={name!r}: the mesh has the axes {names or '(unnamed)'}")
    chosen = tuple(name for _, name in axes)
    if list(chosen) != sorted(set(chosen), key=names.index):
        raise ConfigError(
            f"replicate_axis={chosen[0]!r}, shard_axis={chosen[-1]!r}: expected two axes of the "
            f"mesh {names}, the replicate axis first, so that shards are neighbours"
        )
    return mesh if chosen == names else mesh[chosen]
