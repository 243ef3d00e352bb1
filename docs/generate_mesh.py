"""Write the page on the mesh of axes from what record_mesh.py has recorded."""

import json
from pathlib import Path

RECORDED = Path(__file__).parent / "site" / "data" / "mesh.json"
SHOWN, EXPERTS = "2/1/2/2", 4


def ranks_of(groups: str) -> str:
    """Write the ranks of each group."""
    ranks = {digit: [] for digit in groups}  # type: dict[str, list[str]]
    for rank, digit in enumerate(groups):
        ranks[digit].append(str(rank))
    return "; ".join(", ".join(each) for each in ranks.values())


def mesh_page() -> str:
    """Return the page, with a table for readers without scripts."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    groups = data["dense"][SHOWN] | data["experts"][f"{SHOWN}/{EXPERTS}"]
    rows = [
        f"| `{name}` | {ranks_of(groups[name])} | {divides} | {sends} |"
        for name, (divides, sends) in data["axes"].items()
        if len(set(groups[name])) < len(groups[name])
    ]
    return PAGE.replace("ROWS", "\n".join(rows))


PAGE = """# The mesh of axes

Sixteen ranks on two machines of eight. Which ranks does a rank share a group with, and what do they
send each other? Choose degrees, an axis and a rank.

<div class="picture" data-picture="mesh"></div>

`Axes(pp=2, dp_shard=2, cp=2, tp=2, ep=4)` on sixteen ranks; each group with its ranks:

| axis | groups | divides | sends |
|---|---|---|---|
ROWS

- Ranks of one `tp` group are neighbours, as they send in each layer: make `tp` at most the ranks of
  a machine. Stages (`pp`) are farthest apart.
- `fsdp` is `dp_shard` x `cp`: ranks with parts of one sequence also hold slices of one state.
- `ep` cuts the ranks of `dp_shard` x `cp` x `tp` again, into groups of neighbours.
- Ranks that differ in `pp`, `cp` or `tp` alone have the same part of the batch.
- A group of one rank sends nothing; axes of one rank are left out above.

[Compose](how-to/compose.md) has the code, and [lab 11](../labs/shardwise_labs/lab11/page.md) lets
you build tensor, data and pipeline parallelism. `python docs/record_mesh.py` asks `shardwise.Axes`
on each rank, and `make pages` writes this page.
"""
