"""Hold the planner against published runs: memory and step time, per system, with every constant.

    python benchmarks/published.py                       # summary
    python benchmarks/published.py --verbose             # one line per row as well
    python benchmarks/published.py --system bigscience --rows other.csv --json out.json

Memory: a row's shape and settings go through `shape_tape`; a recipe (`_published_systems`) says how
many bytes of state a parameter has there and what the memory column means. Time: the same tape is
played by the planner's own `play`, priced by `Prices` and simulated by `simulate`, once with the
catalogue's efficiencies and once with those fitted per GPU type (`_published_fits`).

Nothing is fitted per row. Rows that cannot be modelled are listed with the reason. Rows with an odd
number were not used in the fits of time, and their errors are printed as held out; the recipes were
written with all rows in view, so only a table of other rows (`--rows`) tests those.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _common as common

common.find_shardwise()

from _published_fits import fit_of, for_system, is_fitted_on, unfitted  # noqa: E402
from _published_memory import GIB, predict_memory, published_bytes, system_text  # noqa: E402
from _published_pairs import pair_lines  # noqa: E402
from _published_rows import TABLE, Row, Unmodelled, read_rows  # noqa: E402
from _published_systems import SYSTEMS, system_of  # noqa: E402
from _published_time import play_row, seconds_of, timed  # noqa: E402
from _published_verdicts import Verdicts, check_verdicts  # noqa: E402

from shardwise.plan.machine.efficiencies import FITTED  # noqa: E402


@dataclass(frozen=True)
class MemoryFound:
    """One row's memory: predicted and published bytes."""

    id: str
    system: str
    kind: str
    predicted: float
    published: float
    fitted_on: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class TimeFound:
    """One row's seconds per step: published, and predicted before and after calibration."""

    id: str
    system: str
    gpu: str
    published: float
    uncalibrated: float
    calibrated: float
    fitted_on: bool


@dataclass
class Report:
    """All that the program found."""

    memory: list[MemoryFound] = field(default_factory=list)
    time: list[TimeFound] = field(default_factory=list)
    verdicts: Verdicts = field(default_factory=Verdicts)
    no_memory: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    no_time: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def evaluate(rows: Iterable[Row], *, with_time: bool = True) -> Report:
    """Predict every row that can be predicted; never fail on a row."""
    report = Report()
    for row in rows:
        _guarded(row, report.no_memory, lambda row=row: _memory(row, report))
        _guarded(row, report.no_memory, lambda row=row: check_verdicts(row, report.verdicts))
        if with_time and any(row.cell(c) for c in ("tok_s_gpu", "step_s")):
            _guarded(row, report.no_time, lambda row=row: _time(row, report))
    return report


def _guarded(row: Row, reasons: dict[str, list[str]], work: Callable[[], None]) -> None:
    try:
        work()
    except Unmodelled as reason:
        ids = reasons[str(reason)]
        if row.id not in ids:
            ids.append(row.id)
    except (ArithmeticError, ValueError, LookupError, TypeError) as error:
        reasons[f"row not understood: {type(error).__name__}"].append(row.id)


def _memory(row: Row, report: Report) -> None:
    system = system_of(system_text(row))
    published = published_bytes(row, system)
    if published is None:
        return
    predicted = predict_memory(row).total
    if not math.isfinite(predicted) or published <= 0:
        raise Unmodelled("memory column not understood")
    report.memory.append(
        MemoryFound(
            row.id,
            system.name,
            system.memory,
            predicted,
            published,
            system.overhead.is_fitted_on(row.id),
        )
    )


def _time(row: Row, report: Report) -> None:
    ready = timed(row)
    played = play_row(ready)
    system = ready.setup.system
    fit = for_system(fit_of(ready.gpu), ready.gpu, system)
    report.time.append(
        TimeFound(
            id=row.id,
            system=system.name,
            gpu=ready.gpu,
            published=ready.published_s,
            uncalibrated=seconds_of(played, unfitted(ready.gpu)),
            calibrated=seconds_of(played, fit) * system.slowdown,
            fitted_on=is_fitted_on(row.id, ready.gpu, system.name),
        )
    )


def median(values: Sequence[float]) -> float:
    """Return the median; nan of nothing."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between neighbours; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    """Return the mean; nan of nothing."""
    return sum(values) / len(values) if values else math.nan


def summary(report: Report) -> dict[str, object]:
    """Return the figures of a report, for tests and JSON."""
    memory = defaultdict(list)
    for each in report.memory:
        memory[f"{each.system}, {each.kind}"].append(abs(each.error))
    everything = [abs(e.error) for e in report.memory]
    held_out = [abs(e.error) for e in report.memory if not e.fitted_on]
    by_gpu: dict[str, list[TimeFound]] = defaultdict(list)
    by_system: dict[str, list[TimeFound]] = defaultdict(list)
    for t in report.time:
        by_gpu[t.gpu].append(t)
        by_system[f"{t.gpu}: {t.system}"].append(t)
    return {
        "memory": {
            "all": _spread(everything),
            "all, rows that no constant was fitted on": _spread(held_out),
            **{k: _spread(v) for k, v in memory.items()},
        },
        "time_by_gpu": {
            "all": _mapes(report.time),
            **{k: _mapes(v) for k, v in by_gpu.items()},
        },
        "time_by_system": {k: _mapes(v) for k, v in by_system.items()},
        "verdicts": report.verdicts.figures(),
        "not_modelled": {
            "memory and verdicts": dict(report.no_memory),
            "time": dict(report.no_time),
        },
    }


def _spread(errors: Sequence[float]) -> dict[str, float]:
    return {
        "rows": len(errors),
        "median_error": median(errors),
        "p95_error": quantile(errors, 0.95),
    }


def _mapes(rows: Sequence[TimeFound]) -> dict[str, float]:
    def mape(some: Sequence[TimeFound], name: str) -> float:
        return mean([abs(getattr(t, name) / t.published - 1) for t in some])

    return {
        "rows": len(rows),
        "mape_uncalibrated": mape(rows, "uncalibrated"),
        "mape_calibrated": mape(rows, "calibrated"),
        "rows_held_out": sum(not t.fitted_on for t in rows),
        "mape_held_out": mape([t for t in rows if not t.fitted_on], "calibrated"),
    }


def print_report(report: Report, rows: Sequence[Row], verbose: bool) -> None:
    """Print a report as text."""
    figures = summary(report)
    if verbose:
        _print_rows(report)
    print("\nMemory: error of predicted against published, per system and kind")
    print(f"  {'rows':>4} {'median':>7} {'p95':>7}")
    for name, each in figures["memory"].items():  # type: ignore[attr-defined]
        print(f"  {each['rows']:4d} {each['median_error']:7.1%} {each['p95_error']:7.1%}  {name}")
    print("\nVerdicts")
    for name, value in figures["verdicts"].items():  # type: ignore[attr-defined]
        print(f"  {name}: {value}")
    for title, key in (("per GPU type", "time_by_gpu"), ("per system", "time_by_system")):
        print(f"\nTime, mean absolute percentage error, {title}")
        print(f"  {'rows':>4} {'as is':>7} {'fitted':>7} {'held out':>9} {'(rows)':>7}")
        for name, each in figures[key].items():  # type: ignore[attr-defined]
            print(
                f"  {each['rows']:4d} {each['mape_uncalibrated']:7.1%} "
                f"{each['mape_calibrated']:7.1%} {each['mape_held_out']:9.1%} "
                f"{each['rows_held_out']:7d}  {name}"
            )
    print("\nDifferential pairs: one knob changes")
    for line in pair_lines(rows):
        print(f"  {line}")
    _print_constants()
    print("\nNot modelled")
    for what, reasons in figures["not_modelled"].items():  # type: ignore[attr-defined]
        for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
            shown = " ".join(ids[:12]) + (" ..." if len(ids) > 12 else "")
            print(f"  {what}: {len(ids)} rows, {reason}: {shown}")


def _print_rows(report: Report) -> None:
    for m in report.memory:
        print(
            f"{m.id:6} memory  predicted {m.predicted / GIB:8.2f} GiB  published "
            f"{m.published / GIB:8.2f} GiB  {m.error:+7.1%}  {m.system}"
        )
    for t in report.time:
        print(
            f"{t.id:6} time    predicted {t.calibrated:8.3f} s    published {t.published:8.3f} s  "
            f"  {t.calibrated / t.published - 1:+7.1%}  {t.system} on {t.gpu}"
            f"{'' if t.fitted_on else ' (held out)'}"
        )
    for line in report.verdicts.lines:
        print(line)


def _print_constants() -> None:
    print("\nFitted constants: memory (total = tensors x (1 + fraction) + constant)")
    for system in SYSTEMS:
        over = system.overhead
        if over.fraction or over.constant:
            print(
                f"  {system.name}: {over.fraction:.0%} + {over.constant / 1e9:.1f} GB: "
                f"{over.meaning}; rows: {over.fitted_on}"
            )
    print("\nFitted constants: time")
    for gpu, fit in FITTED.items():
        for name, each in fit.items():
            print(f"  {gpu} {name} = {each.value:.3g}: {each.meaning}; {each.source}")
    for system in SYSTEMS:
        if system.broadcast_s:
            print(
                f"  {system.name}: {system.broadcast_s * 1e3:.1f} ms per rank of a ZeRO-1 group: "
                "its parameters are broadcast rank by rank; even rows of R354 .. R385"
            )
        if system.slowdown != 1:
            print(f"  {system.name}: slowdown {system.slowdown:.2f}: {system.slowdown_meaning}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; always 0, whatever the rows say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, default=TABLE, help="another table in the same form")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--system", default="", help="only systems whose name has this in it")
    parser.add_argument("--verbose", action="store_true", help="one line per row")
    parser.add_argument("--no-time", action="store_true", help="memory alone")
    chosen = parser.parse_args(arguments)
    rows = [r for r in read_rows(chosen.rows) if chosen.system.lower() in r.cell("system").lower()]
    report = evaluate(rows, with_time=not chosen.no_time)
    print_report(report, rows, chosen.verbose)
    if chosen.json:
        chosen.json.write_text(json.dumps(summary(report), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
