"""Which gradients are not finite, looked at where a step would use them."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwise.unit.plain_state import owner_of
from shardwise.unit.stepping import elements_of
from shardwise.unit.unit import Unit


@torch.no_grad()
def bad_gradients(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the parameters of an optimizer whose gradient has, on this rank, inf or nan.

    **Cost** reads this rank's gradients once, and waits for the device.
    """
    of_param = {id(p): p.name for u in units for p in u.params}
    found: list[tuple[str, torch.Tensor]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            local = elements_of(grad) if isinstance(grad, DTensor) else grad
            if local is not None and local.numel():
                found.append((of_param.get(id(owner_of(param)), "(no unit)"), local))
    if not found:
        return []
    norms = torch._foreach_norm([local for _, local in found])
    told = torch.stack([norm.to("cpu", torch.float32) for norm in norms]).isfinite().tolist()
    return [  # of what overflows as a sum of squares alone, each element is looked at
        name
        for (name, local), is_finite in zip(found, told, strict=True)
        if not is_finite and not bool(local.isfinite().all())
    ]
