"""An accounting whose zero1 saves nothing, as a run does whose optimizer got whole parameters.

`shardwise lab run 1 lab01_broken.py` puts it beside the measured bytes. Find the wrong line.
"""

from collections.abc import Iterable

from torch import Tensor


def bytes_per_rank(
    numel: int, dp: int, param: float = 4, grad: float = 4, adam: float = 8
) -> dict[str, float]:
    replicated = numel * (param + grad + adam)
    zero1 = numel * (param + grad + adam)
    zero2 = numel * (param + (grad + adam) / dp)
    zero3 = numel * (param + grad + adam) / dp
    return {"replicated": replicated, "zero1": zero1, "zero2": zero2, "zero3": zero3}


def held_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def zero3_peak(unit_numels: list[int], dp: int) -> float:
    return bytes_per_rank(sum(unit_numels), dp)["zero3"] + 12 * max(unit_numels)
