"""Lab 1: where memory goes. Parameters, gradients and Adam's moments, rank by rank.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 1` measures a running
model, `shardwise lab check 1 lab01_memory.py` compares your functions with it.
"""

from collections.abc import Iterable

from torch import Tensor

# Step 1, before you run anything. A model of 7e9 parameters on 8 ranks, in mixed precision:
# 2 bytes of a parameter, 2 of its gradient, 12 of Adam (an fp32 master and two moments).
# GB (1e9 bytes) on one rank; arithmetic such as 7 * 2 may stand here.
PREDICT = {
    "7B replicated": 112,  # predicted
    "7B zero1": 38.5,  # predicted
    "7B zero2": 26.25,  # predicted
    "7B zero3": 14,  # predicted
    "70B zero3 on 64 ranks": 17.5,  # predicted
    # A small model at zero3 on 2 ranks: the most bytes held in a step, divided by the formula.
    # A guess: any number is right, the run shows the true one.
    "peak over formula": 1.3,  # predicted
}

# GAP 1. MIXED = {"param": ..., "grad": ..., "adam": ...}: bytes of a parameter in mixed precision.
MIXED = {"param": 2, "grad": 2, "adam": 4 + 4 + 4}
# END


def bytes_per_rank(
    numel: int, dp: int, param: float = 4, grad: float = 4, adam: float = 8
) -> dict[str, float]:
    """Return the bytes on each of `dp` ranks by stage; `param`, `grad`, `adam` are per element."""
    # GAP 2. The heart, four lines: zero1 divides Adam's state by dp, zero2 the gradients too,
    # zero3 all three. Return {"replicated": ..., "zero1": ..., "zero2": ..., "zero3": ...}.
    replicated = numel * (param + grad + adam)
    zero1 = numel * (param + grad + adam / dp)
    zero2 = numel * (param + (grad + adam) / dp)
    zero3 = numel * (param + grad + adam) / dp
    return {"replicated": replicated, "zero1": zero1, "zero2": zero2, "zero3": zero3}
    # END


def lowest_stage(numel: int, dp: int, device_bytes: float) -> str | None:
    """Return the first stage of `bytes_per_rank` (fp32) that fits, or None."""
    # GAP 3. A higher stage sends more, so take the lowest that fits.
    for stage, held in bytes_per_rank(numel, dp).items():
        if held <= device_bytes:
            return stage
    return None
    # END


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory behind tensors."""
    # GAP 4. Views share memory, and so do tied weights: count each storage once, in bytes.
    # `tensor.untyped_storage()` has `data_ptr()` and `nbytes()`.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
    # END


def zero3_peak(unit_numels: list[int], dp: int) -> float:
    """Return the most bytes that zero3 holds in fp32; activations are left out."""
    # GAP 5. What the formula leaves out. A unit is some layers that are full while they compute.
    # At the worst moment the largest one has its full parameters, its full gradients, and a copy
    # of them in one tensor that is being sent, beside everybody's slices.
    slices = bytes_per_rank(sum(unit_numels), dp)["zero3"]
    return slices + 12 * max(unit_numels)
    # END


# After the run. Which line of lab01_broken.py is wrong, and which finding would name a run like
# that: "SW001" not sharded, "SW006" padding, "SW030" activations do not fit, "SW042" updates that
# round away? (`shardwise explain SW001` and so on.)
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 7B in fp32 with Adam on 8 ranks with 80 GB each, 10 GB of them for activations. Which stage?
DECIDE = {
    "stage": None,  # "replicated", "zero1", "zero2" or "zero3"
}

# True or False?
CLAIMS = {
    "ZeRO-3 divides a rank's peak memory exactly by the number of ranks": None,
    "FSDP is there to make steps faster": None,
    "In mixed precision a parameter costs as many bytes as in fp32": None,
}
