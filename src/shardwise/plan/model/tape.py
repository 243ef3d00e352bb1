"""Tapes: one micro-batch of a model in program order, independent of its sharding.

A tape has two kinds of events. A `Visit` is a moment at which the engine is called: a unit's
forward or backward begins or ends. A `UnitWork` is the model's work between two visits: its
operations by class, and the change of the bytes that it keeps alive. A tape is made by tracing a
module, or from the formulas of a decoder. Playing a tape under a `Candidate` makes the step.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal

from shardwise.plan.sizes import DtypeName

Phase = Literal["forward", "loss", "recompute", "backward"]
VisitKind = Literal["before_forward", "after_forward", "before_backward", "after_backward"]
CostKind = Literal[
    "matmul",
    "attention",
    "memory",
    "tensor_parallel",
    "context_gather",
    "context_exchange",
    "context_ring",
    "expert_parallel",
]
# Collectives inside the model: their degree, and their name in `shardwise.debug.counting`.
# ``tp.sent`` has all collectives of tensor parallelism in the layers.
DEGREE_KINDS: dict[CostKind, tuple[str, str]] = {
    "tensor_parallel": ("tensor", "tp.sent"),
    "context_gather": ("context", "cp.all_gather"),
    "context_exchange": ("context", "cp.all_to_all"),
    "context_ring": ("context", "cp.ring"),
    "expert_parallel": ("expert", "ep.all_to_all"),
}


@dataclass(frozen=True)
class TapeParam:
    """One parameter as the model has it: full shape, and its dtype before any precision.

    ``gets_grad`` is False if it is trained but no backward pass writes its gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName
    requires_grad: bool = True
    gets_grad: bool = True


@dataclass(frozen=True)
class TapeUnit:
    """One unit: the parameters that it owns, in the order in which the layout places them.

    ``backward_reads_params`` is False for an embedding, whose backward needs the ids alone.
    ``experts_over`` is set for experts that are spread over ranks: a rank's experts are sharded
    over this many times the candidate's shards. ``comes_last``: in the order of the model's
    parameters its trained ones follow those of all other units.
    """

    name: str
    params: tuple[TapeParam, ...]
    backward_reads_params: bool = True
    experts_over: Fraction | None = None
    comes_last: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(prod(p.shape) for p in self.params)


@dataclass(frozen=True)
class Cost:
    """Operations of one class, summed: ``moved_bytes`` are read plus written by the device.

    ``matmul`` and ``attention`` are bound by ``flops``, ``memory`` (all elementwise operations,
    norms, softmax, copies, lookups) by ``moved_bytes``; for the parallel kinds ``moved_bytes`` is
    what a rank sends. ``num_ops`` counts kernels, each of which costs a launch.
    """

    kind: CostKind
    dtype: DtypeName
    flops: int
    moved_bytes: int
    num_ops: int


@dataclass(frozen=True)
class Lines:
    """Bytes line by line: each field is one."""

    @property
    def total(self) -> int:
        """Sum of all lines."""
        return sum(vars(self).values())

    def lines(self) -> dict[str, int]:
        """Return the lines by name, in the order of the fields."""
        return dict(vars(self))


@dataclass(frozen=True)
class LiveBytes(Lines):
    """Bytes alive that the model's own operations allocated, by kind.

    ``activations`` outlive the work that made them, ``temporary`` do not; ``logits`` are those of
    the head's output and the loss, of either kind; ``grad_full`` are full gradients of parameters
    that autograd writes, until the engine takes them.
    """

    activations: int = 0
    temporary: int = 0
    logits: int = 0
    grad_full: int = 0


@dataclass(frozen=True)
class UnitWork:
    """Operations of the model between two visits, inside the forward or backward of ``unit``.

    ``net`` are the bytes alive at its end less those at its begin (negative if backward frees;
    ``net.temporary`` is 0). ``peak`` is the same for the moment with the largest total; all zeros
    if that is the begin. ``summed_peak`` and ``summed_net`` are these two if each gradient is added
    to an existing sum and freed as soon as it is written; None if that is not known.
    """

    unit: int
    phase: Phase
    costs: tuple[Cost, ...]
    peak: LiveBytes
    net: LiveBytes
    summed_peak: LiveBytes | None = None
    summed_net: LiveBytes | None = None


@dataclass(frozen=True)
class Visit:
    """A call of the engine for a unit; ``recomputes``: a forward inside backward (checkpointing).

    ``input_bytes`` are those of computed inputs that a checkpoint saves for the block that begins
    with this visit; 0 for any other visit.
    """

    kind: VisitKind
    unit: int
    recomputes: bool = False
    input_bytes: int = 0


@dataclass(frozen=True)
class Tape:
    """One micro-batch of a model: forward, loss, backward.

    ``units`` has the root first and then module order, as the engine numbers them. ``input_bytes``
    are alive from begin to end, ``buffer_bytes`` (module buffers) for the whole run;
    ``first_bytes`` are activations that are alive only in the first micro-batch of a step,
    ``end_bytes`` those that are alive when a pipeline's stage is reduced after its last one.
    ``in_flight`` micro-batches of a pipeline are between their forward and their backward.
    """

    units: tuple[TapeUnit, ...]
    events: tuple[UnitWork | Visit, ...]
    compute_dtype: DtypeName
    input_bytes: int = 0
    buffer_bytes: int = 0
    first_bytes: int = 0
    end_bytes: int = 0
    in_flight: float = 1

    @property
    def matmul_dtype(self) -> DtypeName:
        """Dtype of most FLOPs of matrix products; the computing dtype if there are no products.

        A model may hold parameters of another dtype than its precision computes in.
        """
        flops: dict[DtypeName, int] = {}
        for event in self.events:
            for cost in event.costs if isinstance(event, UnitWork) else ():
                if cost.kind == "matmul":
                    flops[cost.dtype] = flops.get(cost.dtype, 0) + cost.flops
        return max(flops, key=lambda d: flops[d]) if any(flops.values()) else self.compute_dtype
