"""What a sharded model looks like: its units as a tree, with bytes and padding."""

from dataclasses import dataclass

from torch import nn

from shardwise.engine.api import engine_of
from shardwise.quantities import format_bytes, format_count
from shardwise.unit.unit import Unit

_PADDING_TO_MENTION = 0.03


@dataclass(frozen=True)
class UnitDescription:
    """One unit: sizes in bytes of the master dtype; padding summed over the ranks."""

    name: str
    class_name: str
    num_params: int
    numel: int
    full_bytes: int
    rank_bytes: int
    padding_bytes: int
    dtype: str
    layout: str

    @property
    def padding_share(self) -> float:
        """Padding as a share of the unit's bytes."""
        return self.padding_bytes / self.full_bytes if self.full_bytes else 0.0


@dataclass(frozen=True)
class Description:
    """A sharded model: its stage, its ranks, its units."""

    stage: int
    num_shards: int
    num_replicas: int
    units: tuple[UnitDescription, ...]

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters in the master dtype."""
        return sum(u.full_bytes for u in self.units)

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's slices of them, padding included."""
        return sum(u.rank_bytes for u in self.units)

    def __str__(self) -> str:
        """Draw the units as a tree."""
        replicas = f" x {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        lines = [
            f"stage {self.stage} over {self.num_shards} ranks{replicas}: "
            f"{format_count(sum(u.numel for u in self.units))} parameters, "
            f"{format_bytes(self.full_bytes)} full, {format_bytes(self.rank_bytes)} per rank"
        ]
        root, *others = self.units
        names = {u.name for u in others}
        lines.append(self._line(root, "", root.class_name))
        for number, unit in enumerate(others):
            depth = sum(unit.name.startswith(f"{n}.") for n in names)
            branch = "└─ " if number == len(others) - 1 else "├─ "
            lines.append(self._line(unit, "│  " * depth + branch, unit.name))
        lines += [
            f"'{unit.name or '(root)'}': rows that do not divide by {self.num_shards} cost "
            f'{unit.padding_share:.1%} padding; layout="flat" would cost none'
            for unit in self.units
            if unit.layout == "rows" and unit.padding_share > _PADDING_TO_MENTION
        ]
        return "\n".join(lines)

    def _line(self, unit: UnitDescription, branch: str, label: str) -> str:
        padding = f"{format_bytes(unit.padding_bytes)} ({unit.padding_share:.1%})"
        return (
            f"{branch}{label} [{unit.class_name}]  {unit.num_params} parameters, "
            f"{format_count(unit.numel)} elements, {unit.dtype}, {unit.layout}: "
            f"{format_bytes(unit.full_bytes)} full, {format_bytes(unit.rank_bytes)} per rank, "
            f"padding {padding}, stage {self.stage}"
        )


def describe(model: nn.Module) -> Description:
    """Describe a sharded model's units; ``print`` it for a tree."""
    engine = engine_of(model)
    axes = engine.comm.axes
    return Description(
        engine.config.stage.number,
        axes.shard.size,
        axes.replicate.size if axes.replicate else 1,
        tuple(_describe_unit(u) for u in engine.units),
    )


def _describe_unit(unit: Unit) -> UnitDescription:
    full = padding = numel = rank_bytes = 0
    names = set()
    for storage in unit.storages:
        size = storage.master.element_size()
        numel += storage.layout.numel
        full += storage.layout.numel * size
        padding += (storage.layout.full_numel - storage.layout.numel) * size
        rank_bytes += storage.shard_bytes
        master, compute = (
            str(d).removeprefix("torch.") for d in (storage.master.dtype, storage.full.dtype)
        )
        names.add(master if master == compute else f"{master} (computes in {compute})")
    return UnitDescription(
        name=unit.name,
        class_name=type(unit.module).__name__,
        num_params=len(unit.params),
        numel=numel,
        full_bytes=full,
        rank_bytes=rank_bytes,
        padding_bytes=padding,
        dtype=", ".join(sorted(names)) or "-",
        layout=unit.storages[0].layout.kind if unit.storages else "-",
    )
