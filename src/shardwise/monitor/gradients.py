"""Which gradients are not finite, looked at where a step would use them."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwise.tensor.background_step import elements_of
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.unit import Unit


@torch.no_grad()
def bad_gradients(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the parameters of an optimizer whose gradient has, on this rank, inf or nan.

    **Cost** reads this rank's gradients once, and waits for each device once.
    """
    of_param = {id(p): p.name for u in units for p in u.params}
    found: dict[torch.device, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            local = elements_of(grad) if isinstance(grad, DTensor) else grad
            if local is not None and local.numel():
                name = of_param.get(id(owner_of(param)), "(no unit)")
                found[local.device].append((name, local))
    return [name for gradients in found.values() for name in _bad_of(gradients)]


def _bad_of(gradients: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of those that are not finite; all are of one device."""
    norms = torch._foreach_norm([local for _, local in gradients])
    are_finite = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
    return [  # of what overflows as a sum of squares alone, each element is looked at
        name
        for (name, local), is_finite in zip(gradients, are_finite, strict=True)
        if not is_finite and not bool(local.isfinite().all())
    ]
