"""Facts about checkpoints, without reading their tensors; imports no torch."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.files import Entry, Files
from shardwise.checkpoint.folder import (
    LOCK,
    is_held,
    leftovers_in,
    lock_holder,
    step_name,
    steps_in,
)
from shardwise.checkpoint.manifest import MANIFEST, Manifest, TensorRow, is_ours, parse_manifest
from shardwise.checkpoint.read import Checkpoint, read_small
from shardwise.checkpoint.verify import check_quickly
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint

KINDS = {
    "param": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer",
    "extra": "your own state",
}


def kind_of(files: Files, path: Path) -> Literal["checkpoint", "run"]:
    """Return the kind of a path. **Raises** ConfigError if it is neither."""
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
    """True if a checkpoint was removed, as a running run removes old ones."""
    try:
        files.list(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True)
class Saved:
    """The result of the quick check of a checkpoint, as in JSON; ``damage`` is None without damage.

    If the manifest cannot be read, its values are None.
    """

    path: str
    damage: str | None
    saved_at: str | None = None
    stage: int | None = None
    num_ranks: int | None = None
    num_shards: int | None = None
    num_replicas: int | None = None
    num_meshes: int | None = None
    num_bytes: int | None = None


def look_at(files: Files, path: Path) -> tuple[Saved, Manifest | None]:
    """Check a checkpoint quickly; return its facts, and its manifest if that can be read."""
    manifest, damage = None, None
    try:
        manifest = check_quickly(files, path)[0]
    except (CheckpointError, OSError) as error:
        damage = explain(error)
    try:
        if manifest is None:
            manifest = parse_manifest(read_small(files, path / MANIFEST), str(path / MANIFEST))
        sizes = {entry.name: entry.size for entry in files.list(path)}
        num_bytes = sum(row.index_bytes + row.file_bytes for row in manifest.ranks)
        num_bytes += sizes[MANIFEST]
    except (CheckpointError, OSError, KeyError) as error:
        return Saved(str(path), damage or explain(error)), None
    saved = Saved(
        str(path),
        damage,
        saved_at=manifest.saved_at,
        stage=manifest.stage,
        num_ranks=manifest.num_ranks,
        num_shards=manifest.num_shards,
        num_replicas=manifest.num_replicas,
        num_meshes=len(manifest.meshes) or 1,
        num_bytes=num_bytes,
    )
    return saved, manifest


@dataclass(frozen=True)
class CheckpointsFacts:
    """All checkpoints of a run by step, the newest first, as JSON has them.

    ``removed_meanwhile`` are the steps of those that were removed during the look, ``lock_holder``
    is the process that writes now.
    """

    kind: str
    path: str
    checkpoints: list["StepFacts"]
    removed_meanwhile: list[int]
    leftovers: list[str]
    lock_holder: str | None


@dataclass(frozen=True)
class StepFacts(Saved):
    """A checkpoint of a run; one is the newest without damage."""

    step: int = 0
    is_newest: bool = False


def run_facts(files: Files, folder: Path) -> CheckpointsFacts:
    """Describe a run."""
    checkpoints: list[StepFacts] = []
    removed: list[int] = []
    for step in steps_in(files, folder):
        path = folder / step_name(step)
        saved = look_at(files, path)[0]
        if saved.damage and is_gone(files, path):
            removed.append(step)
        else:
            is_newest = not saved.damage and not any(earlier.is_newest for earlier in checkpoints)
            checkpoints.append(StepFacts(**vars(saved), step=step, is_newest=is_newest))
    try:
        holder = lock_holder(files, folder)
    except OSError as error:
        holder = f"unknown: {explain(error)}"
    leftovers = [e.name for e in leftovers_in(files, folder) if not _is_held(files, folder, e)]
    return CheckpointsFacts("run", str(folder), checkpoints, removed, leftovers, holder)


def _is_held(files: Files, folder: Path, entry: Entry) -> bool:
    """True if a plain save writes there now; False if that is not known."""
    try:
        return is_held(files, folder / entry.name)
    except (OSError, CheckpointError):
        return False


@dataclass(frozen=True)
class TensorFacts:
    """One tensor; ``num_parts`` counts its slices, its pieces, or the ranks that have one."""

    name: str
    state: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    num_bytes: int
    layout: str
    num_parts: int


@dataclass(frozen=True)
class CheckpointFacts:
    """One checkpoint. ``groups`` are the settings of the optimizer's groups."""

    saved: Saved
    manifest: Manifest
    tensors: list[TensorFacts]
    groups: list[dict[str, object]] = field(default_factory=list)

    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return the numbers of tensors, elements and bytes of each of `KINDS`."""
        sizes = {}
        for kind in KINDS:
            tensors = [tensor for tensor in self.tensors if tensor.kind == kind]
            sizes[kind] = (
                len(tensors),
                sum(tensor.numel for tensor in tensors),
                sum(tensor.num_bytes for tensor in tensors),
            )
        return sizes

    def to_json(self, lists_tensors: bool) -> dict[str, object]:
        """Return the facts as values of JSON."""
        facts: dict[str, object] = {"kind": "checkpoint", **vars(self.saved)}
        for kind, sizes in self.sizes().items():
            names = f"num_{kind}_tensors", f"num_{kind}_elements", f"{kind}_bytes"
            facts.update(zip(names, sizes, strict=True))
        for name in ("step", "run", "shardwise", "torch", "tied"):
            facts[name] = getattr(self.manifest, name)
        row = self.manifest.optimizer
        facts["optimizer"] = row and {"class_name": row.class_name, "groups": self.groups}
        if lists_tensors:
            facts["tensors"] = [asdict(tensor) for tensor in self.tensors]
        return facts


def checkpoint_facts(files: Files, path: Path) -> CheckpointFacts:
    """Describe one checkpoint. **Raises** DamagedCheckpoint if its manifest is unreadable."""
    saved, manifest = look_at(files, path)
    if manifest is None:
        raise DamagedCheckpoint(str(saved.damage))
    tensors = []
    for numbers in manifest.rows_of.values():
        rows = [manifest.tensors[number] for number in numbers]
        layouts = [row.layout for row in rows if row.layout is not None]
        kind, num_parts = "whole" if len(rows) == 1 else "pieces", len(rows)
        if layouts:
            kind = manifest.layouts[layouts[0]].kind
            num_parts = sum(manifest.built_layouts[layout].num_ranks for layout in layouts)
        tensors.append(_tensor_facts(rows[0], kind, num_parts))
    try:
        tensors += _local_tensors(files, path, manifest)
    except (CheckpointError, OSError, IndexError) as error:
        saved = replace(saved, damage=saved.damage or explain(error))
    groups = _plain(manifest.optimizer.groups) if manifest.optimizer else []
    groups = [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
    for group in groups:
        params = group.pop("params", None)
        group["num_params"] = len(params) if isinstance(params, list) else 0
    return CheckpointFacts(saved, manifest, tensors, groups)


def _tensor_facts(row: TensorRow, layout: str, num_parts: int) -> TensorFacts:
    """Return the facts of a row's tensor."""
    info = row.info
    return TensorFacts(
        row.name,
        row.state,
        row.kind,
        row.dtype,
        shape=info.shape,
        numel=info.numel,
        num_bytes=info.num_bytes,
        layout=layout,
        num_parts=num_parts,
    )


def _local_tensors(files: Files, path: Path, manifest: Manifest) -> list[TensorFacts]:
    """Return the tensors that ranks do not share; those of one name count together."""
    by_key: dict[object, TensorFacts] = {}
    for rank in range(len(manifest.ranks)):
        for row in Checkpoint(files, path, manifest).index_of(rank).own:
            one, before = _tensor_facts(row, "own", 1), by_key.get(row.info.key)
            if before is not None:
                numel, num_bytes = before.numel + one.numel, before.num_bytes + one.num_bytes
                num_parts = before.num_parts + 1
                one = replace(before, numel=numel, num_bytes=num_bytes, num_parts=num_parts)
            by_key[row.info.key] = one
    return list(by_key.values())


def _plain(value: object) -> object:
    """Return an encoded value as plain JSON, without the types that `values.decode` restores."""
    if isinstance(value, dict) and "$" in value:
        return "(a tensor)" if value["$"] == "tensor" else _plain(value.get("of"))
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
