"""Tables of `shardwise`: facts about checkpoints, and results of verification.

Text from a file is made printable first, as a name in a checkpoint must not control the terminal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from shardwise.cli.facts import KINDS, CheckpointFacts, CheckpointsFacts, Saved
from shardwise.quantities import format_bytes, format_count
from shardwise.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from shardwise.checkpoint.verify import Verified

_SHOWN = 3


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None
) -> Table:
    """Make a table. ">" before a column's name aligns it to the right; what is too long folds."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = "left"
    for column in columns:
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def show_run(console: Console, facts: CheckpointsFacts) -> None:
    """Print all checkpoints of a run."""
    console.print(Text(printable(facts.path), "bold"), soft_wrap=True)
    rows = []
    for saved in facts.checkpoints:
        state = Text("ok" + "   <- newest" * saved.is_newest, "green")
        if saved.damage:
            state = _damage(saved, "red")
        size = "" if saved.num_bytes is None else format_bytes(saved.num_bytes)
        stage = "" if saved.stage is None else str(saved.stage)
        rows.append((f"{saved.step:,}", _time(saved), _ranks(saved), stage, size, state))
    if rows:
        columns = ">step", "saved", ">ranks", ">stage", ">bytes", "quick check"
        console.print(make_table(columns, rows))
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
    sizes, whole = facts.sizes(), saved.num_bytes or 0
    rows = [
        (KINDS[kind], f"{num:,}", format_count(numel), format_bytes(num_bytes))
        for kind, (num, numel, num_bytes) in sizes.items()
        if num
    ]
    rest = whole - sum(num_bytes for *_, num_bytes in sizes.values())
    rows.append(("indexes and values", "", "", format_bytes(rest) if rest >= 0 else "?"))
    rows.append(("on disk", "", "", format_bytes(whole)))
    console.print(make_table(("kind", ">tensors", ">elements", ">bytes"), rows))
    if manifest.tied:
        shown = [f"{a} = {b}" for a, b in manifest.tied.items()]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        _line(console, "tied", ", ".join(shown[:_SHOWN]) + more)
    row = manifest.optimizer
    _line(console, "optimizer", "none" if row is None else row.class_name or "of unknown class")
    for group in facts.groups:
        is_set = {k: v for k, v in group.items() if v is not None and v is not False}
        count = is_set.pop("num_params")
        values = ", ".join(f"{key} {json.dumps(value)}" for key, value in is_set.items())
        _line(console, "", f"{count:,} parameter{'s' if count != 1 else ''}: {values}")
    if lists_tensors:
        listed = []
        for tensor in facts.tensors:
            name = f"{tensor.name}  {tensor.state}" if tensor.state else tensor.name
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            cut = f"{tensor.layout}, {tensor.num_parts}" + " ranks" * (tensor.layout == "own")
            cut = "whole" if tensor.layout == "whole" else cut
            listed.append(
                (name, tensor.kind, shape, tensor.dtype, format_bytes(tensor.num_bytes), cut)
            )
        columns = "tensor", "kind", ">shape", "dtype", ">bytes", "cut"
        console.print(make_table(columns, listed))
    if saved.damage:
        _line(console, "DAMAGED", _damage(saved, "bold red"))
    else:
        _line(console, "check", "all files are there; `shardwise ckpt verify` reads every byte")


def show_verified(console: Console, verified: Verified) -> None:
    """Print the result of verifying one checkpoint."""
    num, size = verified.num_files, format_bytes(verified.num_bytes)
    state = Text("whole  ", "green") if verified.ok else Text("DAMAGED", "bold red")
    name = printable(verified.path.name or verified.path)
    files = f"{num:,} file{'s' if num != 1 else ''}"
    console.print(Text.assemble((name, "bold"), "  ", state, f"  {files}, {size}"), soft_wrap=True)
    for line in (*verified.findings, *(f"note: {note}" for note in verified.notes)):
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)


def _line(console: Console, label: str, text: str | Text) -> None:
    shown = text if isinstance(text, Text) else printable(text)
    console.print(Text.assemble(f"  {label:<10} ", shown), soft_wrap=True)


def _damage(saved: Saved, style: str) -> Text:
    """Return the damage, with names of files in the checkpoint."""
    return Text(printable(saved.damage).replace(f"{saved.path}/", ""), style)


def _time(saved: Saved) -> str:
    return (saved.saved_at or "").replace("T", " ").replace("+00:00", " UTC")


def _ranks(saved: Saved) -> str:
    num, shards, replicas = saved.num_ranks, saved.num_shards, saved.num_replicas
    if num is None:
        return ""
    if (saved.num_meshes or 1) > 1:
        return f"{num} in {saved.num_meshes} meshes"
    return f"{shards}" if replicas == 1 else f"{num} = {shards} x {replicas}"
