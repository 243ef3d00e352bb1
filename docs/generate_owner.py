"""Write the page on who owns an element from what record_owner.py has recorded."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "site" / "data" / "owner.json"
ELEMENT = 13


def weight_cell(ranks: list[dict[str, Any]]) -> str:
    """Return the values of the element, each with the ranks that have it and how."""
    held = []
    for number, rank in enumerate(ranks):
        value = rank["values"][ELEMENT]
        if value is not None:
            is_own = rank["owns"][0] <= ELEMENT < rank["owns"][1]
            stale = " stale" * (not is_own and rank["full"] == "stale")
            held.append((f"{value:.3f}{stale}", number))
    return grouped(held)


def gradient_cell(ranks: list[dict[str, Any]]) -> str:
    """Return the gradients of the element, each with its ranks."""
    held = []
    for number, rank in enumerate(ranks):
        begin, end = (0, len(rank["values"])) if rank["grad"] == "own" else rank["owns"]
        if rank["grads"] and begin <= ELEMENT < end:
            held.append((f"{rank['grads'][ELEMENT - begin]:.3f}", number))
    if ranks[0]["grad"] == "own":
        return f"own: {', '.join(value for value, _ in held)}"
    return f"mean {grouped(held)}" if held else "-"


def grouped(held: list[tuple[str, int]]) -> str:
    parts = []
    for text, rows in groupby(sorted(held), key=lambda row: row[0]):
        ranks = [str(number) for _, number in rows]
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
        parts.append(f"{text}: {'all' if len(ranks) == 4 else where}")
    return "; ".join(parts) or "-"


def owner_page() -> str:
    """Return the page, with tables for readers without scripts."""
    stages = json.loads(RECORDED.read_text(encoding="utf-8"))["stages"]
    page = PAGE
    for name, cell in (("WEIGHTS", weight_cell), ("GRADIENTS", gradient_cell)):
        rows = [
            f"| {of_stages[0]['moment']} | "
            + " | ".join(cell(moment["ranks"]) for moment in of_stages)
            + " |"
            for of_stages in zip(*stages.values(), strict=True)
        ]
        page = page.replace(name, "\n".join(rows))
    return page


PAGE = """# Who owns an element

Four ranks train a model of three layers. This is the weight of the middle one, [8, 3], through a
step of two micro-batches. Choose a stage, a moment and an element: the blue rank updates it, and
the others have a copy, an old copy, or nothing.

<div class="picture" data-picture="owner"></div>

Values of element 13 (row 4, column 1), which rank 2 updates at stages 1 to 3, and the ranks that
have them:

| moment | stage 0 | stage 1 | stage 2 | stage 3 |
|---|---|---|---|---|
WEIGHTS

Its gradients; of its own batch they are those of ranks 0 to 3:

| moment | stage 0 | stage 1 | stage 2 | stage 3 |
|---|---|---|---|---|
GRADIENTS

- At stage 0 every rank updates every element, with the same mean, to the same bits.
- At stages 1 to 3 the owner alone updates it. Copies on other ranks are stale from then on. No
  message says so: the next forward pass compares version numbers, and gathers.
- At stage 3 the copies are freed after forward and after backward. There is nothing to be stale.
- Stages 0 and 1 keep the rank's own sum of gradients until the last micro-batch, stages 2 and 3 the
  owner's mean of each.

[The life of a parameter](life-of-a-parameter.md) has the functions behind each moment, and
[lab 6](../labs/shardwise_labs/lab06/page.md) lets you record them. `python docs/record_owner.py`
reads the engine's memory on each rank, and `make pages` writes this page.
"""
