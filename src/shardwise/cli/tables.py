"""Tables of `shardwise`: facts about checkpoints, and results of verification.

Text from a file is made printable first, as a name in a checkpoint must not control the terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.facts import KINDS, CheckpointFacts, RunFacts, Saved
from shardwise.quantities import format_bytes, format_count
from shardwise.terminal import printable

if TYPE_CHECKING:
    from shardwise.checkpoint.verify import Verified

_SHOWN = 3
_FOLDED = 16  # characters


def make_table(*columns: str, title: str | None = None, boxed: bool = True) -> Table:
    """Make a table; signs before a column's name set its look.

    ">": right-aligned; "!": never wrapped; "~": folded if too long; "-": dim.
    """
    table = Table(
        title=title,
        title_justify="left",
        show_header=any(c.lstrip(">!~-") for c in columns),
        box=box.SIMPLE_HEAD if boxed else None,
        pad_edge=False,
    )
    for column in columns:
        name = column.lstrip(">!~-")
        signs = column.removesuffix(name)
        table.add_column(
            name,
            justify="right" if ">" in signs else "left",
            no_wrap="!" in signs,
            overflow="fold" if "~" in signs else "ellipsis",
            style="dim" if "-" in signs else None,
        )
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table, or a line of named values for each row if the terminal is too narrow for it.

    A column that folds needs 16 characters at most; others need their longest cell.
    """
    needed = 0
    for column in table.columns:
        width = max(len(str(cell)) for cell in (column.header, *column.cells))
        needed += 3 + (min(width, _FOLDED) if column.overflow == "fold" else width)
    if needed <= console.width:
        console.print(table)
        return
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        line = Text("  ")
        for column, cell in zip(table.columns, cells, strict=True):
            if str(cell):
                line.append(f"{column.header} ", "dim").append(cell).append("  ")
        line.rstrip()
        console.print(line, soft_wrap=True)


def show_run(console: Console, facts: RunFacts) -> None:
    """Print all checkpoints of a run."""
    table = make_table(">!step", "!saved", ">!ranks", ">!stage", ">!bytes", "~quick check")
    for saved in facts.checkpoints:
        state = Text.assemble(("ok", "green"), "   <- newest" * saved.is_newest)
        if saved.damage:
            state = Text(printable(saved.damage).replace(f"{saved.path}/", ""), "red")
        size = "" if saved.num_bytes is None else format_bytes(saved.num_bytes)
        stage = "" if saved.stage is None else str(saved.stage)
        table.add_row(f"{saved.step:,}", _time(saved), _ranks(saved), stage, size, state)
    console.print(Text(printable(facts.path), "bold"), soft_wrap=True)
    if facts.checkpoints:
        print_table(console, table)
    else:
        console.print("  no checkpoint yet")
    if facts.lock_holder:
        _line(console, "in use", facts.lock_holder)
    if facts.leftovers:
        _line(console, "leftovers", ", ".join(facts.leftovers))
        what = "of interrupted saves; the next run in this folder removes them"
        if facts.lock_holder:
            what = "being written or removed now, or left by an interrupted save"
        _line(console, "", what)
    if facts.removed_meanwhile:
        steps = ", ".join(f"{step:,}" for step in facts.removed_meanwhile)
        _line(console, "note", f"removed meanwhile: step {steps}")


def show_checkpoint(console: Console, facts: CheckpointFacts, lists_tensors: bool) -> None:
    """Print the facts of one checkpoint."""
    manifest, saved = facts.manifest, facts.saved
    console.print(Text(printable(saved.path), "bold"), soft_wrap=True)
    _line(console, "step", "not said" if manifest.step is None else f"{manifest.step:,}")
    _line(console, "run", manifest.run)
    versions = f"shardwise {manifest.shardwise}, torch {manifest.torch}"
    _line(console, "saved", f"{_time(saved)}, {versions}")
    _line(console, "ranks", f"{_ranks(saved)}, stage {manifest.stage}")
    table = make_table("kind", ">tensors", ">elements", ">bytes")
    sizes, whole = facts.sizes(), saved.num_bytes or 0
    for kind, (num, numel, num_bytes) in sizes.items():
        if num:
            table.add_row(KINDS[kind], f"{num:,}", format_count(numel), format_bytes(num_bytes))
    rest = whole - sum(num_bytes for *_, num_bytes in sizes.values())
    table.add_row("indexes and values", "", "", format_bytes(rest) if rest >= 0 else "?")
    table.add_section()
    table.add_row("on disk", "", "", format_bytes(whole))
    print_table(console, table)
    if manifest.tied:
        shown = [f"{a} = {b}" for a, b in manifest.tied.items()]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        _line(console, "tied", ", ".join(shown[:_SHOWN]) + more)
    row = manifest.optimizer
    _line(console, "optimizer", "none" if row is None else row.class_name or "of unknown class")
    for group in facts.groups:
        is_set = {k: v for k, v in group.items() if v is not None and v is not False}
        count = is_set.pop("num_params")
        values = ", ".join(f"{key} {_value(value)}" for key, value in is_set.items())
        _line(console, "", f"{count:,} parameter{'s' if count != 1 else ''}: {values}")
    if lists_tensors:
        table = make_table("~tensor", "!kind", ">shape", "!dtype", ">!bytes", "!cut")
        for each in facts.tensors:
            name = f"{each.name}  {each.state}" if each.state else each.name
            shape = " x ".join(map(str, each.shape)) or "scalar"
            cut = f"{each.layout}, {each.num_parts}" + " ranks" * (each.layout == "own")
            cut = "whole" if each.layout == "whole" else cut
            size = format_bytes(each.num_bytes)
            table.add_row(Text(printable(name)), each.kind, shape, each.dtype, size, cut)
        print_table(console, table)
    if saved.damage:
        _line(console, "DAMAGED", saved.damage.replace(f"{saved.path}/", ""), "bold red")
    else:
        _line(console, "check", "all files are there; `shardwise ckpt verify` reads every byte")


def show_verified(console: Console, verified: Verified) -> None:
    """Print the result of verifying one checkpoint."""
    num, size = verified.num_files, format_bytes(verified.num_bytes)
    state = Text("whole  ", "green") if verified.ok else Text("DAMAGED", "bold red")
    name = printable(verified.path.name or verified.path)
    files = f"{num:,} file{'s' if num != 1 else ''}"
    console.print(Text.assemble((name, "bold"), "  ", state, f"  {files}, {size}"), soft_wrap=True)
    for finding in verified.findings:
        console.print(Text(f"  {printable(finding)}"), soft_wrap=True)
    for note in verified.notes:
        console.print(Text(f"  note: {printable(note)}", "dim"), soft_wrap=True)


def _line(console: Console, label: str, text: object, style: str = "") -> None:
    console.print(Text.assemble(f"  {label:<10} ", (printable(text), style)), soft_wrap=True)


def _time(saved: Saved) -> str:
    return printable(saved.saved_at or "").replace("T", " ").replace("+00:00", " UTC")


def _ranks(saved: Saved) -> str:
    num, shards, replicas = saved.num_ranks, saved.num_shards, saved.num_replicas
    if num is None:
        return ""
    if (saved.num_meshes or 1) > 1:
        return f"{num} in {saved.num_meshes} meshes"
    return f"{shards}" if replicas == 1 else f"{num} = {shards} x {replicas}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"({', '.join(map(_value, value))})"
    return "yes" if value is True else str(value)
