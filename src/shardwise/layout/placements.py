"""Where each parameter is sharded: over the model's mesh or its own, along dim 0 or another one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.axes import Axes
from shardwise.config import Placement, Placements
from shardwise.errors import ConfigError
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.mesh import DataAxes, resolve_axes


def with_experts(
    specs: Sequence[UnitSpec],
    placements: Placements | None,
    experts: str | Sequence[str],
    mesh: object,
) -> Placements | None:
    """Place what ``experts`` names on the expert mesh of `Axes`, before other placements.

    Where ``ep`` is 1 an expert is a module like any other. A stage of a pipeline may have none.

    **Raises** ConfigError for a name that fits nothing, and for experts that are not spread.
    """
    if not experts:
        return placements
    if not isinstance(mesh, Axes):
        raise ConfigError(
            f"experts={experts!r}: which ranks share an expert says mesh=shardwise.Axes(..., ep=n)"
        )
    if placements is not None and not isinstance(placements, Mapping):
        raise ConfigError("experts: placements is a function; let it return axes.experts for them")
    names = [experts] if isinstance(experts, str) else list(experts)
    params = [param for spec in specs for param in spec.params]
    if mesh.pp > 1:
        names = [name for name in names if any(_fits(name, param) for param in params)]
    for name in names:
        found = _named("experts", name, params)
        plain = next((param for param in found if not isinstance(param.param, DTensor)), None)
        if mesh.ep > 1 and plain is not None:
            raise ConfigError(
                f"experts: '{plain.name}' is no DTensor on axes['ep'], so each of the {mesh.ep} "
                "ranks there would train one of its own: spread it first, by "
                "spread_experts(model, axes), or a model of transformers by parallelize()"
            )
    if mesh.ep == 1:
        return placements
    return {**dict.fromkeys(names, mesh.experts), **(placements or {})}


def place_params(
    specs: Sequence[UnitSpec], placements: Placements | None, axes: DataAxes, layout: str
) -> tuple[UnitSpec, ...]:
    """Give every parameter its mesh and its dim; a unit on several meshes becomes several units.

    ``placements`` names parameters, or modules for all that is in them, with ``*`` for anything,
    and says a mesh (of one axis, or (replicate, shard)), a ``Shard`` or both; the first name that
    fits counts. Or it is a function of a parameter's name and the parameter.

    **Raises** ConfigError naming the parameter, for a name that fits none, a mesh that is no part
    of the model's, a dim that cannot be cut evenly, and DTensors that cannot be cut further.
    """
    placed = tuple(specs) if placements is None else _placed(specs, placements, axes, layout)
    for spec in placed:
        for param in spec.params:
            if isinstance(param.param, DTensor):
                _check_piece(param.name, param.param, spec.axes or axes, axes)
    return placed


def _placed(
    specs: Sequence[UnitSpec], placements: Placements, axes: DataAxes, layout: str
) -> tuple[UnitSpec, ...]:
    choose = _chooser(placements, [p for spec in specs for p in spec.params])
    known: dict[DeviceMesh, DataAxes] = {axes.mesh: axes}
    found: list[UnitSpec] = []
    for spec in specs:
        by_mesh: dict[DeviceMesh, list[ParamSpec]] = {axes.mesh: []} if not spec.name else {}
        for param in spec.params:
            mesh, dim = _asked(choose(param), param, axes)
            if mesh not in known:
                known[mesh] = _part_of(axes, mesh, param)
            _check_dim(param, dim, known[mesh].shard.size, layout)
            by_mesh.setdefault(mesh, []).append(replace(param, dim=dim))
        found += [
            replace(spec, params=tuple(params), axes=None if mesh == axes.mesh else known[mesh])
            for mesh, params in by_mesh.items()
        ]
    return tuple(found)


def _chooser(
    placements: Placements, params: Sequence[ParamSpec]
) -> Callable[[ParamSpec], Placement | None]:
    if not isinstance(placements, Mapping):
        if not callable(placements):
            raise ConfigError(
                f"placements={placements!r}: expected a mapping of names, or a function of a "
                "parameter's name and the parameter"
            )
        function = placements
        return lambda param: _answer(function, param)
    rules = placements
    for pattern in rules:
        if not isinstance(pattern, str):
            raise ConfigError(f"placements: {pattern!r} is no name of a parameter or a module")
        _named("placements", pattern, params)
    return lambda param: next((p for name, p in rules.items() if _fits(name, param)), None)


def _answer(
    function: Callable[[str, nn.Parameter], Placement | None], param: ParamSpec
) -> Placement | None:
    """Ask a function of the user's; an error of it is one of the setting, which all ranks hear."""
    try:
        return function(param.name, param.param)
    except Exception as error:
        raise ConfigError(
            f"placements: the function raised {type(error).__name__} for '{param.name}': {error}. "
            "It is called with a parameter's name and the parameter"
        ) from error


def _named(setting: str, pattern: str, params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return the parameters that a pattern names. **Raises** ConfigError where there is none."""
    found = [param for param in params if _fits(pattern, param)]
    if not found:
        raise ConfigError(
            f"{setting}: '{pattern}' is the name of no parameter and of no module that has some; "
            f"the model has '{params[0].name}' and others"
        )
    return found


def _fits(pattern: str, param: ParamSpec) -> bool:
    return any(
        fnmatchcase(u.name, pattern) or fnmatchcase(u.name, f"{pattern}.*") for u in param.uses
    )


def _asked(placement: object, param: ParamSpec, axes: DataAxes) -> tuple[DeviceMesh, int]:
    """Return the mesh and the dim, not negative."""
    given = placement if isinstance(placement, tuple) else (placement,)
    mesh, dim = axes.mesh, 0
    kinds = [type(each) for each in given]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"placements: '{param.name}' gets {placement!r}; name one of each kind")
    for each in given:
        if isinstance(each, DeviceMesh):
            mesh = each
        elif isinstance(each, Shard):
            dim = each.dim
        elif each is not None:
            raise ConfigError(
                f"placements: '{param.name}' gets {each!r}; expected a DeviceMesh, a Shard of "
                "torch.distributed.tensor, a tuple of both, or None"
            )
    ndim = param.param.ndim
    if not -ndim <= dim < max(ndim, 1):
        raise ConfigError(
            f"placements: '{param.name}' has {ndim} dims, and was to be cut along dim {dim}"
        )
    return mesh, dim + ndim if dim < 0 else dim


def _part_of(axes: DataAxes, mesh: DeviceMesh, param: ParamSpec) -> DataAxes:
    """Return the axes of another mesh than the model's.

    An expert, a DTensor on axes of its own, may be sharded over ranks of other tensor-parallel
    groups too (tp > ep): tokens come to it from them all.
    """
    what = f"placements: '{param.name}' gets {mesh}"
    strangers = set(mesh.mesh.flatten().tolist()) - set(axes.mesh.mesh.flatten().tolist())
    if strangers and not isinstance(param.param, DTensor):
        raise ConfigError(f"{what}: ranks {sorted(strangers)} are not of the model's {axes.mesh}")
    try:
        found = resolve_axes(mesh, mesh.device_type)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    return replace(found, stages=axes.stages)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a DTensor; another tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _check_dim(param: ParamSpec, dim: int, num_shards: int, layout: str) -> None:
    if dim == 0:
        return
    if layout != "rows":
        raise ConfigError(
            f"placements: '{param.name}' was to be cut along dim {dim}, and layout={layout!r} cuts "
            'ranges of elements; use layout="rows"'
        )
    size = local_of(param.param).shape[dim]
    if size % num_shards:
        raise ConfigError(
            f"placements: dim {dim} of '{param.name}' {tuple(param.param.shape)} has {size} "
            f"elements here, which {num_shards} ranks cannot share evenly; only dim 0 may be uneven"
        )


def _check_piece(name: str, param: DTensor, axes: DataAxes, of_model: DataAxes) -> None:
    own, mesh = param._spec, axes.mesh
    what = f"model: parameter '{name}' is a DTensor {own.placements} on {own.mesh}"
    if not all(isinstance(at, Shard | Replicate) for at in own.placements):
        raise ConfigError(
            f"{what}; shard() takes those that are Shard or Replicate on each axis. Packed weights "
            "of experts, which tensor parallelism cuts so, go over ep: call parallelize() and "
            'shard() with Axes(..., ep=n) and experts="*.experts"; leave others out of the plan'
        )
    both = set(own.mesh.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
    if len(both) > 1 and "ep" in (own.mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"{what}, so it is one of the experts, and has a mesh of its own: name them. With "
            "mesh=shardwise.Axes(..., ep=n), call "
            "shard(model, mesh=axes, units=Units(experts='*.experts'))"
        )
    if len(both) > 1:
        raise ConfigError(
            f"{what}, and the data-parallel mesh has ranks {sorted(both)} of it too. Pass the axes "
            "that carry data parallelism alone, of the mesh that both are parts of: "
            'shard(model, mesh=world["dp"])'
        )
    try:
        joined = DeviceMesh._concatenate([mesh, own.mesh])
    except RuntimeError as error:
        raise ConfigError(
            f"{what}, and the data-parallel mesh is no part of the same mesh ({error}). Make one, "
            'say init_device_mesh(..., (2, 4), mesh_dim_names=("dp", "tp")), and take both from it'
        ) from error
    left_out = set(of_model.mesh.mesh.flatten().tolist()) - set(joined.mesh.flatten().tolist())
    if left_out:
        raise ConfigError(
            f"{what}, and {mesh} does not have ranks {sorted(left_out)} of the model's mesh, whose "
            "gradients would be left out: place it on a mesh with all data-parallel axes"
        )
