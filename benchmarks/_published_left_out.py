"""How the planner does on source pages that it has not seen, and which constants earn their place.

For each page all constants are fitted without its rows, then its rows are predicted. Intervals are
made the same way: the spread of errors on the other pages, which were left out in their turn, so
the share of rows inside is told on pages that had no say in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import _common as common
from _published_overhead import Measured, Overheads
from _published_speed import Clocked, Speeds

_TARGET = 0.90
_FEWEST = 8  # errors of a kind from which an interval is made; else those of all kinds


@dataclass(frozen=True)
class Fits:
    """All that is fitted."""

    overheads: Overheads
    speeds: Speeds


@dataclass(frozen=True)
class Error:
    """One row predicted by constants that its page had no part in; ``kind`` groups intervals."""

    id: str
    page: str
    kind: str
    predicted: float
    published: float

    @property
    def value(self) -> float:
        return self.predicted / self.published - 1

    @property
    def log(self) -> float:
        """The logarithm of published over predicted."""
        return math.log(self.published / self.predicted)


def left_out(
    measured: Sequence[Measured],
    clocked: Sequence[Clocked],
    fits: Fits,
    fit: Callable[[Sequence[Measured], Sequence[Clocked]], Fits],
) -> dict[str, Any]:
    """Score each page with constants that were fitted without it.

    **Cost** one fit per page; about a minute with times, seconds without.
    """
    memory: list[Error] = []
    time: list[Error] = []
    for page in dict.fromkeys([*(m.page for m in measured), *(c.page for c in clocked)]):
        others = fit(
            [m for m in measured if m.page != page], [c for c in clocked if c.page != page]
        )
        memory += [_memory(m, others.overheads) for m in measured if m.page == page]
        time += [_time(c, others.speeds) for c in clocked if c.page == page]
    return {
        "memory": {"all": _spread(memory), "coverage": coverage(memory)},
        "memory_by_page": _by_page(memory, [_memory(m, fits.overheads) for m in measured]),
        "time_by_gpu": {
            gpu: {"rows": len(some), "mape": _mean(some)}
            for gpu, some in {"all": time, **_grouped(time, "kind")}.items()
        },
        "time_coverage": coverage(time),
        "time_by_page": _by_page(time, [_time(c, fits.speeds) for c in clocked]),
        "constants_removed": removed(measured, clocked, fits),
        "worst": _worst(memory, time),
    }


def removed(
    measured: Sequence[Measured], clocked: Sequence[Clocked], fits: Fits
) -> dict[str, float]:
    """Return how much the mean absolute error of the rows grows without each fitted constant."""
    found = {}
    for name in fits.overheads.found:
        rows = [m for m in measured if name in (m.kind, f"{m.system}, {m.kind}")]
        fewer = fits.overheads.without(name)
        found[f"memory: {name}"] = _mean([_memory(m, fewer) for m in rows]) - _mean(
            [_memory(m, fits.overheads) for m in rows]
        )
    for name in fits.speeds.names(clocked):
        clocks = [c for c in clocked if name == c.where or name.startswith(f"{c.gpu} ")]
        slower = fits.speeds.without(name)
        found[f"time: {name}"] = _mean([_time(c, slower) for c in clocks]) - _mean(
            [_time(c, fits.speeds) for c in clocks]
        )
    return found


def coverage(errors: Sequence[Error]) -> dict[str, float]:
    """Return the share of rows inside intervals made from other pages, and their median width."""
    inside, widths = 0, []
    for error in errors:
        low, high = interval([e for e in errors if e.page != error.page], error.kind)
        inside += low <= error.log <= high
        widths.append(math.exp(high) - math.exp(low))
    if not errors:
        return {"target": _TARGET, "inside": math.nan, "median_width": math.nan}
    return {
        "target": _TARGET,
        "inside": inside / len(errors),
        "median_width": sorted(widths)[len(widths) // 2],
    }


def interval(errors: Sequence[Error], kind: str) -> tuple[float, float]:
    """Return the logarithms between which published over predicted lies, by errors of a kind.

    Pages weigh alike, as rows of one page err together, and a new page counts as one of them.
    """
    some = [e for e in errors if e.kind == kind]
    if len({e.page for e in some}) < 2 or len(some) < _FEWEST:
        some = list(errors)
    if not some:
        return -math.inf, math.inf
    sizes = {page: len(rows) for page, rows in _grouped(some, "page").items()}
    ordered = sorted((e.log, 1 / sizes[e.page] / len(sizes)) for e in some)
    # A page that was not seen is one more, which may lie beyond all that were.
    outside = max(0.0, (1 - _TARGET) / 2 - 0.5 / len(sizes))
    return _weighted(ordered, outside), _weighted(ordered, 1 - outside)


def _weighted(ordered: Sequence[tuple[float, float]], share: float) -> float:
    below = 0.0
    for value, weight in ordered:
        below += weight
        if below >= share - 1e-12:
            return value
    return ordered[-1][0]


def lines_of(scored: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    """Write a score as lines."""
    yield "\nEach source page left out in its turn: memory"
    spread, share = scored["memory"]["all"], scored["memory"]["coverage"]
    yield (
        f"  {spread['rows']} rows, median {spread['median_error']:.1%}, p95 "
        f"{spread['p95_error']:.1%}; inside the interval {share['inside']:.0%} (aim "
        f"{share['target']:.0%}, median width {share['median_width']:.0%})"
    )
    yield f"  {'rows':>4} {'left out':>9} {'worst':>7} {'with it':>8}"
    yield from _pages(scored["memory_by_page"])
    yield "\nEach source page left out in its turn: time, mean absolute percentage error"
    for gpu, each in scored["time_by_gpu"].items():
        yield f"  {each['rows']:4d} {each['mape']:9.1%}  {gpu}"
    yield f"  inside the interval: {scored['time_coverage']['inside']:.0%}"
    yield from _pages(scored["time_by_page"])
    yield "\nWithout one fitted constant: the mean error of its rows grows by"
    for name, more in sorted(scored["constants_removed"].items(), key=lambda item: -item[1]):
        yield f"  {more:+7.1%}  {name}"
    if verbose:
        yield "\nWorst rows of pages that were left out"
        yield from (f"  {line}" for line in scored["worst"])


def _pages(pages: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for page, each in sorted(pages.items(), key=lambda item: -item[1]["worst"]):
        yield (
            f"  {each['rows']:4d} {each['median_left_out']:9.1%} {each['worst']:7.1%} "
            f"{each['median_with_it']:8.1%}  {page[:100]}"
        )


def _memory(row: Measured, overheads: Overheads) -> Error:
    return Error(row.id, row.page, row.kind, overheads.total(row), row.published)


def _time(row: Clocked, speeds: Speeds) -> Error:
    return Error(row.id, row.page, row.gpu, speeds.seconds(row), row.published)


def _grouped(errors: Sequence[Error], by: str) -> dict[str, list[Error]]:
    found: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        found[getattr(error, by)].append(error)
    return found


def _by_page(without: Sequence[Error], with_it: Sequence[Error]) -> dict[str, dict[str, float]]:
    same = _grouped(with_it, "page")
    return {
        page: {
            "rows": len(some),
            "median_left_out": _quantile(some, 0.5),
            "worst": _quantile(some, 1.0),
            "median_with_it": _quantile(same[page], 0.5),
        }
        for page, some in _grouped(without, "page").items()
    }


def _worst(*found: Sequence[Error]) -> list[str]:
    ordered = [sorted(errors, key=lambda e: -abs(e.value))[:25] for errors in found]
    return [f"{e.id} {e.value:+.1%} {e.kind} {e.page[:80]}" for some in ordered for e in some]


def _spread(errors: Sequence[Error]) -> dict[str, float]:
    return {
        "rows": len(errors),
        "median_error": _quantile(errors, 0.5),
        "p95_error": _quantile(errors, 0.95),
    }


def _quantile(errors: Sequence[Error], share: float) -> float:
    return common.quantile([abs(e.value) for e in errors], share)


def _mean(errors: Sequence[Error]) -> float:
    return common.mean([abs(e.value) for e in errors])
