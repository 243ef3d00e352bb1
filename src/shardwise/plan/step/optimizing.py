"""What an optimizer's step takes: bytes that it moves, kernels, temporary memory.

Note [What an optimizer's step takes]
Bytes: each of parameter, state and gradient is read once, and all but the gradient written once,
by a fused kernel: 28 per parameter for AdamW in float32. Without fusion torch runs eight kernels
per tensor, 80 bytes. Temporaries, as torch.optim allocates them: fused none; foreach the square
roots of all second moments at once; loop two tensors of the size of the largest.
"""

from collections.abc import Sequence

from shardwise.plan.candidate import Candidate
from shardwise.plan.sizes import DTYPE_BYTES, PRECISIONS
from shardwise.plan.step.footprint import Footprint

_UNFUSED_BYTES = 80  # of float32 AdamW per parameter; see the Note
_UNFUSED_KERNELS = 8


def num_kernels(candidate: Candidate, weights: Sequence[Footprint]) -> int:
    """Return how many kernels step these units."""
    kernel = candidate.optimizer_kernel
    num_tensors = sum(w.num_updated for w in weights) if kernel == "loop" else 1
    return num_tensors * (1 if kernel == "fused" else _UNFUSED_KERNELS)


def step_bytes(candidate: Candidate, weight: Footprint) -> int:
    """Return the bytes that the step of a unit reads and writes."""
    row = PRECISIONS[candidate.precision]
    master, numel = DTYPE_BYTES[row.master], weight.local_numel
    if _is_adam(candidate) and candidate.optimizer_kernel != "fused":
        return numel * _UNFUSED_BYTES * master // 4
    return 2 * (numel * master + weight.state_bytes) + numel * DTYPE_BYTES[row.reduce]


def temporary_bytes(candidate: Candidate, weights: Sequence[Footprint]) -> int:
    """Return what the step of these units allocates meanwhile."""
    kernel, row = candidate.optimizer_kernel, PRECISIONS[candidate.precision]
    numel = sum(w.local_numel for w in weights)
    copied = numel * DTYPE_BYTES[row.optimizer_grad] if row.optimizer_grad else 0
    if kernel == "fused" or not _is_adam(candidate):
        return copied
    if kernel == "loop":
        return copied + 2 * max((w.largest_local for w in weights), default=0)
    return copied + numel * DTYPE_BYTES[row.master]


def _is_adam(candidate: Candidate) -> bool:
    return candidate.optimizer in ("adam", "adamw")
