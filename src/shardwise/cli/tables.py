"""Tables of `shardwise`: facts about checkpoints, and results of verification.

Text from a file is made printable first, as a name in a checkpoint must not control the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.facts import KINDS
from shardwise.quantities import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.checkpoint.verify import Verified

_SHOWN = 3
_FOLDED = 16  # characters


def printable(value: Any) -> str:
    """Return a value as text without control characters."""
    text = str(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def make_table(*columns: str, title: str | None = None, boxed: bool = True, **more: Any) -> Table:
    """Make a table; signs before a column's name set its look.

    ">": right-aligned; "!": never wrapped; "~": folded if too long; "-": dim.
    """
    more = {"box": box.SIMPLE_HEAD if boxed else None, "pad_edge": False, **more}
    table = Table(
        title=title,
        title_justify="left",
        show_header=any(c.lstrip(">!~-") for c in columns),
        **more,
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


def show_run(console: Console, facts: Mapping[str, Any]) -> None:
    """Print all checkpoints of a run."""
    table = make_table(">!step", "!saved", ">!ranks", ">!stage", ">!bytes", "~quick check")
    for row in facts["checkpoints"]:
        damage = row["damage"]
        state = Text(printable(damage).replace(f"{row['path']}/", ""), "red")
        if not damage:
            state = Text.assemble(("ok", "green"), "   <- newest" * row["is_newest"])
        described = [""] * 4
        if row["num_ranks"]:
            described = [_time(row), _ranks(row), str(row["stage"]), format_bytes(row["num_bytes"])]
        table.add_row(f"{row['step']:,}", *described, state)
    console.print(Text(printable(facts["path"]), "bold"), soft_wrap=True)
    if facts["checkpoints"]:
        print_table(console, table)
    else:
        console.print("  no checkpoint yet")
    if facts["lock_holder"]:
        _line(console, "in use", facts["lock_holder"])
    if facts["leftovers"]:
        _line(console, "leftovers", ", ".join(facts["leftovers"]))
        what = "of interrupted saves; the next run in this folder removes them"
        if facts["lock_holder"]:
            what = "being written or removed now, or left by an interrupted save"
        _line(console, "", what)
    if facts["removed_meanwhile"]:
        steps = ", ".join(f"{step:,}" for step in facts["removed_meanwhile"])
        _line(console, "note", f"removed meanwhile: step {steps}")


def show_checkpoint(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the facts of one checkpoint."""
    console.print(Text(printable(facts["path"]), "bold"), soft_wrap=True)
    _line(console, "step", "not said" if facts["step"] is None else f"{facts['step']:,}")
    _line(console, "run", facts["run"])
    versions = f"shardwise {facts['shardwise']}, torch {facts['torch']}"
    _line(console, "saved", f"{_time(facts)}, {versions}")
    _line(console, "ranks", f"{_ranks(facts)}, stage {facts['stage']}")
    _show_sizes(console, facts)
    if facts["tied"]:
        shown = [f"{a} = {b}" for a, b in facts["tied"].items()]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        _line(console, "tied", ", ".join(shown[:_SHOWN]) + more)
    if facts["optimizer"]:
        _line(console, "optimizer", facts["optimizer"]["class_name"] or "of unknown class")
        for group in facts["optimizer"]["groups"]:
            _line(console, "", _group(group))
    else:
        _line(console, "optimizer", "none")
    if "tensors" in facts:
        _show_tensors(console, facts["tensors"])
    if facts["damage"]:
        damage = facts["damage"].replace(f"{facts['path']}/", "")
        _line(console, "DAMAGED", damage, "bold red")
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


def _line(console: Console, label: str, text: Any, style: str = "") -> None:
    console.print(Text.assemble(f"  {label:<10} ", (printable(text), style)), soft_wrap=True)


def _time(facts: Mapping[str, Any]) -> str:
    time = printable(facts["saved_at"])
    return time.replace("T", " ").replace("+00:00", " UTC")


def _ranks(facts: Mapping[str, Any]) -> str:
    shards, replicas = facts["num_shards"], facts["num_replicas"]
    if facts["num_meshes"] > 1:
        return f"{facts['num_ranks']} in {facts['num_meshes']} meshes"
    return f"{shards}" if replicas == 1 else f"{facts['num_ranks']} = {shards} x {replicas}"


def _show_sizes(console: Console, facts: Mapping[str, Any]) -> None:
    table = make_table("kind", ">tensors", ">elements", ">bytes")
    total = 0
    for kind, name in KINDS.items():
        num, size = facts[f"num_{kind}_tensors"], facts[f"{kind}_bytes"]
        total += size
        if num:
            elements = format_count(facts[f"num_{kind}_elements"])
            table.add_row(name, f"{num:,}", elements, format_bytes(size))
    rest = facts["num_bytes"] - total
    table.add_row("indexes and values", "", "", format_bytes(rest) if rest >= 0 else "?")
    table.add_section()
    table.add_row("on disk", "", "", format_bytes(facts["num_bytes"]))
    print_table(console, table)


def _show_tensors(console: Console, tensors: list[dict[str, Any]]) -> None:
    table = make_table("~tensor", "!kind", ">shape", "!dtype", ">!bytes", "!cut")
    for row in tensors:
        name = f"{row['name']}  {row['state']}" if row["state"] else row["name"]
        cut = {"whole": "whole", "own": f"own, {row['num_parts']} ranks"}.get(row["layout"])
        table.add_row(
            Text(printable(name)),
            row["kind"],
            " x ".join(map(str, row["shape"])) or "scalar",
            row["dtype"],
            format_bytes(row["num_bytes"]),
            cut or f"{row['layout']}, {row['num_parts']}",
        )
    print_table(console, table)


def _group(group: Mapping[str, Any]) -> str:
    """Return the settings of an optimizer's group."""
    is_set = {k: v for k, v in group.items() if v is not None and v is not False}
    count = is_set.pop("num_params")
    values = ", ".join(f"{key} {_value(value)}" for key, value in is_set.items())
    return f"{count:,} parameter{'s' if count != 1 else ''}: {values}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"({', '.join(map(_value, value))})"
    return "yes" if value is True else str(value)
