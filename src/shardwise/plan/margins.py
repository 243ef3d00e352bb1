"""Memory beside a ledger's tensors, as ranges, and room on the nodes for offloaded state.

Note [Three totals]
Tools print three different numbers. *Allocated* are the bytes of tensors: the ledger. *Reserved*
are the bytes that the caching allocator took from the driver for them, including blocks that no
tensor fits. The *device's* use (nvidia-smi) adds the driver's context with its loaded kernels and
the buffers of each communicator. The last one must fit the card, so a verdict needs all three.

Note [Gradients' blocks]
Reduced gradients are freed after the step. Their blocks are too small for the logits of the next
one, and the allocator gives blocks back to the driver only when it gets no more: so they count as
reserved, and not in the lower bound (R001, R002: 3.7 GiB of 82.4 and 77.0).

Note [Sources of the ranges]
Context: 0.5 to 2 GiB per process (github:stas00/ml-engineering, debug and performance chapters).
Communicator: NCCL_BUFFSIZE is 4 MiB (NCCL user guide, environment variables), one buffer per
channel and direction; 2 to 32 channels make 16 to 256 MiB. Fragmentation: benchmarks/published.py
compares predicted allocated with published reserved bytes: torchtitan 7 % (R001, R002, R006),
DeepSpeed 12 % (R585, R586), and with expandable segments 0 to 2 % (R043, R046). A run that needed
59 GB failed at 58.8 GB of 80 without them (github:NVIDIA-NeMo/Megatron-Bridge), so the upper end
is no bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.step.program import Ledger
from shardwise.quantities import format_bytes

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Range:
    """A quantity with its lower bound, its expected value and its upper bound."""

    low: float
    expected: float
    high: float


CONTEXT_BYTES = Range(0.5 * _GIB, 0.75 * _GIB, 2.0 * _GIB)
COMMUNICATOR_BYTES = Range(16 * _MIB, 128 * _MIB, 256 * _MIB)
FRAGMENTATION = Range(0.02, 0.07, 0.12)

# Published over planned, 5th percentile, median and 95th, of runs that nothing was fitted to.
# Source: benchmarks/published.py, its last table (49 runs with memory, 126 with time).
UNSEEN_MEMORY = Range(0.69, 1.06, 1.67)
UNSEEN_TIME = Range(0.68, 1.12, 1.65)


@dataclass(frozen=True)
class MemoryInterval:
    """Bytes of one rank's device, from below and above.

    ``margins`` are the parts of the expectation beside the ledger, by name, if they are not 0.
    """

    low_bytes: int
    expected_bytes: int
    high_bytes: int
    margins: dict[str, int]


def memory_interval(
    ledger: Ledger, num_groups: int = 1, on_accelerator: bool = True, cached_bytes: int = 0
) -> MemoryInterval:
    """Return the range of the bytes that the device holds, from a ledger's total.

    ``num_groups`` counts the process groups with device communicators that the rank is in.
    ``cached_bytes``: gradients that are freed before the peak, whose blocks the allocator holds.
    On the CPU there is no context, and malloc keeps neither communicator buffers nor blocks.

    **Source** See Note [Sources of the ranges].
    """
    if not on_accelerator:
        return MemoryInterval(ledger.total, ledger.total, ledger.total, {})

    def total(context: float, communicator: float, kept: float, cached: int) -> int:
        tensors = (ledger.total + cached) * (1 + kept)
        return round(tensors + context + num_groups * communicator)

    context, communicator, fraction = CONTEXT_BYTES, COMMUNICATOR_BYTES, FRAGMENTATION
    margins = {
        "context of the device": round(context.expected),
        "communicators": round(num_groups * communicator.expected),
        "fragmentation": round((ledger.total + cached_bytes) * fraction.expected),
        "gradients' blocks, cached": cached_bytes,
    }
    expected = total(context.expected, communicator.expected, fraction.expected, cached_bytes)
    return MemoryInterval(
        total(context.low, communicator.low, fraction.low, 0),
        expected,
        total(context.high, communicator.high, fraction.high, cached_bytes),
        {name: num_bytes for name, num_bytes in margins.items() if num_bytes},
    )


@dataclass(frozen=True)
class NodeRoom:
    """Bytes that the ranks of one node hold together on its host and in its files, and its room.

    It is the node with the most. Without a known capacity, ``file_capacity_bytes`` is None.
    """

    num_ranks: int
    host_bytes: int
    host_capacity_bytes: int
    file_bytes: int
    file_capacity_bytes: int | None

    @property
    def missing(self) -> str | None:
        """Describe the part that does not fit; None if everything fits."""
        tiers = (
            ("host memory", self.host_bytes, self.host_capacity_bytes),
            ("space for files", self.file_bytes, self.file_capacity_bytes),
        )
        for name, num_bytes, capacity in tiers:
            if capacity is not None and num_bytes > capacity:
                return (
                    f"the {self.num_ranks} ranks of a node need {format_bytes(num_bytes)} of "
                    f"{name}, and it has {format_bytes(capacity)}"
                )
        return None


def node_room(
    cluster: Cluster, candidate: Candidate, by_stage: Mapping[int, tuple[int, int]]
) -> NodeRoom:
    """Return the room on the node with the most offloaded bytes.

    ``by_stage`` are the bytes of one rank of each pipeline stage, on the host and in files. A stage
    that is missing counts as the largest one. Neighbouring ranks are of the same stage (`axes`).
    """
    node = cluster.node
    num_ranks = min(node.num_accelerators, candidate.world_size)
    of_stage = candidate.world_size // candidate.pp
    together = max(1, num_ranks // of_stage)  # stages that a node has ranks of
    most = []
    for kind in (0, 1):
        largest = max(num_bytes[kind] for num_bytes in by_stage.values())
        stages = [by_stage[i][kind] if i in by_stage else largest for i in range(candidate.pp)]
        nodes = (stages[first : first + together] for first in range(0, candidate.pp, together))
        most.append(max(map(sum, nodes)) * (num_ranks // together))
    host = node.host
    return NodeRoom(
        num_ranks,
        host_bytes=most[0],
        host_capacity_bytes=host.memory_bytes,
        file_bytes=most[1],
        file_capacity_bytes=host.nvme_bytes,
    )
