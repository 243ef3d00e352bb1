"""Constants of time, fitted on published step times: a grid of efficiencies, and what systems add.

Note [How they are fitted]
Coordinate descent over a grid, least mean absolute percentage error, on a few rows of each page, so
that a page of hundreds does not drown the others and a fit takes seconds; what a row takes at a
point is kept, so that fits with a page left out cost little more. A system's slowdown on a GPU
type is the median ratio of published to predicted, where it has at least eight rows; below that,
and for a system that was never seen, it is one. A GPU type with fewer than four rows keeps single
measurements: what the planner's table has was fitted on rows that may be left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from _published_time import Timed, play_row, seconds_of

from shardwise.plan.machine.efficiencies import (
    Efficiency,
    common_efficiencies,
    family_efficiencies,
    fitted_efficiencies,
)

_GRID: Mapping[str, Sequence[float]] = {
    "matmul_sustained": (0.55, 0.60, 0.65, 0.71, 0.75, 0.78, 0.80, 0.82, 0.85, 0.87, 0.90, 0.95),
    "attention": (0.16, 0.19, 0.22, 0.25, 0.28, 0.32, 0.36, 0.42, 0.48, 0.60),
    "host_launch_s": (10e-6, 15e-6, 20e-6, 25e-6, 30e-6, 35e-6),
}
FITTED_NAMES = tuple(_GRID)
Point = tuple[float, ...]  # a value for each name of the grid
_FEWEST_ROWS, _FEWEST_OF_SYSTEM, _MOST_OF_PAGE = 4, 8, 24


def tabled(family: str) -> dict[str, Efficiency]:
    """Return what single measurements say of a family's fitted constants."""
    table = {**common_efficiencies(), **family_efficiencies().get(family, {})}
    return {name: table[name] for name in FITTED_NAMES}


def as_fitted(family: str) -> dict[str, Efficiency]:
    """Return what the planner's users get for a family."""
    return {**tabled(family), **fitted_efficiencies().get(family, {})}


class Clocked:
    """A row's step: published, and predicted at any point of the grid."""

    def __init__(self, row: Timed) -> None:
        cells = row.setup.row
        self.id, self.page = cells.id, cells.cell("source")
        self.system, self.gpu = row.setup.system.name, row.gpu
        self.published, self.num_gpus = row.published_s, row.cluster.num_ranks
        self._row, self._played = row, play_row(row)
        self._known: dict[Point | str, float] = {}

    @property
    def where(self) -> str:
        """The system on its GPU type, by which slowdowns are told."""
        return f"{self.gpu}: {self.system}"

    def at(self, point: Point) -> float:
        """Return the seconds at a point."""
        if point not in self._known:
            self._known[point] = seconds_of(self._played, _overrides(self._row, point))
        return self._known[point]

    def as_tabled(self, name: str) -> float:
        """Return the seconds by the planner's table, "fitted" or with "single" measurements."""
        if name not in self._known:
            table = as_fitted(self.gpu) if name == "fitted" else tabled(self.gpu)
            own = for_system(table, self._row) if name == "fitted" else table
            self._known[name] = seconds_of(self._played, own)
        return self._known[name]


def _overrides(row: Timed, point: Sequence[float]) -> dict[str, Efficiency]:
    fit = {
        name: replace(common_efficiencies()[name], value=value)
        for name, value in zip(FITTED_NAMES, point, strict=True)
    }
    return for_system(fit, row)


def for_system(fit: Mapping[str, Efficiency], row: Timed) -> dict[str, Efficiency]:
    """Return efficiencies with the attention of the system's own kernel on Hopper."""
    system = row.setup.system
    if system.attention is None or row.gpu not in ("H100", "GH200"):
        return dict(fit)
    own = replace(common_efficiencies()["attention"], value=system.attention, source=system.source)
    return {**fit, "attention": own}


@dataclass(frozen=True)
class Speeds:
    """Fitted points by GPU type, and slowdowns by system.

    ``fallback``: what GPU types without a point have, by the planner's table (`Clocked.as_tabled`).
    """

    points: Mapping[str, Point] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    fallback: str = "fitted"

    def seconds(self, row: Clocked) -> float:
        """Return a row's predicted step."""
        slower = self.slowdowns.get(row.where, 1.0)
        if row.gpu in self.points:
            return row.at(self.points[row.gpu]) * slower
        return row.as_tabled(self.fallback) * slower

    def without(self, name: str) -> Speeds:
        """Return the same without one constant: "A100 attention", or a system's slowdown."""
        if name in self.slowdowns:
            return replace(self, slowdowns={k: v for k, v in self.slowdowns.items() if k != name})
        gpu, _, constant = name.partition(" ")
        table = {**as_fitted(gpu), constant: tabled(gpu)[constant]}
        point = self.points.get(gpu) or tuple(as_fitted(gpu)[n].value for n in FITTED_NAMES)
        values = {**dict(zip(FITTED_NAMES, point, strict=True)), constant: table[constant].value}
        return replace(self, points={**self.points, gpu: tuple(values[n] for n in FITTED_NAMES)})

    def names(self, rows: Iterable[Clocked]) -> list[str]:
        """Return the names of all fitted constants that some row has a say in."""
        gpus = dict.fromkeys(row.gpu for row in rows)
        tables = (
            f"{g} {n}"
            for g in gpus
            for n in fitted_efficiencies().get(g, {})
            if g not in self.points
        )
        points = (f"{g} {n}" for g in self.points for n in FITTED_NAMES)
        return [*tables, *points, *self.slowdowns]


def tabled_speeds(rows: Sequence[Clocked]) -> Speeds:
    """Return the planner's own table of efficiencies, with the slowdowns that systems have by it.

    **Cost** about a second for 500 rows.
    """
    return Speeds({}, _slowdowns(rows, lambda row: row.as_tabled("fitted")))


def fit_speeds(rows: Iterable[Clocked]) -> Speeds:
    """Fit all constants of time; see the Note.

    **Cost** milliseconds, once the rows are priced.
    """
    by_gpu: dict[str, list[Clocked]] = defaultdict(list)
    for row in rows:
        by_gpu[row.gpu].append(row)
    slowdowns: dict[str, float] = {}
    points: dict[str, Point] = {}
    for _ in range(2):  # what a system adds depends on the efficiencies, and they on it
        points = {
            gpu: _best(some, slowdowns) for gpu, some in by_gpu.items() if len(some) >= _FEWEST_ROWS
        }
        fitted = [row for gpu in points for row in by_gpu[gpu]]
        slowdowns = _slowdowns(fitted, lambda row, at=points: row.at(at[row.gpu]))
    return Speeds(points, slowdowns, "single")


def _best(rows: Sequence[Clocked], slowdowns: Mapping[str, float]) -> Point:
    some = _some_of_each_page(rows)
    point = tuple(values[len(values) // 2] for values in _GRID.values())

    def loss(each: Point) -> float:
        return sum(abs(r.at(each) * slowdowns.get(r.where, 1.0) / r.published - 1) for r in some)

    while True:
        before = point
        for i, values in enumerate(_GRID.values()):
            tried = [(*point[:i], value, *point[i + 1 :]) for value in values]
            point = min([point, *tried], key=loss)
        if point == before:
            return point


def _some_of_each_page(rows: Sequence[Clocked]) -> list[Clocked]:
    by_page: dict[str, list[Clocked]] = defaultdict(list)
    for row in rows:
        by_page[row.page].append(row)
    found = []
    for page in by_page.values():
        step = -(-len(page) // _MOST_OF_PAGE)
        found += page[::step]
    return found


def _slowdowns(rows: Sequence[Clocked], seconds: Callable[[Clocked], float]) -> dict[str, float]:
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        ratios[row.where].append(row.published / seconds(row))
    found = {s: sorted(r)[len(r) // 2] for s, r in ratios.items() if len(r) >= _FEWEST_OF_SYSTEM}
    return {s: round(r, 2) for s, r in found.items() if abs(r - 1) > 0.03}
