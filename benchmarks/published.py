"""Hold the planner against published runs: memory and step time, and what was never seen.

    python benchmarks/published.py                       # summary
    python benchmarks/published.py --verbose             # one line per row as well
    python benchmarks/published.py --system bigscience --rows other.csv --json out.json

Memory: a row's cells are read into mechanisms (`_published_flags`), what it does not tell is the
system's default (`data/systems.toml`); its shape goes through `shape_tape`. Time: the same tape is
played by the planner's own `play`, priced by `Prices` and simulated by `simulate`.

Nothing is fitted per row. What is fitted (what a device holds beside tensors, efficiencies, what a
system adds) is fitted on the rows of `data/` alone, also where other rows are predicted, and again
without each source page, whose rows are then predicted. `--no-left-out` leaves this out.

`data/unseen_runs.csv` is read for one table at the end alone: runs of pages that had no part in any
constant, default or phrase. That table says how the planner does on what it has not seen, and what
interval such rows would have needed. With `--rows` it is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

from _published_flags import flags_of  # noqa: E402
from _published_left_out import Fits, left_out, lines_of  # noqa: E402
from _published_memory import GIB, measure  # noqa: E402
from _published_overhead import Measured, Overheads, fit_overheads  # noqa: E402
from _published_pairs import pair_lines  # noqa: E402
from _published_rows import UNSEEN, Row, Unmodelled, read_rows  # noqa: E402
from _published_speed import Clocked, Speeds, fit_speeds, tabled_speeds  # noqa: E402
from _published_time import timed  # noqa: E402
from _published_verdicts import Verdicts, check_verdicts  # noqa: E402

from shardwise.plan.machine.efficiencies import fitted_efficiencies  # noqa: E402

_QUANTILES = {"p5": 0.05, "median": 0.5, "p95": 0.95}


@dataclass(frozen=True)
class MemoryFound:
    """One row's memory: predicted and published bytes."""

    row: Measured
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.published - 1


@dataclass(frozen=True)
class TimeFound:
    """One row's seconds per step: published, and predicted before and after calibration."""

    row: Clocked
    uncalibrated: float
    calibrated: float

    @property
    def error(self) -> float:
        return self.calibrated / self.row.published - 1


@dataclass
class Report:
    """All that the program found."""

    memory: list[MemoryFound] = field(default_factory=list)
    time: list[TimeFound] = field(default_factory=list)
    verdicts: Verdicts = field(default_factory=Verdicts)
    no_memory: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    no_time: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    fits: Fits = field(default_factory=lambda: Fits(Overheads(), Speeds()))


def evaluate(rows: Iterable[Row], *, with_time: bool = True, fits: Fits | None = None) -> Report:
    """Predict every row that can be predicted; never fail on a row.

    ``fits``: the constants, those of `data/` if none are given.
    """
    report = Report()
    measured: list[Measured] = []
    clocked: list[Clocked] = []
    for row in rows:
        _guarded(row, report.no_memory, lambda row=row: measured.extend(measure(row)))
        _guarded(row, report.no_memory, lambda row=row: check_verdicts(row, report.verdicts))
        if with_time and any(row.cell(c) for c in ("tok_s_gpu", "step_s")):
            _guarded(row, report.no_time, lambda row=row: clocked.append(Clocked(timed(row))))
    fits = fits or as_planned(*known(with_time=with_time))
    report.fits = fits
    report.memory = [MemoryFound(m, fits.overheads.total(m)) for m in measured]
    report.time = [TimeFound(c, c.as_tabled("single"), fits.speeds.seconds(c)) for c in clocked]
    return report


def known(*, with_time: bool = True) -> tuple[list[Measured], list[Clocked]]:
    """Return the rows that constants are fitted on: those of `data/`."""
    measured: list[Measured] = []
    clocked: list[Clocked] = []
    for row in read_rows():
        ignored: dict[str, list[str]] = defaultdict(list)
        _guarded(row, ignored, lambda row=row: measured.extend(measure(row)))
        if with_time and any(row.cell(c) for c in ("tok_s_gpu", "step_s")):
            _guarded(row, ignored, lambda row=row: clocked.append(Clocked(timed(row))))
    return measured, clocked


def as_planned(measured: Sequence[Measured], clocked: Sequence[Clocked]) -> Fits:
    """Return the planner's own efficiencies, and what is fitted beside them on some rows."""
    return Fits(fit_overheads(measured), tabled_speeds(clocked))


def fits_of(measured: Sequence[Measured], clocked: Sequence[Clocked]) -> Fits:
    """Fit all constants on some rows."""
    return Fits(fit_overheads(measured), fit_speeds(clocked))


def _guarded(row: Row, reasons: dict[str, list[str]], work: Callable[[], None]) -> None:
    try:
        work()
    except Unmodelled as reason:
        ids = reasons[str(reason)]
        if row.id not in ids:
            ids.append(row.id)
    except (ArithmeticError, ValueError, LookupError, TypeError) as error:
        reasons[f"row not understood: {type(error).__name__}"].append(row.id)


def summary(report: Report) -> dict[str, object]:
    """Return the figures of a report, for tests and JSON."""
    memory = defaultdict(list)
    for each in report.memory:
        memory[f"{each.row.system}, {each.row.kind}"].append(abs(each.error))
    everything = [abs(e.error) for e in report.memory]
    by_gpu: dict[str, list[TimeFound]] = defaultdict(list)
    by_system: dict[str, list[TimeFound]] = defaultdict(list)
    for t in report.time:
        by_gpu[t.row.gpu].append(t)
        by_system[f"{t.row.gpu}: {t.row.system}"].append(t)
    return {
        "memory": {
            "all": _spread(everything),
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
        "median_error": common.quantile(errors, 0.5),
        "p95_error": common.quantile(errors, 0.95),
    }


def _mapes(rows: Sequence[TimeFound]) -> dict[str, float]:
    def mape(name: str) -> float:
        return common.mean([abs(getattr(t, name) / t.row.published - 1) for t in rows])

    return {
        "rows": len(rows),
        "mape_uncalibrated": mape("uncalibrated"),
        "mape_calibrated": mape("calibrated"),
    }


def needed_intervals(report: Report) -> dict[str, dict[str, float]]:
    """Return between which multiples of the prediction 90 % of the published values lie."""
    ratios: dict[str, list[float]] = {"memory": [1 / (1 + m.error) for m in report.memory]}
    for t in report.time:
        for name in ("time", f"time, {t.row.gpu}"):
            ratios.setdefault(name, []).append(1 / (1 + t.error))
    return {
        name: {
            "rows": len(some),
            **{key: common.quantile(some, q) for key, q in _QUANTILES.items()},
        }
        for name, some in ratios.items()
    }


def unseen(fits: Fits, *, with_time: bool) -> dict[str, object]:
    """Score the rows that nothing was fitted to, with the constants of the others."""
    report = evaluate(read_rows(UNSEEN), with_time=with_time, fits=fits)
    found = summary(report)
    keys = "memory", "time_by_gpu", "time_by_system", "verdicts", "not_modelled"
    return {key: found[key] for key in keys} | {
        "published_over_predicted": needed_intervals(report)
    }


def print_unseen(figures: dict[str, Any]) -> None:
    """Print the score of the rows that nothing was fitted to."""
    print("\nRows of pages that nothing was fitted to: memory")
    for name, each in figures["memory"].items():
        print(f"  {each['rows']:4d} {each['median_error']:7.1%} {each['p95_error']:7.1%}  {name}")
    print("Rows of pages that nothing was fitted to: time, mean absolute percentage error")
    for name, each in figures["time_by_gpu"].items():
        print(f"  {each['rows']:4d} {each['mape_calibrated']:7.1%}  {name}")
    print("Rows of pages that nothing was fitted to: verdicts")
    for name, value in figures["verdicts"].items():
        print(f"  {name}: {value}")
    print("Published over predicted: 5th percentile, median, 95th")
    for name, each in figures["published_over_predicted"].items():
        quantiles = " ".join(f"{each[key]:6.2f}" for key in _QUANTILES)
        print(f"  {each['rows']:4d} {quantiles}  {name}")


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
        print(f"  {'rows':>4} {'as is':>7} {'fitted':>7}")
        for name, each in figures[key].items():  # type: ignore[attr-defined]
            print(
                f"  {each['rows']:4d} {each['mape_uncalibrated']:7.1%} "
                f"{each['mape_calibrated']:7.1%}  {name}"
            )
    print("\nDifferential pairs: one knob changes")
    for line in pair_lines(rows, report.fits.overheads):
        print(f"  {line}")
    unknown = {r.id: words for r in rows if (words := flags_of(r).unknown)}
    print(f"\nWords in cells that nothing explains: {len(unknown)} rows")
    for row_id, words in unknown.items():
        print(f"  {row_id}: {', '.join(words)}")
    _print_constants(report.fits)
    print("\nNot modelled")
    for what, reasons in figures["not_modelled"].items():  # type: ignore[attr-defined]
        for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
            shown = " ".join(ids[:12]) + (" ..." if len(ids) > 12 else "")
            print(f"  {what}: {len(ids)} rows, {reason}: {shown}")


def _print_rows(report: Report) -> None:
    for m in report.memory:
        print(
            f"{m.row.id:6} memory  predicted {m.predicted / GIB:8.2f} GiB  published "
            f"{m.row.published / GIB:8.2f} GiB  {m.error:+7.1%}  {m.row.system}"
        )
    for t in report.time:
        print(
            f"{t.row.id:6} time    predicted {t.calibrated:8.3f} s    published "
            f"{t.row.published:8.3f} s    {t.error:+7.1%}  {t.row.system} on {t.row.gpu}"
        )
    for line in report.verdicts.lines:
        print(line)


def _print_constants(fits: Fits) -> None:
    print("\nFitted constants: memory (tensors x (1 + share) + logits x share + constant)")
    for name, over in fits.overheads.found.items():
        shares = f"{over.fraction:.0%}, of logits {over.of_logits:.0%}"
        print(f"  {name}: {shares}, {over.constant / 1e9:.1f} GB")
    print("\nFitted constants: time")
    for gpu, fit in fitted_efficiencies().items():
        for name, each in fit.items():
            print(f"  {gpu} {name} = {each.value:.3g}: {each.meaning}; {each.source}")
    for system, slower in fits.speeds.slowdowns.items():
        print(f"  {system}: takes {slower:.2f} times as long")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; always 0, whatever the rows say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, help="another table in the same form")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--system", default="", help="only systems whose name has this in it")
    parser.add_argument("--verbose", action="store_true", help="one line per row")
    parser.add_argument("--no-time", action="store_true", help="memory alone")
    parser.add_argument("--no-left-out", action="store_true", help="no page is left out")
    chosen = parser.parse_args(arguments)
    table = read_rows(*([chosen.rows] if chosen.rows else []))
    rows = [r for r in table if chosen.system.lower() in r.cell("system").lower()]
    ours = known(with_time=not chosen.no_time)
    report = evaluate(rows, with_time=not chosen.no_time, fits=as_planned(*ours))
    print_report(report, rows, chosen.verbose)
    figures = summary(report)
    if not chosen.no_left_out:
        scored = figures["source_page_left_out"] = left_out(*ours, report.fits, fits_of)
        for line in lines_of(scored, chosen.verbose):
            print(line)
    if not chosen.rows:
        figures["unseen"] = scored = unseen(report.fits, with_time=not chosen.no_time)
        print_unseen(scored)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
