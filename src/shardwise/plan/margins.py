"""What a device holds beside the ledger's tensors, as ranges: context, communicators, allocator.

Note [Three totals]
Tools print three different numbers. *Allocated* is what tensors need: the ledger. *Reserved* is
what the caching allocator took from the driver for them, blocks that no tensor fits included. The
*device's* use (nvidia-smi) adds the driver's context with its loaded kernels and the buffers of
each communicator. What must fit the card is the last one, so a verdict needs all three.

Note [Gradients' blocks]
Reduced gradients are freed after the step. Their blocks are too small for the logits of the next
one, and the allocator gives blocks back to the driver only when it gets no more: so they count in
what a run reserves, and not in the least that it needs (R001, R002: 3.7 GiB of 82.4 and 77.0).

Note [Sources of the ranges]
Context: 0.5 to 2 GiB per process (github:stas00/ml-engineering, debug and performance chapters).
Communicator: NCCL_BUFFSIZE is 4 MiB (NCCL user guide, environment variables), one buffer per
channel and direction; 2 to 32 channels make 16 to 256 MiB. Fragmentation: benchmarks/published.py
compares predicted allocated with published reserved bytes: torchtitan 7 % (R001, R002, R006),
DeepSpeed 12 % (R585, R586), and with expandable segments 0 to 2 % (R043, R046). A run that needed
59 GB failed at 58.8 GB of 80 without them (github:NVIDIA-NeMo/Megatron-Bridge), so the upper end
is no bound.
"""

from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plan.step.ledger import Ledger

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Range:
    """A quantity that is known from below and above, and what is to be expected."""

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
    """Bytes of one rank's device, from below and above; the parts are those of the expectation."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int
    context_bytes: int
    communicator_bytes: int
    fragmentation_bytes: int
    cached_bytes: int = 0

    @property
    def margins(self) -> dict[str, int]:
        """Return the parts beside the ledger that are not nothing, by name."""
        parts = {
            "context of the device": self.context_bytes,
            "communicators": self.communicator_bytes,
            "fragmentation": self.fragmentation_bytes,
            "gradients' blocks, cached": self.cached_bytes,
        }
        return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}


def memory_interval(
    ledger: Ledger, num_groups: int = 1, on_accelerator: bool = True, cached_bytes: int = 0
) -> MemoryInterval:
    """Widen a ledger's total to what the device will hold.

    ``num_groups`` counts the process groups with device communicators that the rank is in.
    ``cached_bytes``: gradients that are gone at the peak, whose blocks the allocator still holds.
    On the CPU there is no context, and malloc keeps neither communicator buffers nor blocks.

    **Raises** ConfigError for a negative number of groups.

    **Source** See Note [Sources of the ranges].
    """
    if num_groups < 0:
        raise ConfigError(f"num_groups must not be negative, got {num_groups}")
    if not on_accelerator:
        return MemoryInterval(ledger.total, ledger.total, ledger.total, 0, 0, 0)

    def total(context: float, communicator: float, kept: float, cached: int) -> int:
        tensors = (ledger.total + cached) * (1 + kept)
        return round(tensors + context + num_groups * communicator)

    context, communicator, fraction = CONTEXT_BYTES, COMMUNICATOR_BYTES, FRAGMENTATION
    return MemoryInterval(
        low_bytes=total(context.low, communicator.low, fraction.low, 0),
        expected_bytes=total(
            context.expected, communicator.expected, fraction.expected, cached_bytes
        ),
        high_bytes=total(context.high, communicator.high, fraction.high, cached_bytes),
        context_bytes=round(context.expected),
        communicator_bytes=round(num_groups * communicator.expected),
        fragmentation_bytes=round((ledger.total + cached_bytes) * fraction.expected),
        cached_bytes=cached_bytes,
    )
