"""Observed runs as one HTML file, which loads no other file and runs no script."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from shardwise import charts, svg
from shardwise.errors import ConfigError
from shardwise.monitor.findings import Diagnosis
from shardwise.monitor.metrics import FIGURES, FigureRow, OverRanks
from shardwise.monitor.record import Restart, RunRecord, Timeline
from shardwise.monitor.summary import (
    figures_of,
    kinds_shown,
    largest_memory,
    metric_curve,
    not_numbers,
    phase_seconds,
    place_of,
    saves_of,
    unit_rows,
    value_curve,
    write_figure,
)
from shardwise.names import name_of_unit
from shardwise.plan.planning import Plan
from shardwise.quantities import ByteUnit, format_bytes, format_count, format_duration

MOST_RUNS, LIMIT_BYTES = 8, 300_000
_MOST_VALUES, _MOST_UNITS, _MOST_SAVES, _MOST_FINDINGS = 9, 60, 12, 25
_MOST_UNITS_IN_MEMORY = 8
# Of curves, memory and timelines, for all runs of a page together.
_COLUMNS, _MOMENTS, _BARS = 180, 160, 800
_COARSER = (1, 2, 4, 8)  # by which these are divided where a page is too large
_RANKS_IN_TIMELINE = 4
_Curves = tuple[str, Sequence[svg.Curve], bool]  # title, curves, whether the axis begins at 0


@dataclass(frozen=True)
class ShownRun:
    """A run of a page, with its diagnosis and its plan, each None if not asked for.

    ``plan`` is of the same settings; with ``is_planned_device`` of the same device too, so that
    times can be compared.
    """

    name: str
    record: RunRecord
    diagnosis: Diagnosis | None = None
    plan: Plan | None = None
    is_planned_device: bool = False
    notes: Sequence[str] = ()


def report_html(runs: Sequence[ShownRun]) -> str:
    """Return one or several runs as an HTML document of less than `LIMIT_BYTES`.

    **Raises** ConfigError for more than `MOST_RUNS` runs, or a run without a step.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ConfigError(f"expected 1 to {MOST_RUNS} runs side by side, got {len(runs)}")
    for run in runs:
        if not run.record.steps:
            raise ConfigError(
                f"{run.record.path}: nothing is recorded yet: no step is over. Wait for the first"
            )
    curves = _curves(runs)
    for coarser in _COARSER:
        page = _page(runs, curves, coarser * len(runs))
        if len(page.encode()) < LIMIT_BYTES:
            break
    return page


def _page(runs: Sequence[ShownRun], curves: Sequence[_Curves], divisor: int) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    figures = [figures_of(run.record.steps) for run in runs]
    shown = [s for s in FIGURES if any(s.is_shown(f.get(s.metric)) for f in figures)]
    times = [charts.Bar(run.name, phase_seconds(run.record.steps)) for run in runs]
    title = "Where a step's time goes, median over the ranks"
    time_svg = charts.bars_chart(title, times, lambda s: f"{s:.3g} s a step")
    pictures = []
    for title, each, from_zero in curves:
        thin = [replace(c, points=svg.thin(c.points, _COLUMNS // divisor)) for c in each]
        pictures.append(charts.lines_chart(title, thin, from_zero))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "duration": format_duration,
        "figure": write_figure,
        "by_rank": lambda hosts: Counter(hosts).most_common(),
        "unit_name": name_of_unit,
        "kind_name": svg.name_of_kind,
        "legend": lambda kinds: {svg.name_of_kind(kind): svg.colour_of(kind) for kind in kinds},
        "drawn": Markup,  # pictures escape their own texts, the template all others
    }
    source = files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=", ".join(run.name for run in runs),
        runs=runs,
        parts=[_part(run, divisor) for run in runs],
        figure_rows=[(s, [f.get(s.metric) for f in figures]) for s in shown],
        curves=pictures,
        time_svg=time_svg if any(row.parts for row in times) else "",
        time_kinds=[kind for row in times for kind, seconds in row.parts.items() if seconds],
        most_units=_MOST_UNITS,
        most_findings=max(1, _MOST_FINDINGS // divisor),
        picture_style=svg.style(),
        change=_change,
    )


def _change(shown: FigureRow, first: OverRanks | None, other: OverRanks | None) -> tuple[str, str]:
    """Return a figure's difference to the first run's in per cent, and whether it is better."""
    if first is None or other is None or not first.median:
        return "", ""
    share = 100 * (other.median / first.median - 1)
    if abs(share) < 0.5:
        return "", ""
    is_better = share * shown.is_better
    return f"{share:+,.0f} %", "" if not is_better else "better" if is_better > 0 else "worse"


def _curves(runs: Sequence[ShownRun]) -> list[_Curves]:
    """Return the logged values, and the figures that have more than one value in some run."""
    most, found = _COLUMNS // len(runs), list[_Curves]()
    names = dict.fromkeys(name for r in runs for s in r.record.steps for name in s.values)
    looks = [(f"run-{i}", run.name, run.record.steps) for i, run in enumerate(runs)]
    held = list[svg.Curve]()  # of one run, these losses are in the picture of the others
    if len(runs) == 1 and {"loss", "eval_loss"} <= names.keys():
        del names["eval_loss"]
        points = value_curve(runs[0].record.steps, "eval_loss", most)
        held = [svg.Curve("held", "held out", points)]
    for name in list(names)[:_MOST_VALUES]:
        curves = [
            svg.Curve(look, of, value_curve(steps, name, most), not_numbers(steps, name))
            for look, of, steps in looks
        ] + held * (name == "loss")
        found.append((name, curves, False))
    for shown in FIGURES:
        curves = [
            svg.Curve(look, of, metric_curve(steps, shown.metric, most))
            for look, of, steps in looks
        ]
        if any(len({(p.low, p.high) for p in curve.points}) > 1 for curve in curves):
            found.append((shown.title, curves, True))
    return found


def _part(run: ShownRun, divisor: int) -> Mapping[str, object]:
    """Return the values of the section about one run."""
    record, (timeline_svg, timeline_kinds) = run.record, _timeline(run, divisor)
    return {
        "run": run,
        "facts": record.facts,
        "units": unit_rows(record.facts),
        "unit": ByteUnit(max(unit.full_bytes for unit in record.facts.units)),
        "saves": list(saves_of(record.steps))[-_MOST_SAVES:],
        "restarts": [line for _, line in record.lines(Restart)][-_MOST_SAVES:],
        "memory": _memory(run, divisor),
        "timeline_svg": timeline_svg,
        "timeline_kinds": timeline_kinds,
    }


def _memory(run: ShownRun, divisor: int) -> Mapping[str, object] | None:
    """Return the values of the memory of the largest rank; None if none is recorded."""
    facts, found = run.record.facts, largest_memory(run.record)
    if found is None:
        return None
    (rank, line), is_cpu = found, facts.device == "cpu"
    moments = [
        charts.Bar(svg.name_of_kind(m.phase.removesuffix("_end")), kinds_shown(m, facts))
        for m in line.moments
    ]
    planned = dict[str, int]()
    if run.plan is not None:  # on the CPU, of the engine alone, as it was measured
        played = run.plan.played
        ledger = (played.engine_peak if is_cpu else played.peak).ledger
        planned = {
            kind: num_bytes for kind, num_bytes in ledger.engine_lines().items() if num_bytes
        }
        if not is_cpu:
            planned[svg.OTHER] = ledger.total - sum(planned.values())
    peak, measured = line.moments[line.peak], moments[line.peak].parts
    whole = format_bytes(sum(measured.values()))
    units = ((name, sum(kinds.values())) for name, kinds in line.units["device"].items())
    return {
        "rank": rank,
        "step": line.step,
        "peak": peak,
        "measured": measured,
        "planned": planned,
        "unit": ByteUnit(sum(measured.values())),
        "kinds": sorted({k for m in moments for k in m.parts} | {*planned}, key=svg.order_of_kinds),
        "process_bytes": max(sum(m.device.values()) + m.other for m in line.moments) * is_cpu,
        "units": sorted(units, key=lambda unit: -unit[1])[:_MOST_UNITS_IN_MEMORY],
        "svg": charts.areas_chart(
            f"{run.name}: memory of step {line.step:,} on rank {rank}",
            moments,
            _MOMENTS // divisor,
            described=f"The peak is in {peak.phase} of {name_of_unit(peak.unit)}, {whole}.",
            beside=charts.Bar("plan", planned) if planned else None,
        ),
    }


def _timeline(run: ShownRun, divisor: int) -> tuple[str, Sequence[str]]:
    """Draw the newest step of which all ranks have timelines, for a few ranks; add its kinds."""
    by_step: dict[int, dict[int, Timeline]] = {}
    for rank, line in run.record.lines(Timeline):
        by_step.setdefault(line.step, {})[rank] = line
    if not by_step:
        return "", ()
    step = max(by_step, key=lambda step: (len(by_step[step]), step))
    found = by_step[step]
    # The first rank and those that wait least and most: a slow rank waits least.
    waits = {
        rank: sum(s[4] for s in line.spans if s[1].startswith(("wait_", "exchange")))
        for rank, line in found.items()
    }
    by_waiting = sorted(found, key=waits.__getitem__)
    order = dict.fromkeys([by_waiting[0], min(found), by_waiting[-1], *by_waiting])
    shown = sorted(list(order)[: max(1, _RANKS_IN_TIMELINE // divisor)])
    groups = []
    for rank in shown:
        rows: dict[str, list[charts.Span]] = {}
        for row, phase, unit, begin_ms, length_ms, *_ in found[rank].spans:
            rows.setdefault(row, []).append(charts.Span(phase, begin_ms, length_ms, unit))
        groups.append((f"rank {rank}", {row: rows[row] for row in sorted(rows, key=place_of)}))
    seconds = max(found[rank].seconds for rank in shown)
    title, duration = f"{run.name}: timeline of step {step:,}, ms", f"{seconds:.3g} s."
    drawn = charts.timeline_chart(
        title, groups, 1e3 * seconds, described=duration, most=_BARS // divisor
    )
    return drawn, [span.kind for _, rows in groups for row in rows.values() for span in row]
