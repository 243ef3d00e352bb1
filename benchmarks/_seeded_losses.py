"""Losses of the demo's decoder over seeds, for benchmarks that compare ways to train it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import _common as common

DEMO = Path(__file__).parent.parent / "examples" / "demo.yaml"
_SMALL = "dim=64,layers=2,seq=64,eval_windows=128"


def parser(doc: str | None, choices: Iterable[str], separator: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that such benchmarks have in common."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--choices", default=[*choices], type=lambda text: text.split(separator))
    made.add_argument("--seeds", default=[0, 1, 2], type=lambda t: [*map(int, t.split(","))])
    made.add_argument("--steps", type=int, default=300)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--lr", type=float, default=1e-3, help="the demo's own is 4e-3")
    made.add_argument("--keys", default=_SMALL, help="other keys of `shardwise train`: k=v,k=v")
    made.add_argument("--timeout", type=float, default=3600, help="seconds, of one choice")
    made.add_argument("--json", help="append results to this file")
    return made


def keys_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the keys of `shardwise train` that the flags give."""
    keys = {"steps": args.steps, "lr": args.lr, "min_lr": args.lr / 20, "threads": 1, **more}
    keys |= {"overwrite": True, "observe": False}
    return keys | dict(each.split("=", 1) for each in args.keys.split(",") if each)


def compare(
    choice: str, losses: Sequence[float], exact: Sequence[float]
) -> tuple[list[float], list[str]]:
    """Print losses by seed; return how much more they are than ``exact``, and a row of them."""
    more = [loss / first - 1 for loss, first in zip(losses, exact, strict=True)]
    print(choice, *(f"{loss:.4f} ({by:+.2%})" for loss, by in zip(losses, more, strict=True)))
    row = [choice, f"{common.mean(losses):.4f}", f"{common.mean(more):+.2%}"]
    return more, [*row, f"{min(more):+.2%} to {max(more):+.2%}"]
