"""Observed runs as one HTML file, which loads no other file and runs no script."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from shardwise import svg
from shardwise.errors import ConfigError
from shardwise.monitor.findings import Diagnosis
from shardwise.monitor.metrics import OverRanks
from shardwise.monitor.pictures import (
    MemoryOfStep,
    curves_svg,
    largest_memory,
    memory_svg,
    name_of_kind,
    time_svg,
    timeline_svg,
)
from shardwise.monitor.record import RunFacts, RunRecord
from shardwise.monitor.summary import (
    FIGURES,
    Save,
    Shown,
    UnitRow,
    figures_of,
    metric_curve,
    not_numbers,
    saves_of,
    unit_rows,
    value_curve,
    where_time_goes,
    write_figure,
)
from shardwise.names import name_of_unit
from shardwise.plan.planned import Planned
from shardwise.quantities import format_bytes, format_count, format_duration

MOST_RUNS, LIMIT_BYTES = 8, 300_000
_MOST_VALUES, _MOST_UNITS, _MOST_SAVES, _MOST_FINDINGS = 9, 60, 12, 25
# For all runs of a page together: of curves, of memory; of timelines, those with a title.
_COLUMNS, _MOMENTS, _BARS, _TITLES = 180, 160, 1200, 300
_COARSER = (1, 2, 4, 8)  # by which these are divided where a page is too large
_RANKS_IN_TIMELINE = 4
_UNITS_AT_PEAK, _MOST_HOSTS = 8, 16


@dataclass(frozen=True)
class ShownRun:
    """A run of a page, with its diagnosis and its plan, each None if not asked for.

    ``plan`` is of the same settings; with ``is_planned_device`` of the same device too, so that
    times can be compared.
    """

    name: str
    record: RunRecord
    diagnosis: Diagnosis | None = None
    plan: Planned | None = None
    is_planned_device: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _LedgerRow:
    name: str
    measured: int
    planned: int | None


@dataclass(frozen=True)
class _Part:
    """The section of the page about one run."""

    run: ShownRun
    facts: RunFacts
    units: Sequence[UnitRow]
    saves: Sequence[Save]
    memory: MemoryOfStep | None
    memory_svg: str
    ledger: Sequence[_LedgerRow]
    at_peak: Sequence[tuple[str, int]]
    timeline_svg: str


def report_html(runs: Sequence[ShownRun]) -> str:
    """Return one or several runs as an HTML document of less than `LIMIT_BYTES`.

    **Raises** ConfigError where there are more than `MOST_RUNS`, or nothing was recorded.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ConfigError(f"expected 1 to {MOST_RUNS} runs side by side, got {len(runs)}")
    for run in runs:
        if not run.record.steps:
            raise ConfigError(
                f"{run.record.path}: nothing is recorded yet: no step is over. Wait for the first"
            )
    for coarser in _COARSER:
        page = _page(runs, coarser * len(runs))
        if len(page.encode()) < LIMIT_BYTES:
            break
    return page


def _page(runs: Sequence[ShownRun], divisor: int) -> str:
    figures = [figures_of(run.record.steps) for run in runs]
    told = [s for s in FIGURES if any(s.is_shown(f.get(s.metric)) for f in figures)]
    return _render(
        "page.html.j2",
        title=", ".join(run.name for run in runs),
        runs=runs,
        parts=[_part(run, divisor) for run in runs],
        figure_rows=[(s, [f.get(s.metric) for f in figures]) for s in told],
        curves=[*_value_pictures(runs, divisor), *_metric_pictures(runs, divisor)],
        time_svg=time_svg([(r.name, where_time_goes(r.record.steps)) for r in runs]),
        most_findings=max(1, _MOST_FINDINGS // divisor),
        picture_style=svg.style(),
        change=_change,
    )


def _change(shown: Shown, first: OverRanks | None, other: OverRanks | None) -> tuple[str, str]:
    """Return a figure's difference to the first run's in per cent, and whether it is better."""
    if first is None or other is None or not first.median:
        return "", ""
    share = 100 * (other.median / first.median - 1)
    if abs(share) < 0.5:
        return "", ""
    is_better = share * shown.is_better
    return f"{share:+,.0f} %", "" if not is_better else "better" if is_better > 0 else "worse"


def _value_pictures(runs: Sequence[ShownRun], divisor: int) -> list[str]:
    names = list(dict.fromkeys(name for r in runs for s in r.record.steps for name in s.values))
    most = _COLUMNS // divisor
    return [
        curves_svg(
            name,
            [
                svg.Curve(
                    f"run-{i}", run.name, value_curve(lines, name, most), not_numbers(lines, name)
                )
                for i, run in enumerate(runs)
                for lines in (run.record.steps,)
            ],
        )
        for name in names[:_MOST_VALUES]
    ]


def _metric_pictures(runs: Sequence[ShownRun], divisor: int) -> list[str]:
    """Draw the figures that have more than one value in some run."""
    most = _COLUMNS // divisor
    pictures = []
    for shown in FIGURES:
        curves = [
            svg.Curve(f"run-{i}", r.name, metric_curve(r.record.steps, shown.metric, most))
            for i, r in enumerate(runs)
        ]
        if any(len({(p.low, p.high) for p in curve.points}) > 1 for curve in curves):
            pictures.append(curves_svg(shown.title, curves, from_zero=True))
    return pictures


def _part(run: ShownRun, divisor: int) -> _Part:
    record = run.record
    memory = largest_memory(record)
    planned, drawn = None, ""
    if memory is not None:
        if run.plan is not None:
            planned = _planned_lines(run.plan, svg.OTHER in memory.kinds)
        drawn = memory_svg(memory, run.name, planned, _MOMENTS // divisor)
    return _Part(
        run,
        record.facts,
        unit_rows(record.facts),
        list(saves_of(record.steps))[-_MOST_SAVES:],
        memory,
        drawn,
        [] if memory is None else _ledger(memory, planned),
        [] if memory is None else _units_at_peak(memory),
        _timeline(run, divisor),
    )


def _planned_lines(plan: Planned, has_other: bool) -> dict[str, int]:
    """Return the peak of a plan by the kinds that were measured.

    Without ``has_other`` only the engine's memory was measured, so it is the peak of that.
    """
    ledger = (plan.played.peak if has_other else plan.played.engines_peak).ledger
    found = {kind: num_bytes for kind, num_bytes in ledger.engines().items() if num_bytes}
    if has_other:
        found[svg.OTHER] = ledger.total - sum(found.values())
    return {kind: found[kind] for kind in sorted(found, key=svg.order_of_kinds)}


def _ledger(memory: MemoryOfStep, planned: Mapping[str, int] | None) -> list[_LedgerRow]:
    measured = memory.moments[memory.peak][2]
    rows = [
        _LedgerRow(
            name_of_kind(kind),
            measured.get(kind, 0),
            None if planned is None else planned.get(kind, 0),
        )
        for kind in sorted({*memory.kinds, *(planned or {})}, key=svg.order_of_kinds)
    ]
    whole = None if planned is None else sum(planned.values())
    return [*rows, _LedgerRow("all of it", memory.peak_bytes, whole)]


def _units_at_peak(memory: MemoryOfStep) -> list[tuple[str, int]]:
    sums = [(name_of_unit(name), sum(kinds.values())) for name, kinds in memory.units.items()]
    return sorted(sums, key=lambda row: -row[1])[:_UNITS_AT_PEAK]


def _timeline(run: ShownRun, divisor: int) -> str:
    """Draw the newest step of which all ranks have timelines, for a few of the ranks."""
    by_step: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, line in run.record.lines("timeline"):
        by_step.setdefault(line["step"], {})[rank] = line
    if not by_step:
        return ""
    most_ranks = max(len(ranks) for ranks in by_step.values())
    step = max(step for step, ranks in by_step.items() if len(ranks) == most_ranks)
    found = by_step[step]
    shown = _ranks_to_show(found, max(1, _RANKS_IN_TIMELINE // divisor))
    timelines = {rank: found[rank] for rank in shown}
    return timeline_svg(timelines, run.name, _BARS // divisor, _TITLES // divisor)


def _ranks_to_show(found: Mapping[int, Mapping[str, Any]], most: int) -> list[int]:
    """Return the first rank and those that wait least and most: a slow rank waits least."""

    def waits(rank: int) -> float:
        return sum(s[4] for s in found[rank]["spans"] if s[1].startswith(("wait_", "exchange")))

    by_waiting = sorted(found, key=waits)
    order = [by_waiting[0], min(found), by_waiting[-1], *by_waiting]
    return sorted(list(dict.fromkeys(order))[:most])


def _by_host(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the first hosts with their number of ranks, and the number of other hosts."""
    counts = Counter(hosts).most_common()
    told = [(host, f"{count} rank{'s' if count != 1 else ''}") for host, count in counts]
    more = len(told) - _MOST_HOSTS
    return [*told[:_MOST_HOSTS], *([("more", f"{more} hosts")] if more > 0 else [])]


def _render(template: str, **values: Any) -> str:
    """Fill a template; texts that are not marked as markup are escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "duration": format_duration,
        "figure": write_figure,
        "by_host": _by_host,
        "drawn": Markup,  # pictures escape their own texts
    }
    source = files(__package__).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(most_units=_MOST_UNITS, **values)
