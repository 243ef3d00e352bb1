"""Placement of each parameter: its mesh, its dim, or the one rank that owns all of it.

Note [Owners of matrices]
An optimizer that reads whole matrices (Muon, Shampoo, SOAP) steps each matrix on the rank that owns
it, and nothing is sent. Owners are balanced over all matrices of the model: the largest first, to
the least loaded rank. The load is the number of elements that a rank holds, receives and steps. The
work of a Muon step is proportional to it for matrices with the same shorter side, as in one
transformer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.axes import Axes
from shardwise.config import Placement, Placements
from shardwise.errors import ConfigError
from shardwise.layout.segments import balance_costs
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.mesh import Axis, DataAxes, resolve_axes

ChooseLayout = Callable[[str, nn.Parameter], str]  # "matrices" or "flat", by name and parameter


def place_experts(
    specs: Sequence[UnitSpec],
    placements: Placements | None,
    experts: str | Sequence[str],
    mesh: object,
) -> Placements | None:
    """Place the modules named by ``experts`` on the expert mesh of `Axes`, before other placements.

    If ``ep`` is 1 an expert is an ordinary module. A pipeline stage may lack experts.

    **Raises** ConfigError for a name that matches nothing, and for experts that are not spread.
    """
    if not experts:
        return placements
    if not isinstance(mesh, Axes):
        raise ConfigError(
            f"experts={experts!r} needs mesh=shardwise.Axes(..., ep=n): the axes say which ranks "
            "share an expert"
        )
    if placements is not None and not isinstance(placements, Mapping):
        raise ConfigError("experts: placements is a function; let it return axes.experts for them")
    names = [experts] if isinstance(experts, str) else list(experts)
    params = [param for spec in specs for param in spec.params]
    if mesh.pp > 1:
        names = [name for name in names if any(_matches(name, param) for param in params)]
    for name in names:
        matching = _find_params("experts", name, params)
        plain = next((param for param in matching if not isinstance(param.param, DTensor)), None)
        if mesh.ep > 1 and plain is not None:
            raise ConfigError(
                f"experts: '{plain.name}' is no DTensor on axes['ep'], so each of the {mesh.ep} "
                "ranks of that axis would train a separate copy: spread it first, by "
                "spread_experts(model, axes), or a model of transformers by parallelize()"
            )
    if mesh.ep == 1:
        return placements
    return {**dict.fromkeys(names, mesh.experts), **(placements or {})}


def place_params(
    specs: Sequence[UnitSpec], placements: Placements | None, axes: DataAxes, layout: str
) -> tuple[UnitSpec, ...]:
    """Give every parameter its mesh and its dim; a unit on several meshes becomes several units.

    ``placements`` maps names of parameters or modules (all parameters inside), with ``*`` for any
    text, to a mesh (of one axis, or (replicate, shard)), a ``Shard`` or both. The first match
    counts. Or it is a function of a parameter's name and the parameter.

    **Raises** ConfigError with the parameter's name for a name that matches none, a mesh outside
    the model's, a dim that cannot be cut evenly, and DTensors that cannot be cut further.
    """
    placed = tuple(specs) if placements is None else _place_all(specs, placements, axes, layout)
    for spec in placed:
        for param in spec.params:
            if isinstance(param.param, DTensor):
                _check_dtensor(param.name, param.param, spec.axes or axes, axes)
    return placed


def _place_all(
    specs: Sequence[UnitSpec], placements: Placements, axes: DataAxes, layout: str
) -> tuple[UnitSpec, ...]:
    """Give every parameter its mesh and dim; return one unit per module and mesh."""
    choose = _chooser(placements, [p for spec in specs for p in spec.params])
    axes_by_mesh: dict[DeviceMesh, DataAxes] = {axes.mesh: axes}
    placed: list[UnitSpec] = []
    for spec in specs:
        # The root unit stays on the model's mesh, also without parameters.
        by_mesh: dict[DeviceMesh, list[ParamSpec]] = {axes.mesh: []} if not spec.name else {}
        for param in spec.params:
            mesh, dim = _mesh_and_dim(choose(param), param, axes)
            if mesh not in axes_by_mesh:
                axes_by_mesh[mesh] = _axes_of_other_mesh(axes, mesh, param)
            _check_dim(param, dim, axes_by_mesh[mesh].shard.size, layout)
            by_mesh.setdefault(mesh, []).append(replace(param, dim=dim))
        for mesh, params in by_mesh.items():
            unit_axes = None if mesh == axes.mesh else axes_by_mesh[mesh]
            placed.append(replace(spec, params=tuple(params), axes=unit_axes))
    return tuple(placed)


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
        return lambda param: _call_user_function(function, param)
    rules = placements
    for pattern in rules:
        if not isinstance(pattern, str):
            raise ConfigError(f"placements: {pattern!r} is no name of a parameter or a module")
        _find_params("placements", pattern, params)

    def first_match(param: ParamSpec) -> Placement | None:
        for pattern, placement in rules.items():
            if _matches(pattern, param):
                return placement
        return None

    return first_match


def _call_user_function(
    function: Callable[[str, nn.Parameter], Placement | None], param: ParamSpec
) -> Placement | None:
    """Call a user's function; turn its errors into ConfigErrors, which all ranks report."""
    try:
        return function(param.name, param.param)
    except Exception as error:
        raise ConfigError(
            f"placements: the function raised {type(error).__name__} for '{param.name}': {error}. "
            "It is called with a parameter's name and the parameter"
        ) from error


def _find_params(setting: str, pattern: str, params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return the parameters that match a pattern. **Raises** ConfigError if none matches."""
    matching = [param for param in params if _matches(pattern, param)]
    if not matching:
        raise ConfigError(
            f"{setting}: '{pattern}' is the name of no parameter and of no module that has some; "
            f"the model has '{params[0].name}' and others"
        )
    return matching


def _matches(pattern: str, param: ParamSpec) -> bool:
    return any(
        fnmatchcase(u.name, pattern) or fnmatchcase(u.name, f"{pattern}.*") for u in param.uses
    )


def _mesh_and_dim(placement: object, param: ParamSpec, axes: DataAxes) -> tuple[DeviceMesh, int]:
    """Return the mesh and the dim (0 or above) of a user's placement of a parameter."""
    entries = placement if isinstance(placement, tuple) else (placement,)
    mesh, dim = axes.mesh, 0
    kinds = [type(entry) for entry in entries]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"placements: '{param.name}' gets {placement!r}; name one of each kind")
    for entry in entries:
        if isinstance(entry, DeviceMesh):
            mesh = entry
        elif isinstance(entry, Shard):
            dim = entry.dim
        elif entry is not None:
            raise ConfigError(
                f"placements: '{param.name}' gets {entry!r}; expected a DeviceMesh, a Shard of "
                "torch.distributed.tensor, a tuple of both, or None"
            )
    ndim = param.param.ndim
    if not -ndim <= dim < max(ndim, 1):
        raise ConfigError(
            f"placements: '{param.name}' has {ndim} dims, and was to be cut along dim {dim}"
        )
    return mesh, dim + ndim if dim < 0 else dim


def _axes_of_other_mesh(axes: DataAxes, mesh: DeviceMesh, param: ParamSpec) -> DataAxes:
    """Return the axes of another mesh than the model's.

    An expert, a DTensor on other axes, may be sharded over ranks of other tensor-parallel
    groups too (tp > ep), because it gets tokens from all of them.
    """
    subject = f"placements: '{param.name}' gets {mesh}"
    outside = _ranks_of(mesh) - _ranks_of(axes.mesh)
    if outside and not isinstance(param.param, DTensor):
        raise ConfigError(f"{subject}: ranks {sorted(outside)} are not of the model's {axes.mesh}")
    try:
        mesh_axes = resolve_axes(mesh, mesh.device_type)
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from None
    return replace(mesh_axes, stages=axes.stages)


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor; return another tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _check_dim(param: ParamSpec, dim: int, num_shards: int, layout: str) -> None:
    """Refuse a dim that the ranks cannot share. **Raises** ConfigError."""
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
            f"elements on this rank, which {num_shards} ranks cannot share evenly; only dim 0 may "
            "be uneven"
        )


def _check_dtensor(name: str, param: DTensor, axes: DataAxes, model_axes: DataAxes) -> None:
    """Refuse a DTensor that data parallelism over ``axes`` cannot cut. **Raises** ConfigError."""
    spec, mesh = param._spec, axes.mesh
    subject = f"model: parameter '{name}' is a DTensor {spec.placements} on {spec.mesh}"
    if not all(isinstance(placement, Shard | Replicate) for placement in spec.placements):
        raise ConfigError(
            f"{subject}; shard() takes those that are Shard or Replicate on each axis. Packed "
            "weights of experts, which tensor parallelism cuts so, go over ep: call parallelize() "
            'and shard() with Axes(..., ep=n) and experts="*.experts"; leave others out of the plan'
        )
    common = _ranks_of(spec.mesh) & _ranks_of(mesh)
    if len(common) > 1 and "ep" in (spec.mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"{subject}, so it is one of the experts, which have a separate mesh: name them. With "
            "mesh=shardwise.Axes(..., ep=n), call "
            "shard(model, mesh=axes, units=Units(experts='*.experts'))"
        )
    if len(common) > 1:
        raise ConfigError(
            f"{subject}, and the data-parallel mesh has ranks {sorted(common)} of it too. Pass the "
            "axes that carry data parallelism alone, of the mesh that both are parts of: "
            'shard(model, mesh=world["dp"])'
        )
    try:
        joined = DeviceMesh._concatenate([mesh, spec.mesh])
    except RuntimeError as error:
        raise ConfigError(
            f"{subject}, and the data-parallel mesh is no part of the same mesh ({error}). Make "
            'one, say init_device_mesh(..., (2, 4), mesh_dim_names=("dp", "tp")), and take both '
            "from it"
        ) from error
    left_out = _ranks_of(model_axes.mesh) - _ranks_of(joined)
    if left_out:
        raise ConfigError(
            f"{subject}, and {mesh} does not have ranks {sorted(left_out)} of the model's mesh, "
            "whose gradients would be left out: place it on a mesh with all data-parallel axes"
        )


def assign_owners(
    specs: Iterable[UnitSpec], layout: str | ChooseLayout, axes: DataAxes
) -> tuple[UnitSpec, ...]:
    """Give an owner to each parameter that one rank has whole; leave the others unchanged.

    With ``layout="matrices"`` these are all trained parameters of two dims. Pieces of tensor or
    expert parallelism are not whole matrices and get no owner. Tensors that define their gather are
    cut by rows. A function chooses "matrices" or "flat" for each parameter.

    **Raises** ConfigError if the function raises or returns another value.
    """
    specs = tuple(specs)
    if layout != "matrices" and isinstance(layout, str):
        return specs
    by_group: dict[int, list[ParamSpec]] = {}
    sizes: dict[int, int] = {}
    for spec in specs:
        axis: Axis = (spec.axes or axes).shard
        sizes[id(axis.group)] = axis.size
        chosen = by_group.setdefault(id(axis.group), [])
        chosen += [p for p in spec.params if _is_matrix(p) and _wants_owner(p, layout)]
    owners: dict[int, int] = {}  # by the id of a parameter's specification
    for group, chosen in by_group.items():
        ranks = balance_costs([param.param.numel() for param in chosen], sizes[group])
        owners |= {id(param): rank for param, rank in zip(chosen, ranks, strict=True)}
    return tuple(
        replace(spec, params=tuple(replace(p, owner=owners.get(id(p))) for p in spec.params))
        for spec in specs
    )


def layout_name(layout: object) -> str:
    """Return the layout's name; "matrices" for a function of parameters."""
    return "matrices" if callable(layout) else layout  # type: ignore[return-value]


def _is_matrix(spec: ParamSpec) -> bool:
    param = spec.param
    is_plain = not isinstance(param, DTensor) and not hasattr(param.data, "fsdp_pre_all_gather")
    return param.ndim == 2 and param.requires_grad and is_plain


def _wants_owner(spec: ParamSpec, layout: str | ChooseLayout) -> bool:
    if isinstance(layout, str):
        return True
    try:
        kind = layout(spec.name, spec.param)
    except Exception as error:  # any error of a user's function; all ranks report it
        raise ConfigError(
            f"layout: the function raised {type(error).__name__} for '{spec.name}': {error}. "
            "It is called with a parameter's name and the parameter"
        ) from error
    if kind not in ("matrices", "flat"):
        raise ConfigError(
            f"layout: the function returned {kind!r} for '{spec.name}'; expected 'matrices' "
            "(whole on one rank) or 'flat'"
        )
    return kind == "matrices"
