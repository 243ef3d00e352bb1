"""The degrees of parallelism of a job, and their meshes.

Note [The algebra of axes]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Names and algebra are torchtitan's (distributed/parallel_dims.py), so that configurations for one
fit the other. All ranks are ``pp x dp_replicate x dp_shard x cp x tp``; ranks along the last axis
are neighbours. Parameters are sharded over ``fsdp = dp_shard x cp``, since gradients are also
summed over ranks with parts of a sequence. Experts use other axes of the same ranks. ``ep`` groups
of neighbours are cut out of ``dp_shard x cp x tp``; the rest, ``efsdp = dp_shard x cp x tp / ep``,
shards each expert. A loss is summed over ``dp_replicate x dp_shard x cp``, the ranks with different
tokens.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SHARDING = ("dp_shard", "cp")
_VIEWS = (*DENSE, "fsdp", "loss", "ep", "efsdp")
# by world group
_MESHES: WeakKeyDictionary[ProcessGroup, dict[Hashable, DeviceMesh]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Axes:
    """Number of ranks of each kind of parallelism; ``dp_shard`` = -1 takes the remaining ranks.

    ``dp_replicate`` copies of ``dp_shard`` shards (HSDP); ``cp`` parts of each sequence, ``tp`` of
    each layer, ``pp`` of the model's depth; experts are spread over ``ep`` ranks. ``axes["tp"]`` is
    the mesh of one axis, by these names, "fsdp", "efsdp" or "loss"; see Note [The algebra of axes].
    `mesh` has all axes. Meshes are made on first use, by all ranks together.

    **Raises** ConfigError with the number to change.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    device_type: str | None = None

    def __post_init__(self) -> None:
        """Refuse invalid degrees."""
        for name, degree in self._degrees.items():
            least = -1 if name == "dp_shard" else 1
            if type(degree) is not int or degree < least or degree == 0:
                expected = "a number of ranks, or -1 for those that are left"
                expected = expected if name == "dp_shard" else "a number of ranks from 1"
                raise ConfigError(f"{name}={degree!r}: expected {expected}")

    @property
    def _degrees(self) -> dict[str, int]:
        names = (f.name for f in fields(self) if f.name != "device_type")
        return {name: getattr(self, name) for name in names}

    def over(self, num_ranks: int) -> Axes:
        """Return these axes with ``dp_shard`` resolved for ``num_ranks``.

        **Raises** ConfigError if the degrees do not fit.
        """
        others = {name: degree for name, degree in self._dense.items() if name != "dp_shard"}
        shards, left = divmod(num_ranks, prod(others.values()))
        if self.dp_shard == -1 and not left and shards:
            found = replace(self, dp_shard=shards)
        elif self.dp_shard != -1 and prod(self._dense.values()) == num_ranks:
            found = self
        else:
            raise ConfigError(self._misfit(num_ranks))
        found._check_experts()
        return found

    def part_of_batch(self, rank: int) -> tuple[int, int]:
        """Return a rank's part of the batch, and the number of parts; call `over` before.

        Ranks that share a layer, a sequence or the model's depth have the same part.
        """
        copies = self.dp_replicate * self.dp_shard
        return rank // (self.cp * self.tp) % copies, copies

    def peer_in_part(self, rank: int) -> int:
        """Return a rank's place among those with its part of the batch; call `over` before."""
        inner = self.cp * self.tp
        copies = self.dp_replicate * self.dp_shard
        return rank // (inner * copies) * inner + rank % inner

    @property
    def _dense(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DENSE}

    def _misfit(self, num_ranks: int) -> str:
        given = {name: degree for name, degree in self._dense.items() if degree not in (1, -1)}
        product = prod(given.values())
        degrees = " x ".join(f"{name}={degree}" for name, degree in given.items())
        degrees = f"{degrees} = {product}" if len(given) > 1 else degrees
        if self.dp_shard == -1:
            what = f"axes: {degrees} does not divide {num_ranks} ranks"
        else:
            what = f"axes: {degrees or 'dp_shard=1'} is not the {num_ranks} ranks that there are"
        for name in ("dp_shard", "dp_replicate", "tp", "cp", "pp"):
            if name not in given and not (name == "dp_shard" and self.dp_shard == 1):
                continue
            others = product // given.get(name, 1)
            if num_ranks % others == 0:
                fitting = num_ranks // others
                alone = self.dp_shard != -1
                fits = str(fitting) if alone else _listed(_divisors(fitting))
                return f"{what}: make {name} {fits}, or start {_wanted(product, alone)} ranks"
        return f"{what}: start {_wanted(product, self.dp_shard != -1)} ranks"

    def _check_experts(self) -> None:
        region = self.dp_shard * self.cp * self.tp
        if region % self.ep:
            raise ConfigError(
                f"axes: ep={self.ep} does not divide dp_shard x cp x tp = {self.dp_shard} x "
                f"{self.cp} x {self.tp} = {region}: make ep {_listed(_divisors(region))}"
            )

    # -- meshes
    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the axes `DENSE`, also axes of one rank.

        **Cost** one group per axis; equal `Axes` share them.
        """
        import torch  # here, so that commands can read degrees without torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "axes: there is no process group. Start with torchrun and call "
                "torch.distributed.init_process_group() first; one process is fine"
            )
        sizes = tuple(self.over(dist.get_world_size())._dense.values())
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = self.device_type or ("cpu" if accelerator is None else accelerator.type)
        return shared_mesh(
            (device_type, sizes),
            lambda: init_device_mesh(device_type, sizes, mesh_dim_names=DENSE),
        )

    @cached_property
    def _views(self) -> dict[str, DeviceMesh]:
        return {}

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return the mesh of one axis."""
        if name not in _VIEWS:
            near = did_you_mean(str(name), _VIEWS)
            raise ConfigError(f"axes[{name!r}]: the axes are {', '.join(_VIEWS)}{near}")
        if name not in self._views:
            self._views[name] = self._view(name)
        return self._views[name]

    def _view(self, name: str) -> DeviceMesh:
        if name in DENSE:
            return self.mesh[name]
        if name == "fsdp":
            return joined(self.mesh, _SHARDING, "fsdp")
        if name == "loss":
            return joined(self.mesh, ("dp_replicate", *_SHARDING), "loss")
        region = joined(self.mesh, (*_SHARDING, "tp"), "dp_shard_cp_tp")
        sizes = region.size() // self.ep, self.ep
        pair = shared_mesh(
            (self.mesh.device_type, tuple(self.mesh.shape), sizes),
            lambda: region._unflatten(0, sizes, ("efsdp", "ep")),
        )
        self._views.update(efsdp=pair["efsdp"], ep=pair["ep"])
        return self._views[name]

    @property
    def data(self) -> DeviceMesh:
        """The mesh that `shard()` uses: (fsdp), or (dp_replicate, fsdp) with copies."""
        return data_of(self.mesh)

    @property
    def experts(self) -> DeviceMesh:
        """The mesh that `shard()` uses for experts: (efsdp), or (dp_replicate, efsdp)."""
        if self.dp_replicate == 1:
            return self["efsdp"]
        copies = self["dp_replicate"]
        return type(copies)._concatenate([copies, self["efsdp"]])

    def __str__(self) -> str:
        """Name the degrees that are not 1."""
        return " x ".join(f"{n}={d}" for n, d in self._degrees.items() if d != 1) or "one rank"


def shared_mesh(key: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Return the mesh of an earlier call with this key, or make it; all ranks call it.

    torch closes a mesh's groups with the process group, not with the models on them, so each model
    would leave several gloo groups of three threads each.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None  # there are meshes in a process group only
    made = _MESHES.setdefault(world, {})
    if key in made:
        with suppress(RuntimeError, ValueError, KeyError):  # the group was destroyed since
            made[key].get_all_groups()
            return made[key]
    made[key] = make()
    return made[key]


def data_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data-parallel part of a mesh with axis names of `DENSE`.

    A replicate axis of one rank is left out, since it would cost a collective.
    """
    names = mesh.mesh_dim_names or ()
    sharding = tuple(name for name in names if name in _SHARDING)
    copies = "dp_replicate" in names and mesh["dp_replicate"].size() > 1
    if not sharding:
        raise ConfigError(
            f"mesh: the axes {names} name none to shard over; call one dp_shard (its size may be 1)"
        )
    shards = joined(mesh, sharding, "fsdp")
    return type(mesh)._concatenate([mesh["dp_replicate"], shards]) if copies else shards


def joined(mesh: DeviceMesh, names: Sequence[str], name: str) -> DeviceMesh:
    """Return several axes of a mesh as one, without axes of one rank."""
    longer = tuple(each for each in names if mesh[each].size() > 1)
    if len(longer) <= 1:
        return mesh[longer[0] if longer else names[0]]
    return mesh[longer]._flatten(name)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _wanted(product: int, alone: bool) -> str:
    return str(product) if alone else f"a multiple of {product}"
