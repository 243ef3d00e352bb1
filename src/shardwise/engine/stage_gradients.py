"""What stages of a pipeline tell each other, so that gradients are checked as one model's.

And which models cannot be checked so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from shardwise.comm.control import Control, exchange_any
from shardwise.engine.api import find_engine
from shardwise.errors import ConfigError

Stages = TypeVar("Stages", bound=Sequence[torch.nn.Module])


def check_exact(stages: Stages) -> Stages:
    """Return stages whose weights and gradients travel as they are. **Raises** ConfigError."""
    engines = (find_engine(each) for each in stages)
    asked = [u.precision for engine in engines if engine is not None for u in engine.units]
    if any(each.reduce_coding for each in asked):
        raise ConfigError(
            "compose: its reductions are encoded (Precision(reduce=)), so its gradients are "
            "rounded more than one process's; ask for a dtype as reduce= for the check"
        )
    if any(each.gather for each in asked):
        raise ConfigError(
            "compose: its gathers are encoded (Precision(gather=)), so its gradients are those of "
            "other weights than one process has; leave gather= out for the check"
        )
    return stages


@torch.no_grad()
def share_weights(
    control: Control, mine: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> None:
    """Copy what the stages hold, in full, to the tensors of a plain model, by name.

    **Cost** every rank hears all stages: a check is for small models.

    **Raises** ConfigError, on all ranks, for names and shapes that are not the plain model's, and
    for parameters that no stage has.
    """
    shapes = {name: list(tensor.shape) for name, tensor in mine.items()}
    rows = exchange_any(control, json.dumps(shapes).encode())
    having: dict[str, int] = {}
    for rank, row in enumerate(rows):
        for name, shape in json.loads(row).items():
            having.setdefault(name, rank)
            check_shape(name, shape, plain.get(name))
    held = {id(plain[name]) for name in having}
    for name, place in plain.items():
        if id(place) not in held and isinstance(place, torch.nn.Parameter):
            raise ConfigError(
                f"compose: no stage has '{name}' of the plain model; a stage has its layers under "
                "the names of the whole model"
            )
    for name in sorted(having):
        place, source = plain[name], having[name]
        if source == control.rank:
            place.copy_(mine[name])
        data = place.detach().cpu().contiguous().reshape(-1)
        said = control.broadcast(data.view(torch.uint8).numpy().tobytes(), source)
        if said and source != control.rank:
            place.copy_(torch.frombuffer(bytearray(said), dtype=place.dtype).view(place.shape))


def check_shape(name: str, shape: Sequence[int], place: torch.Tensor | None) -> None:
    """Refuse a tensor of the composed model that the plain one has not. **Raises** ConfigError."""
    if place is None or tuple(place.shape) != tuple(shape):
        found = "has no such tensor" if place is None else f"has {tuple(place.shape)}"
        raise ConfigError(
            f"make_model: '{name}' {tuple(shape)} of the composed model; the plain one "
            f"{found}. compose= must keep names and shapes"
        )


def of_all_stages(
    control: Control, checks: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Return what all ranks say of their parameters, each once, in the plain model's order."""
    found: dict[str, dict[str, Any]] = {}
    for row in exchange_any(control, json.dumps(list(checks)).encode()):
        for check in json.loads(row):
            found.setdefault(check["name"], check)
    places = {name: place for place, name in enumerate(order)}
    return sorted(found.values(), key=lambda check: places[check["name"]])
