"""Hold the planner against published runs: memory, step time, and verdicts.

    python benchmarks/published.py
    python benchmarks/published.py --verbose --system bigscience --rows other.csv --json out.json

Each row becomes a `Candidate`, a model and a cluster, and `plan()` itself predicts it: the scores
are those of `shardwise plan`. Rows that the planner has no words for are listed with the reason.

`data/unseen_runs.csv` is scored apart: runs of pages that had no part in any constant, default or
phrase. It shows how the planner does on runs that it has not seen, and which interval those needed
(`shardwise.plan.margins.UNSEEN_MEMORY` and `UNSEEN_TIME`). With ``--rows`` it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

import _published_plans as plans  # noqa: E402
from _published_cells import UNSEEN, Row, Unmodelled, read_mechanisms, read_rows  # noqa: E402
from _published_plans import Run, read_run  # noqa: E402

from shardwise.errors import ConfigError  # noqa: E402

_QUANTILES = {"p5": 0.05, "median": 0.5, "p95": 0.95}
_VERDICTS = ("fits", "tight", "will not fit")


@dataclass(frozen=True)
class Prediction:
    """One figure of one row: predicted and published, in bytes or seconds.

    ``group`` is the system and the kind of a memory column, or the GPU type of a time.
    ``uncalibrated`` is a time by single measurements in place of the fitted efficiencies.
    """

    run: Run
    group: str
    predicted: float
    published: float
    uncalibrated: float = 0.0

    def error(self, predicted: float | None = None) -> float:
        """Return the relative error, of another figure if one is given."""
        return abs((predicted or self.predicted) / self.published - 1)


@dataclass
class Report:
    """Everything that the program found; ``not_modelled`` has the rows' ids by reason."""

    memory: list[Prediction] = field(default_factory=list)
    time: list[Prediction] = field(default_factory=list)
    ran: dict[str, str] = field(default_factory=dict)  # verdicts by row
    ran_out: dict[str, str] = field(default_factory=dict)
    not_modelled: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def evaluate(rows: Iterable[Row], *, with_time: bool = True) -> Report:
    """Predict every row that can be predicted; never fail on a row."""
    report = Report()
    for row in rows:
        parts: list[Callable[[Run, Report], None]] = [_add_memory, _add_verdicts]
        if with_time and any(row.cell(c) for c in ("tok_s_gpu", "step_s")):
            parts.append(_add_time)
        if not row.cell("mem_value") and not row.cell("mem_kind") and len(parts) == 2:
            continue
        with _reasons(row, report):
            run = read_run(row)
            for add in parts:
                with _reasons(row, report):
                    add(run, report)
    return report


@contextlib.contextmanager
def _reasons(row: Row, report: Report) -> Iterator[None]:
    """Note why a row is not modelled, in place of an error."""
    try:
        yield
    except (Unmodelled, ArithmeticError, ValueError, LookupError, TypeError) as error:
        reason = f"row not understood: {type(error).__name__}"
        if isinstance(error, Unmodelled):
            reason = str(error)
        elif isinstance(error, ConfigError):
            reason = f"refused by the planner: {str(error)[:60]}"
        if row.id not in report.not_modelled[reason]:
            report.not_modelled[reason].append(row.id)


def _add_memory(run: Run, report: Report) -> None:
    published = plans.published_bytes(run.row, run.system)
    if published is not None:
        kind = plans.memory_kind(run.row, run.system)
        found = plans.planned_bytes(run.planned, kind)
        report.memory.append(Prediction(run, f"{run.system.name}, {kind}", found, published))


def _add_time(run: Run, report: Report) -> None:
    published = plans.published_seconds(run)
    if published is not None:
        single = run.plan(fitted=False).step_s
        report.time.append(Prediction(run, run.gpu, run.planned.step_s, published, single))


def _add_verdicts(run: Run, report: Report) -> None:
    """Plan what ran, and what ran out of memory, as a row says."""
    row = run.row
    kind = row.cell("mem_kind").lower()
    if "component" in kind or "host oom" in kind:
        return
    at = re.search(r"fits at (\d+), oom at (\d+)", kind)
    if row.says("mem_value", "oom"):
        report.ran_out[row.id] = run.planned.verdict
    elif at:
        report.ran[row.id] = _verdict_at(row, int(at[1]))
        report.ran_out[row.id] = _verdict_at(row, int(at[2]))
    elif "model" not in kind and (kind.startswith(("fits", "max")) or row.number("mem_value")):
        if kind.startswith("fits") and not row.cell("act_ckpt"):
            raise Unmodelled("fits, but checkpointing is not given")
        report.ran[row.id] = run.planned.verdict
        if "next is oom" in kind:
            report.ran_out[row.id] = _verdict_at(row, row.count("micro_batch") + 1)


def _verdict_at(row: Row, batch: int) -> str:
    """Return the verdict of a row with another micro-batch."""
    text = {**row.text, "micro_batch": str(batch), "global_batch": ""}
    return read_run(Row(text)).planned.verdict


# -- scores
def summary(report: Report) -> dict[str, Any]:
    """Return the figures of a report, for tests and JSON."""
    return {
        "memory": {
            name: {
                "rows": len(some),
                "median_error": common.quantile([p.error() for p in some], 0.5),
                "p95_error": common.quantile([p.error() for p in some], 0.95),
            }
            for name, some in _grouped(report.memory).items()
        },
        "time_by_gpu": {
            name: {
                "rows": len(some),
                "mape_uncalibrated": common.mean([p.error(p.uncalibrated) for p in some]),
                "mape_calibrated": common.mean([p.error() for p in some]),
            }
            for name, some in _grouped(report.time).items()
        },
        "verdicts": {
            name: {"rows": len(found), **{v: Counter(found.values())[v] for v in _VERDICTS}}
            for name, found in (("ran", report.ran), ("ran out of memory", report.ran_out))
        },
        "published_over_predicted": {
            name: {
                "rows": len(found),
                **{key: common.quantile(ratios, share) for key, share in _QUANTILES.items()},
            }
            for name, found in (("memory", report.memory), ("time", report.time))
            for ratios in ([p.published / p.predicted for p in found],)
        },
        "not_modelled": dict(report.not_modelled),
    }


def _grouped(found: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    fused = [p for p in found if p.run.system.fused_attention]
    groups: dict[str, list[Prediction]] = {"all": list(found), "all with fused attention": fused}
    for each in found:
        groups.setdefault(each.group, []).append(each)
    return groups


def print_summary(figures: Mapping[str, Any]) -> None:
    """Print the figures of `summary`."""
    print(f"\nMemory, error of the plan\n  {'rows':>4} {'median':>7} {'p95':>7}")
    for name, each in figures["memory"].items():
        print(f"  {each['rows']:4d} {each['median_error']:7.1%} {each['p95_error']:7.1%}  {name}")
    print("\nTime per GPU type, mean absolute percentage error: single measurements, plan")
    for name, each in figures["time_by_gpu"].items():
        errors = f"{each['mape_uncalibrated']:7.1%} {each['mape_calibrated']:7.1%}"
        print(f"  {each['rows']:4d} {errors}  {name}")
    for name, counts in figures["verdicts"].items():
        shown = ", ".join(f"{v} {counts[v]}" for v in _VERDICTS)
        print(f"  {counts['rows']:4d} rows that {name}: {shown}")
    print("\nPublished over planned: 5th percentile, median, 95th")
    for name, each in figures["published_over_predicted"].items():
        print(f"  {each['rows']:4d} " + " ".join(f"{each[k]:6.2f}" for k in _QUANTILES), name)
    print("\nNot modelled")
    for reason, ids in sorted(figures["not_modelled"].items(), key=lambda item: -len(item[1])):
        print(f"  {len(ids)} rows, {reason}: {' '.join(ids[:12])}{' ...' if len(ids) > 12 else ''}")


def _print_rows(report: Report, rows: Iterable[Row]) -> None:
    for p in (*report.memory, *report.time):
        scale, unit = (1.0, "s") if p.uncalibrated else (plans.GIB, "GiB")
        figures = f"{p.predicted / scale:8.2f} {unit:3}, published {p.published / scale:8.2f}"
        name = "time" if p.uncalibrated else "memory"
        more = p.predicted / p.published - 1
        print(f"{p.run.row.id:6} {name:6} predicted {figures} {more:+7.1%}  {p.group}")
    for verdicts, happened in ((report.ran, "ran"), (report.ran_out, "ran out of memory")):
        for name, verdict in verdicts.items():
            print(f"{name:6} {happened}, planned: {verdict}")
    for row in rows:
        if words := read_mechanisms(row).unknown:
            print(f"{row.id:6} words that no phrase explains: {', '.join(words)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; always 0, whatever the rows say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, help="another table in the same form")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--system", default="", help="only systems whose name has this in it")
    parser.add_argument("--verbose", action="store_true", help="one line per row")
    parser.add_argument("--no-time", action="store_true", help="memory alone")
    chosen = parser.parse_args(arguments)
    table = read_rows(*([chosen.rows] if chosen.rows else []))
    rows = [r for r in table if chosen.system.lower() in r.cell("system").lower()]
    report = evaluate(rows, with_time=not chosen.no_time)
    if chosen.verbose:
        _print_rows(report, rows)
    figures = summary(report)
    print_summary(figures)
    if not chosen.rows:
        print("\n-- pages that had no part in any constant, default or phrase")
        figures["unseen"] = summary(evaluate(read_rows(UNSEEN), with_time=not chosen.no_time))
        print_summary(figures["unseen"])
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
