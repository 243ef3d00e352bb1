"""Write the page on one step and its picture from what record_step.py has recorded."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from shardwise import svg
from shardwise.charts import Span, timeline_chart

RECORDED = Path(__file__).parent / "site" / "data" / "step.json"
DRAWN, MOST_BARS = "3", 120


@cache
def recorded() -> dict[str, Any]:
    """Return what was recorded of each stage."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found["stages"]  # type: ignore[no-any-return]


def step_picture() -> str:
    """Return the timeline of both ranks at one stage."""
    step = recorded()[DRAWN]
    groups = []
    for number, rank in enumerate(step["ranks"]):
        rows: dict[str, list[Span]] = {}
        for row, phase, unit, begin, length in rank["spans"]:
            rows.setdefault(row, []).append(Span(phase, begin, length, unit))
        groups.append((f"rank {number}", rows))
    title = f"A step of two ranks at stage {DRAWN}, ms"
    drawn = timeline_chart(title, groups, step["ms"], most=MOST_BARS)
    return drawn.replace("<desc>", f"<style>{svg.style()}</style>\n<desc>", 1)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


def step_page() -> str:
    """Return the page, with a table for readers without scripts."""
    rows = []
    for stage, step in recorded().items():
        memory = [(sum(kinds.values()), kinds) for _, kinds in step["ranks"][0]["memory"]]
        peak, kinds = max(memory, key=lambda moment: moment[0])
        large = [kind for kind in sorted(kinds, key=svg.order_of_kinds) if kinds[kind] >= 1 << 20]
        parts = ", ".join(f"{svg.name_of_kind(kind)} {mib(kinds[kind])}" for kind in large)
        rows.append(f"| {stage} | {mib(memory[0][0])} | {mib(peak)} | {parts} |")
    return PAGE.replace("ROWS", "\n".join(rows))


PAGE = """# One step, recorded

Two ranks on two CPU cores train a small model: an embedding, four blocks that are units, and a
head; 9.4 M parameters in fp32, AdamW. Choose a stage and move the slider through a step. Below the
timeline is the memory of rank 0 by kind.

<div class="picture" data-picture="step"></div>

Memory of rank 0 in MiB, as the forward pass begins and where it is largest:

| stage | at the beginning | largest | of which |
|---|---|---|---|
ROWS

![Timeline of two ranks at stage 3. Gathers run beside the forward and backward passes of blocks,
reductions beside backward.](step.svg)

- At stage 3 `all_gather` runs in forward and in backward: full parameters (`param_full`) of two
  units are there at a time. At stages 1 and 2 each unit is gathered once, in the first forward
  pass after the optimizer's step.
- `reduce_scatter` begins when backward has passed a unit. Its full gradients (`grad_full`) go, and
  slices (`grad_shards`) come.
- The engine starts and ends collectives. "Waiting for others" is the time in which a rank waits
  for one; on two cores computing and copying share the time. Words and colours are those of a
  run's own page.
- With one micro-batch per step, stages 1 and 2 do the same.
- Time 0 is where a rank's own step begins; the other rank may begin earlier or later.
- Only the engine's memory is shown. Activations are not, since a CPU has no allocator that counts
  them.

`shardwise.observe` recorded it ([watch a run](how-to/watch-a-run.md)): times of one step and memory
of the next one, spans below 0.05 ms left out. `python docs/record_step.py` records it again, and
`make pages` writes this page.
"""
