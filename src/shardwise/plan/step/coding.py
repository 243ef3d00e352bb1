"""What encoding and decoding the gathers of one storage takes: bytes moved, and memory meanwhile.

Counted from the passes of `comm.codes` over float32: a block's magnitudes, their largest, quotients
and roundings; codes to numbers, times scales. It runs on a few elements at a time.
"""

from typing import NamedTuple

from shardwise.layout.memory import Memory
from shardwise.layout.wire import AT_A_TIME, ON_CPU_AT_A_TIME
from shardwise.precisions import GATHER_BITS

_FLOAT = 4


class CodingWork(NamedTuple):
    """``before`` and ``after`` are bytes moved on the device to encode and to decode.

    ``staging`` are the bytes that all ranks' shares arrive in; ``working`` is the most memory that
    either takes beside them.
    """

    before: int
    after: int
    staging: int
    working: int


def coding_work(memory: Memory, on_cpu: bool, is_away: bool) -> CodingWork:
    """Describe the coding of one storage, whose slices are encoded where they rest."""
    wire = memory.wire
    if wire is None:
        return CodingWork(0, 0, 0, 0)
    most = ON_CPU_AT_A_TIME if on_cpu else AT_A_TIME
    bits = GATHER_BITS[wire.coding.format]
    own = max(memory.own_numel, 1)
    numel = memory.layout.full_numel
    casts = memory.master_size != _FLOAT
    roundings = 0 if wire.coding.format == "fp8" else 2 * _FLOAT
    # read to magnitudes, to their largest, to quotients, rounded, and to codes
    passes = (memory.master_size + _FLOAT) * casts + 2 * _FLOAT + _FLOAT + 2 * _FLOAT + roundings
    encoded = own * (passes + _FLOAT) + own * bits // 8
    size = memory.full_size
    apart = _FLOAT + size if on_cpu and size != _FLOAT else 0  # cast once, in the end
    decoded = numel * (3 * (_FLOAT if apart else size) + apart) + numel * bits // 8
    largest = (min(n, most) * _FLOAT for n in wire.largest_runs(0))
    encoding, decoding = next(largest) * (1 + casts), next(largest)
    halves = decoding // 2 if on_cpu and wire.coding.format == "fp8" else 0
    return CodingWork(
        0 if is_away else encoded,
        decoded,
        wire.num_bytes,
        max(decoding * bool(apart) + halves, 0 if is_away else encoding),
    )
