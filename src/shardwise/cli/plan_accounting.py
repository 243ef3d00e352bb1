"""An accounting of all four stages side by side, as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shardwise.plan.accounted import Accounting, Bytes
from shardwise.plan.accounting import account_setup
from shardwise.plan.sizes import OPTIMIZERS, PRECISIONS
from shardwise.quantities import format_bytes, format_gb
from shardwise.stages import STAGES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def all_stages(chosen: Accounting) -> list[Accounting]:
    """Return the same accounting for every stage."""
    return [
        account_setup(chosen.params, replace(chosen.setup, stage=stage.number)) for stage in STAGES
    ]


def accounting_json(chosen: Accounting) -> dict[str, Any]:
    """Return everything that is known, as plain data; bytes are integers, of one rank."""
    setup = chosen.setup
    return {
        "kind": "accounting",
        "params": chosen.params,
        **asdict(setup),
        "world_size": setup.world_size,
        "stages": [_stage_json(accounting) for accounting in all_stages(chosen)],
        "left_out": list(chosen.left_out),
        "sources": {
            "precision": PRECISIONS[setup.precision].source,
            "optimizer": OPTIMIZERS[setup.optimizer].source,
        },
    }


def _stage_json(accounting: Accounting) -> dict[str, Any]:
    return {
        "stage": accounting.setup.stage,
        **_homes("total", accounting.total),
        **_homes("between_steps", accounting.between_steps),
        **{k: v for name, b in accounting.lines.items() for k, v in _homes(name, b).items()},
        "host_bytes_per_node": accounting.host_bytes_per_node,
        "per_step": asdict(accounting.traffic),
    }


def _homes(name: str, held: Bytes) -> dict[str, int]:
    return {f"{name}_{home}_bytes": num_bytes for home, num_bytes in asdict(held).items()}


def show_accounting(console: Console, chosen: Accounting) -> None:
    """Print the table, the chosen stage marked, and what it leaves out."""
    from rich.padding import Padding
    from rich.text import Text

    setup = chosen.setup
    ranks = f"{setup.ranks:,} rank{'s' if setup.ranks > 1 else ''}"
    if setup.replicas > 1:
        ranks = f"{setup.replicas:,} x {ranks}"
    title = f"{chosen.params:,} parameters, {ranks}, {setup.precision}, {setup.optimizer}"
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(_table(chosen))
    decimal = ", ".join(format_gb(each.device_bytes) for each in all_stages(chosen))
    console.print(f"  device in GB, as papers count, by stage: {decimal}", soft_wrap=True)
    if chosen.host_bytes:
        node = f"host memory of a node ({min(setup.ranks_per_node, setup.world_size)} ranks)"
        console.print(f"  {node}: {format_bytes(chosen.host_bytes_per_node)}", soft_wrap=True)
    console.print("  per rank at the end of backward; resting: between steps; sent: in one step")
    console.print("  left out:")
    for sentence in chosen.left_out:
        console.print(Padding(Text(f"- {sentence}", "dim"), (0, 0, 0, 2)))


def _table(chosen: Accounting) -> Table:
    from shardwise.cli.tables import make_table

    stages = all_stages(chosen)
    columns = {
        "params": [a.parameters.device for a in stages],
        "master": [a.master_weights.device for a in stages],
        "grads": [a.gradients.device for a in stages],
        "optimizer": [a.optimizer_state.device for a in stages],
        "device": [a.device_bytes for a in stages],
        "resting": [a.between_steps.device for a in stages],
        "host": [a.host_bytes for a in stages],
        "disk": [a.nvme_bytes for a in stages],
        "sent": [a.traffic.shard_sent_bytes + a.traffic.replica_sent_bytes for a in stages],
    }
    shown = {name: sizes for name, sizes in columns.items() if any(sizes)}
    table = make_table("!stage", *(f">!{name}" for name in shown), padding=(0, 1, 0, 0))
    for number, accounting in enumerate(stages):
        is_chosen = accounting.setup.stage == chosen.setup.stage
        cells = [format_bytes(sizes[number]) for sizes in shown.values()]
        table.add_row(
            f"{'>' if is_chosen else ' '} {number}", *cells, style="bold" if is_chosen else ""
        )
    return table
