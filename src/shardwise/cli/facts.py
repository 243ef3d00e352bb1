"""Facts about checkpoints as plain data, without reading their tensors; imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.files import Entry, Files
from shardwise.checkpoint.folder import (
    LOCK,
    check_quickly,
    lock_holder,
    step_name,
    steps_in,
)
from shardwise.checkpoint.leftovers import is_held, leftovers_in
from shardwise.checkpoint.manifest import Manifest, OptimizerRow, TensorRow, parse_manifest
from shardwise.checkpoint.read import Checkpoint, read_small
from shardwise.checkpoint.sealed import MANIFEST, is_ours
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint

KINDS = {
    "param": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer",
    "extra": "your own state",
}


def kind_of(files: Files, path: Path) -> Literal["checkpoint", "run"]:
    """Tell a checkpoint from a folder of checkpoints. **Raises** ConfigError for other paths."""
    try:
        names = [entry.name for entry in files.list(path)]
    except OSError as error:
        raise ConfigError(f"{path} is no folder that can be read: {error.strerror}") from None
    if any(is_ours(name) for name in names):
        return "checkpoint"
    if steps_in(files, path) or LOCK in names or leftovers_in(files, path):
        return "run"
    raise ConfigError(
        f"{path} is neither a checkpoint ({MANIFEST} and rank00000.json are in it) nor a folder of "
        "checkpoints (step-00000001, ...)"
    )


def checkpoints_at(files: Files, path: Path) -> list[Path]:
    """Return the checkpoint at this path, or all of the run, the newest first."""
    if kind_of(files, path) == "checkpoint":
        return [path]
    return [path / step_name(step) for step in steps_in(files, path)]


def quick_state(files: Files, path: Path) -> tuple[Manifest | None, str]:
    """Return a checkpoint's manifest, if readable, and the damage that the quick check found."""
    try:
        return check_quickly(files, path)[0], ""
    except (CheckpointError, OSError) as error:
        damage = explain(error)
    try:
        name = str(path / MANIFEST)
        return parse_manifest(read_small(files, path / MANIFEST), name), damage
    except (CheckpointError, OSError):
        return None, damage


def disk_bytes(files: Files, path: Path, manifest: Manifest) -> int:
    """Return the bytes of a checkpoint's files, by its manifest."""
    sizes = {entry.name: entry.size for entry in files.list(path)}
    return sum(row.index_bytes + row.file_bytes for row in manifest.ranks) + sizes[MANIFEST]


def bytes_to_read(files: Files, path: Path) -> int:
    """Return the bytes that verifying reads, 0 if they are not known in advance."""
    manifest = quick_state(files, path)[0]
    try:
        return disk_bytes(files, path, manifest) if manifest is not None else 0
    except (OSError, KeyError):
        return 0


def is_gone(files: Files, path: Path) -> bool:
    """Tell whether a checkpoint was removed, as a running run removes old ones."""
    try:
        files.list(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def run_facts(files: Files, folder: Path) -> dict[str, Any]:
    """Describe all checkpoints of a run, the newest first, and the process that writes now."""
    rows: list[dict[str, Any]] = []
    removed: list[int] = []
    for step in steps_in(files, folder):
        path = folder / step_name(step)
        manifest, damage = quick_state(files, path)
        try:
            described = _of_manifest(files, path, manifest)
        except (OSError, KeyError) as error:
            damage = damage or explain(error)
            described = _of_manifest(files, path, None)
        if damage and is_gone(files, path):
            removed.append(step)
            continue
        row = {"step": step, "path": str(path), "damage": damage or None}
        is_newest = not damage and not any(r["is_newest"] for r in rows)
        rows.append(row | {"is_newest": is_newest} | described)
    try:
        holder = lock_holder(files, folder)
    except OSError as error:
        holder = f"unknown: {explain(error)}"
    return {
        "kind": "run",
        "path": str(folder),
        "checkpoints": rows,
        "removed_meanwhile": removed,
        "leftovers": [
            e.name for e in leftovers_in(files, folder) if not _is_held(files, folder, e)
        ],
        "lock_holder": holder,
    }


def _is_held(files: Files, folder: Path, entry: Entry) -> bool:
    """Tell whether a plain save writes there now; False if that is not known."""
    try:
        return is_held(files, folder / entry.name)
    except (OSError, CheckpointError):
        return False


def checkpoint_facts(files: Files, path: Path, with_tensors: bool) -> dict[str, Any]:
    """Describe one checkpoint. **Raises** DamagedCheckpoint if its manifest is unreadable."""
    manifest, damage = quick_state(files, path)
    if manifest is None:
        raise DamagedCheckpoint(damage)
    tensors = [
        _of_tensor(manifest, [manifest.tensors[number] for number in numbers])
        for numbers in manifest.rows_of.values()
    ]
    try:
        tensors += _own_tensors(files, path, manifest)
    except (CheckpointError, OSError, IndexError) as error:
        damage = damage or explain(error)
    sizes: dict[str, Any] = {}
    for kind in KINDS:
        rows = [row for row in tensors if row["kind"] == kind]
        sizes[f"num_{kind}_tensors"] = len(rows)
        sizes[f"num_{kind}_elements"] = sum(row["numel"] for row in rows)
        sizes[f"{kind}_bytes"] = sum(row["num_bytes"] for row in rows)
    facts: dict[str, Any] = {"kind": "checkpoint", "path": str(path), "damage": damage or None}
    facts |= _of_manifest(files, path, manifest) | sizes
    facts |= {
        "step": manifest.step,
        "run": manifest.run,
        "shardwise": manifest.shardwise,
        "torch": manifest.torch,
        "tied": manifest.tied,
        "optimizer": _optimizer(manifest.optimizer) if manifest.optimizer else None,
    }
    return facts | ({"tensors": tensors} if with_tensors else {})


def _of_manifest(files: Files, path: Path, manifest: Manifest | None) -> dict[str, Any]:
    names = ("saved_at", "stage", "num_ranks", "num_shards", "num_replicas")
    if manifest is None:
        return dict.fromkeys((*names, "num_meshes", "num_bytes"))
    facts = {name: getattr(manifest, name) for name in names}
    facts["num_meshes"] = len(manifest.meshes) or 1
    return facts | {"num_bytes": disk_bytes(files, path, manifest)}


def _of_tensor(manifest: Manifest, rows: list[TensorRow]) -> dict[str, Any]:
    """Describe a tensor by its rows, one or one per piece."""
    if rows[0].layout is None:
        return _described(rows[0], "whole" if len(rows) == 1 else "pieces", len(rows))
    layouts = [row.layout for row in rows if row.layout is not None]
    num_parts = sum(manifest.built_layouts[layout].num_ranks for layout in layouts)
    return _described(rows[0], manifest.layouts[layouts[0]].kind, num_parts)


def _described(row: TensorRow, layout: str, num_parts: int) -> dict[str, Any]:
    return {
        "name": row.name,
        "state": row.state,
        "kind": row.kind,
        "dtype": row.dtype,
        "shape": list(row.info.shape),
        "numel": row.info.numel,
        "num_bytes": row.info.num_bytes,
        "layout": layout,
        "num_parts": num_parts,
    }


def _own_tensors(files: Files, path: Path, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the ranks' own tensors; those of one name count together."""
    found: dict[str, dict[str, Any]] = {}
    for rank in range(len(manifest.ranks)):
        for row in Checkpoint(files, path, manifest).index_of(rank).own:
            described = _described(row, "own", 1)
            before = found.setdefault(row.info.key, described)
            if before is not described:
                for key in ("numel", "num_bytes", "num_parts"):
                    before[key] += described[key]
    yield from found.values()


def _optimizer(row: OptimizerRow) -> dict[str, Any]:
    groups = _plain(row.groups)
    groups = [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
    for group in groups:
        params = group.pop("params", None)
        group["num_params"] = len(params) if isinstance(params, list) else 0
    return {"class_name": row.class_name, "groups": groups}


def _plain(value: Any) -> Any:
    """Return an encoded value as plain JSON, without the types that `values.decode` restores."""
    if isinstance(value, dict) and "$" in value:
        return "(a tensor)" if value["$"] == "tensor" else _plain(value.get("of"))
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
