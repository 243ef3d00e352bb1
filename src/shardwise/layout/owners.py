"""Layout ``matrices``: which parameters lie whole on one rank, and on which.

An optimizer that reads whole matrices (Muon, Shampoo, SOAP) then steps each on the rank that owns
it, and nothing is sent. Owners are balanced over all matrices of the model: the largest first, each
to the rank that has least so far. What weighs is the number of elements: it is what a rank holds,
receives and steps, and for matrices that have their shorter side in common, as those of one
transformer do, the products of a Muon step are proportional to it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.layout.segments import balanced
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.mesh import Axis, DataAxes

ChooseLayout = Callable[[str, nn.Parameter], str]  # "matrices" or "flat", by name and parameter


def with_owners(
    specs: Iterable[UnitSpec], layout: str | ChooseLayout, axes: DataAxes
) -> tuple[UnitSpec, ...]:
    """Give an owner to each parameter that is to lie whole on one rank; change no other layout.

    With ``layout="matrices"`` that is every trained parameter of two dims. Pieces that tensor or
    expert parallelism gives a rank are no whole matrices, and stay spread; tensors with a gather of
    their own stay cut by rows. A function chooses "matrices" or "flat" for each.

    **Raises** ConfigError where a function returns anything else, or raises.
    """
    specs = tuple(specs)
    if layout != "matrices" and isinstance(layout, str):
        return specs
    by_axis: dict[int, list[ParamSpec]] = {}
    sizes: dict[int, int] = {}
    for spec in specs:
        axis: Axis = (spec.axes or axes).shard
        sizes[id(axis.group)] = axis.size
        chosen = by_axis.setdefault(id(axis.group), [])
        chosen += [p for p in spec.params if _is_matrix(p) and _wants_owner(p, layout)]
    owners = {
        id(param): owner
        for axis_id, chosen in by_axis.items()
        for param, owner in zip(
            chosen, balanced([p.param.numel() for p in chosen], sizes[axis_id]), strict=True
        )
    }
    return tuple(
        replace(spec, params=tuple(replace(p, owner=owners.get(id(p))) for p in spec.params))
        for spec in specs
    )


def layout_name(layout: object) -> str:
    """Return the layout of a model whose parameters a function chooses for."""
    return "matrices" if callable(layout) else layout  # type: ignore[return-value]


def _is_matrix(spec: ParamSpec) -> bool:
    param = spec.param
    is_plain = not isinstance(param, DTensor) and not hasattr(param.data, "fsdp_pre_all_gather")
    return param.ndim == 2 and param.requires_grad and is_plain


def _wants_owner(spec: ParamSpec, layout: str | ChooseLayout) -> bool:
    if isinstance(layout, str):
        return True
    try:
        found = layout(spec.name, spec.param)
    except Exception as error:  # of the user's, and one of the setting, which all ranks hear
        raise ConfigError(
            f"layout: the function raised {type(error).__name__} for '{spec.name}': {error}. "
            "It is called with a parameter's name and the parameter"
        ) from error
    if found not in ("matrices", "flat"):
        raise ConfigError(
            f"layout: the function returned {found!r} for '{spec.name}'; expected 'matrices' "
            "(whole on one rank) or 'flat'"
        )
    return found == "matrices"
