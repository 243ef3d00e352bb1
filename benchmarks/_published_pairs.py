"""Pairs of published runs that differ in one knob: each tests one term of the memory model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _published_memory import GIB, measure
from _published_overhead import Measured, Overheads
from _published_rows import Row, Unmodelled

PAIRS: tuple[tuple[str, str, str], ...] = (
    ("R001", "R004", "8 -> 128 ranks: 16 bytes per parameter, sharded"),
    ("R002", "R006", "8 -> 128 ranks, and fp8: 16 bytes per parameter, sharded"),
    ("R001", "R002", "eager -> compiled: what eager layers keep"),
    ("R434", "R435", "micro-batch 1 -> 2: checkpoints in flight"),
    ("R435", "R436", "micro-batch 2 -> 4: checkpoints in flight"),
    ("R436", "R437", "micro-batch 4 -> 8: checkpoints in flight"),
    ("R438", "R439", "micro-batch 1 -> 2, half the stages"),
    ("R482", "R484", "fp16 -> bf16 with float32 gradients"),
    ("R435", "R448", "ZeRO-1 -> ZeRO-0 (different branches, says the source)"),
    ("R585", "R586", "float32 -> bf16 master and moments: 16 -> 10 bytes"),
    ("R288", "R289", "eager -> compiled"),
    ("R289", "R290", "eager -> chunked cross-entropy"),
    ("R288", "R291", "compiled, chunked cross-entropy, checkpointing"),
    ("R291", "R292", "optimizer step in backward: no gradients"),
    ("R292", "R293", "activation offloading"),
    ("R293", "R294", "8-bit AdamW: moments 4 -> 2 bytes"),
    ("R051", "R052", "8-bit AdamW: moments 4 -> 2 bytes"),
    ("R052", "R054", "8-bit -> 4-bit AdamW: moments 2 -> 1 bytes"),
    ("R303", "R304", "batch 1 -> 2: one sample's activations"),
    ("R610", "R611", "2,048 -> 4,096 tokens"),
    ("R329", "R326", "one rank -> DDP: gradient buckets"),
)


def pair_lines(rows: Sequence[Row], overheads: Overheads) -> Iterator[str]:
    """Yield one line per pair of which both rows are there and can be modelled."""
    for first, second, knob in PAIRS:
        pair = pair_gib(rows, first, second, overheads)
        if pair is not None:
            published, predicted = pair
            yield (
                f"{first} -> {second}: published {published:+7.2f} GiB, predicted "
                f"{predicted:+7.2f} GiB  ({knob})"
            )


def pair_gib(
    rows: Sequence[Row], first: str, second: str, overheads: Overheads
) -> tuple[float, float] | None:
    """Return the published and the predicted difference in GiB, None where there is none."""
    by_id = {row.id: row for row in rows}
    if first not in by_id or second not in by_id:
        return None
    try:
        pair = [each for name in (first, second) for each in measure(by_id[name])]
    except Unmodelled:
        return None
    if len(pair) < 2:
        return None
    published, predicted = ([f(m) / GIB for m in pair] for f in (_told, overheads.total))
    return published[1] - published[0], predicted[1] - predicted[0]


def _told(row: Measured) -> float:
    return row.published
