"""Facts about checkpoints, without reading their tensors; imports no torch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.files import Entry, Files
from shardwise.checkpoint.folder import (
    LOCK,
    check_quickly,
    lock_holder,
    step_name,
    steps_in,
)
from shardwise.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorRow,
    is_ours,
    parse_manifest,
)
from shardwise.checkpoint.read import Checkpoint, read_small
from shardwise.checkpoint.trash import is_held, leftovers_in
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint

KINDS = {
    "param": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer",
    "extra": "your own state",
}
_OF_MANIFEST = ("saved_at", "stage", "num_ranks", "num_shards", "num_replicas")


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


def is_gone(files: Files, path: Path) -> bool:
    """Tell whether a checkpoint was removed, as a running run removes old ones."""
    try:
        files.list(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True)
class Saved:
    """A checkpoint as the quick check finds it; ``damage`` is "" without damage.

    If the manifest cannot be read, it and the bytes of all files are left at None.
    """

    path: Path
    manifest: Manifest | None
    num_bytes: int | None
    damage: str

    @classmethod
    def found(cls, files: Files, path: Path) -> "Saved":
        """Look at a checkpoint."""
        manifest, damage = None, ""
        try:
            manifest = check_quickly(files, path)[0]
        except (CheckpointError, OSError) as error:
            damage = explain(error)
        try:
            if manifest is None:
                name = str(path / MANIFEST)
                manifest = parse_manifest(read_small(files, path / MANIFEST), name)
            sizes = {entry.name: entry.size for entry in files.list(path)}
            of_ranks = sum(row.index_bytes + row.file_bytes for row in manifest.ranks)
            return cls(path, manifest, of_ranks + sizes[MANIFEST], damage)
        except (CheckpointError, OSError, KeyError) as error:
            return cls(path, None, None, damage or explain(error))

    def to_json(self) -> dict[str, object]:
        """Return the facts as values of JSON."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "damage": self.damage or None,
            **{name: getattr(manifest, name, None) for name in _OF_MANIFEST},
            "num_meshes": None if manifest is None else len(manifest.meshes) or 1,
            "num_bytes": self.num_bytes,
        }


@dataclass(frozen=True)
class RunFacts:
    """All checkpoints of a run by step, the newest first, and the process that writes now.

    ``removed`` are the steps of those that were removed meanwhile.
    """

    path: Path
    checkpoints: dict[int, Saved]
    removed: list[int]
    leftovers: list[str]
    lock_holder: str | None

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint without damage."""
        return next((step for step, saved in self.checkpoints.items() if not saved.damage), None)

    def to_json(self) -> dict[str, object]:
        """Return the facts as values of JSON."""
        return {
            "kind": "run",
            "path": str(self.path),
            "checkpoints": [
                {"step": step, "is_newest": step == self.newest, **saved.to_json()}
                for step, saved in self.checkpoints.items()
            ],
            "removed_meanwhile": self.removed,
            "leftovers": self.leftovers,
            "lock_holder": self.lock_holder,
        }


def run_facts(files: Files, folder: Path) -> RunFacts:
    """Describe a run."""
    found: dict[int, Saved] = {}
    removed: list[int] = []
    for step in steps_in(files, folder):
        saved = Saved.found(files, folder / step_name(step))
        if saved.damage and is_gone(files, saved.path):
            removed.append(step)
        else:
            found[step] = saved
    try:
        holder = lock_holder(files, folder)
    except OSError as error:
        holder = f"unknown: {explain(error)}"
    leftovers = [e.name for e in leftovers_in(files, folder) if not _is_held(files, folder, e)]
    return RunFacts(folder, found, removed, leftovers, holder)


def _is_held(files: Files, folder: Path, entry: Entry) -> bool:
    """Tell whether a plain save writes there now; False if that is not known."""
    try:
        return is_held(files, folder / entry.name)
    except (OSError, CheckpointError):
        return False


@dataclass(frozen=True)
class TensorFacts:
    """One tensor; ``num_parts`` counts its slices, pieces, or the ranks that have their own."""

    name: str
    state: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    num_bytes: int
    layout: str
    num_parts: int

    @classmethod
    def of(cls, row: TensorRow, layout: str, num_parts: int) -> "TensorFacts":
        """Return the facts of the tensor that a row is of."""
        info = row.info
        return cls(
            *(row.name, row.state, row.kind, row.dtype, info.shape, info.numel, info.num_bytes),
            *(layout, num_parts),
        )


@dataclass(frozen=True)
class CheckpointFacts:
    """One checkpoint. ``groups`` are the settings of the optimizer's groups."""

    saved: Saved
    manifest: Manifest
    tensors: list[TensorFacts]
    groups: list[dict[str, object]]
    lists_tensors: bool

    def of_kind(self, kind: str) -> list[TensorFacts]:
        """Return the tensors of a kind of `KINDS`."""
        return [tensor for tensor in self.tensors if tensor.kind == kind]

    def to_json(self) -> dict[str, object]:
        """Return the facts as values of JSON."""
        facts: dict[str, object] = {"kind": "checkpoint", **self.saved.to_json()}
        for kind in KINDS:
            tensors = self.of_kind(kind)
            facts[f"num_{kind}_tensors"] = len(tensors)
            facts[f"num_{kind}_elements"] = sum(each.numel for each in tensors)
            facts[f"{kind}_bytes"] = sum(each.num_bytes for each in tensors)
        for name in ("step", "run", "shardwise", "torch", "tied"):
            facts[name] = getattr(self.manifest, name)
        row = self.manifest.optimizer
        of_optimizer = {"class_name": row.class_name, "groups": self.groups} if row else None
        facts["optimizer"] = of_optimizer
        if self.lists_tensors:
            facts["tensors"] = [asdict(each) for each in self.tensors]
        return facts


def checkpoint_facts(files: Files, path: Path, with_tensors: bool) -> CheckpointFacts:
    """Describe one checkpoint. **Raises** DamagedCheckpoint if its manifest is unreadable."""
    saved = Saved.found(files, path)
    manifest = saved.manifest
    if manifest is None:
        raise DamagedCheckpoint(saved.damage)
    tensors = [
        _of_rows(manifest, [manifest.tensors[number] for number in numbers])
        for numbers in manifest.rows_of.values()
    ]
    try:
        tensors += _own_tensors(files, path, manifest)
    except (CheckpointError, OSError, IndexError) as error:
        saved = replace(saved, damage=saved.damage or explain(error))
    groups = _groups(_plain(manifest.optimizer.groups)) if manifest.optimizer else []
    return CheckpointFacts(saved, manifest, tensors, groups, with_tensors)


def _of_rows(manifest: Manifest, rows: list[TensorRow]) -> TensorFacts:
    """Describe a tensor by its rows, one or one per piece."""
    layouts = [row.layout for row in rows if row.layout is not None]
    if not layouts:
        return TensorFacts.of(rows[0], "whole" if len(rows) == 1 else "pieces", len(rows))
    num_parts = sum(manifest.built_layouts[layout].num_ranks for layout in layouts)
    return TensorFacts.of(rows[0], manifest.layouts[layouts[0]].kind, num_parts)


def _own_tensors(files: Files, path: Path, manifest: Manifest) -> Iterator[TensorFacts]:
    """Yield the ranks' own tensors; those of one name count together."""
    found: dict[object, TensorFacts] = {}
    for rank in range(len(manifest.ranks)):
        for row in Checkpoint(files, path, manifest).index_of(rank).own:
            one, before = TensorFacts.of(row, "own", 1), found.get(row.info.key)
            if before is not None:
                one = replace(
                    before,
                    numel=before.numel + one.numel,
                    num_bytes=before.num_bytes + one.num_bytes,
                    num_parts=before.num_parts + 1,
                )
            found[row.info.key] = one
    yield from found.values()


def _groups(value: object) -> list[dict[str, object]]:
    groups = [g for g in value if isinstance(g, dict)] if isinstance(value, list) else []
    for group in groups:
        params = group.pop("params", None)
        group["num_params"] = len(params) if isinstance(params, list) else 0
    return groups


def _plain(value: object) -> object:
    """Return an encoded value as plain JSON, without the types that `values.decode` restores."""
    if isinstance(value, dict) and "$" in value:
        return "(a tensor)" if value["$"] == "tensor" else _plain(value.get("of"))
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
