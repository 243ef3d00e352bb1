"""Search the best ways to run a model: candidates in the order of their bounds, best first.

Note [How the search prunes]
Candidates are taken by the way in which their layers are computed and by the micro-batch; they
differ in where state rests and when it is sent. What rests between steps does not depend on the
batch, so where parameters and optimizer state do not fit, on the device or on its node, nothing is
played; and memory grows with the micro-batch, so the first one that does not fit ends its family.
But where the tokens of a step are given, a larger micro-batch means fewer of them: no gradients
need to be summed over a window of one, and a pipeline has fewer in flight; those are still played.

If the model has formulas, they give lower bounds of a way's time and memory at little cost: the
time of its operations alone, and its state beside its activations. Ways are taken in the order of
that time. A way that does not fit by its bounds, or is beaten by them already, is rejected; the
others are played, priced and simulated in full. So there is no second model of time, and the best
plans are those that playing everything would find.

Note [A wide space]
With ``narrows`` three things are given up. How units are cut, gathered ahead and reduced is varied
for the best plans alone, and gathering nothing ahead is tried where nothing fits otherwise; a plan
that fits only so, and is faster than those that fit anyway, is not found. What fits on the
device is not tried away from it. And the front has no plans that can at best be half as fast as the
fastest, nor those that save less than a tenth of the memory of a plan as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate, Kernels, LossKind, planned_offload
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Pricer, Prices
from shardwise.plan.margins import memory_interval, node_room
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import Memory, Plan, num_groups, plan, plan_memory
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.play import resting_state
from shardwise.plan.step.program import Compute, Ledger, Rest
from shardwise.quantities import format_bytes
from shardwise.stages import STAGES, LayoutName, ReduceEvery

if TYPE_CHECKING:
    from shardwise.plan.planning import Model

_TRIED = {  # settings of a candidate, and the field of the space that has their values
    "stage": "stages",
    "layout": "layouts",
    "units": "units",
    "bucket_bytes": "bucket_bytes",
    "reduce_every": "reduce_every",
}
_TURNED = {name: _TRIED[name] for name in ("layout", "units", "bucket_bytes", "reduce_every")}
_KNOBS = (*_TURNED.values(), "prefetch_units")
_NUM_TURNED = 4  # plans whose knobs are turned in a wide space
_POWERS_OF_TWO = [1 << i for i in range(17)]
_DIVISORS = sorted(_POWERS_OF_TWO + [3 << i for i in range(15)])  # of the windows of a step
# In a wide space: of the fastest plan's speed, and how much smaller a plan has to be at least.
_SLOWEST, _NEAR = 0.5, 1.1

# A candidate without a micro-batch, and the units gathered ahead (None: as the candidate says).
Family = tuple[Candidate, int | None]
# Families that compute their layers alike on as many ranks, so that a micro-batch costs them the
# same: one way to run the model.
Way = tuple[Family, ...]


@dataclass(frozen=True)
class Space:
    """The values to try of each varied setting; everything else is as in ``base``.

    ``micro_batches`` empty: powers of two from 1 for as long as they fit. ``fills_pipelines``: with
    as many micro-batches as stages, as a run. ``may_move_inputs`` to the host: where needed to fit.
    """

    base: Candidate
    stages: Sequence[int] = (0, 1, 2, 3)
    layouts: Sequence[LayoutName] = ("rows",)
    units: Sequence[tuple[str, ...] | None] = (None,)
    num_shards: Sequence[int] = ()
    prefetch_units: Sequence[int | None] = (1, 0, 2)  # None: as in base
    bucket_bytes: Sequence[int] = (1 << 20,)
    reduce_every: Sequence[ReduceEvery | None] = (None,)
    activation_checkpointing: Sequence[str] = ("none", "full")
    micro_batches: Sequence[int] = ()
    offloads: Sequence[Offload] = (Offload(),)
    degrees: Sequence[tuple[int, int, int]] = ((1, 1, 1),)  # tensor, pipeline, context
    expert_degrees: Sequence[int | None] = (None,)  # None: as in base
    kernels: Sequence[tuple[Kernels, LossKind] | None] = (None,)  # with the loss; None: as in base
    narrows: bool = False
    fills_pipelines: bool = False
    may_move_inputs: bool = False


@dataclass(frozen=True)
class Limits:
    """The limits of a plan; None is no limit.

    ``tokens_per_step`` is met by accumulation and may not be missed by more than one per cent.
    """

    max_memory_bytes: int | None = None
    tokens_per_step: int | None = None
    target_tokens_per_s: float | None = None


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, with the reason in words."""

    candidate: Candidate
    reason: str
    was_played: bool


@dataclass(frozen=True)
class SearchResult:
    """The fastest plan that keeps the limits, the Pareto set, and what lost.

    The Pareto set holds the plans that no other one beats in both tokens/s and memory, fastest
    first; ``winner`` is the first of them. ``num_candidates`` counts those looked at, and
    ``num_played`` those that were simulated.
    """

    winner: Plan | None
    pareto: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    num_played: int
    num_candidates: int
    notes: tuple[str, ...] = ()


def search(
    model: Model,
    cluster: Cluster,
    space: Space,
    limits: Limits | None = None,
    prices_of: Callable[[Candidate], Pricer] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Play every candidate of the space; return the fastest that keeps the limits, and the rest.

    ``progress`` is called with (candidates done, candidates in all).

    **Cost** see Note [How the search prunes]; about 20 ms per candidate of a 32-layer model.

    **Raises** ConfigError when the space is empty or a limit is not positive.
    """
    limits = limits or Limits()
    for each in fields(limits):
        value = getattr(limits, each.name)
        if value is not None and not value > 0:
            raise ConfigError(f"{each.name}={value}: expected more than 0")
    for each in fields(space):
        if getattr(space, each.name) == () and each.name not in ("num_shards", "micro_batches"):
            raise ConfigError(f"search: {each.name} is empty; give at least one value to try")
    wide = replace(space, **{k: getattr(space, k)[:1] for k in _KNOBS}) if space.narrows else space
    ways = list(_ways_of(wide, cluster))
    if not ways:
        raise ConfigError(
            f"search: no way to place {cluster.num_ranks} ranks; num_shards="
            f"{list(space.num_shards)} and degrees={list(space.degrees)} leave none (their "
            "products must divide the ranks)"
        )
    run = _Search(model, cluster, space, limits, prices_of)
    run.play(ways, progress)
    if space.narrows:
        best = run.front.result()[0][:_NUM_TURNED]
        if not best and 0 in space.prefetch_units:
            run.play(list(_ways_of(replace(wide, prefetch_units=(0,)), cluster)), progress)
            best = run.front.result()[0][:_NUM_TURNED]
        for made in best:
            run.play([tuple(_turned(space, made.candidate))], None)
    pareto, beaten = run.front.result()
    lost = (*run.rejected, *beaten)
    return SearchResult(next(iter(pareto), None), tuple(pareto), lost, run.num_played, run.num_met)


# -- the ways of a space
def _ways_of(space: Space, cluster: Cluster) -> Iterator[Way]:
    """Yield the ways of a space, each with its families, those first that are on the device.

    One stands for those that are alike: parameters that stay in full are not moved, and without
    gathers there is nothing to gather ahead.
    """
    offloads = [*map(planned_offload, space.offloads)]
    offloads.sort(key=lambda offload: (offload.moves_state, offload.params != "device"))
    computed = product(
        space.degrees, space.expert_degrees, space.activation_checkpointing, space.kernels
    )
    for degrees, ep, checkpointing, kernels in computed:
        ranks, rest = divmod(cluster.num_ranks, prod(degrees))
        if rest:
            continue
        base = replace(
            space.base,
            tp=degrees[0],
            pp=degrees[1],
            cp=degrees[2],
            ep=space.base.ep if ep is None else ep,
            activation_checkpointing=checkpointing,
        )
        if kernels is not None:
            base = replace(base, kernels=kernels[0], loss=kernels[1])
        per_node = cluster.node.num_accelerators
        splits = [ranks] if ranks <= per_node or ranks % per_node else [ranks, per_node]
        families = list[Family]()
        for num_shards in space.num_shards or splits:
            if not ranks % num_shards:
                placed = replace(base, num_shards=num_shards, num_replicas=ranks // num_shards)
                families += _families(space, placed, offloads)
        if families:
            yield tuple(families)


def _families(space: Space, base: Candidate, offloads: Sequence[Offload]) -> Iterator[Family]:
    """Yield the families of one way over so many shards and replicas."""
    tried = product(offloads, *(getattr(space, name) for name in _TRIED.values()))
    for (offload, *values), ahead in product(tried, space.prefetch_units):
        settings: dict[str, Any] = dict(zip(_TRIED, values, strict=True))
        try:
            candidate = replace(base, offload=offload, **settings)
        except ConfigError:
            if base.gather is None:
                raise
            continue  # gathers cannot be encoded there
        stage = STAGES[candidate.stage]
        is_same = not stage.frees_after_backward and offload.params == "cpu"
        if is_same and replace(offload, params="device") in offloads:
            continue  # full parameters stay on the device
        is_cut = candidate.num_shards * candidate.cp > 1
        is_cut |= candidate.ep > 1 and candidate.expert_shards > 1
        gathers = is_cut and stage.shards_state
        if gathers or ahead == space.prefetch_units[0]:
            yield candidate, ahead


def _turned(space: Space, best: Candidate) -> Iterator[Family]:
    """Yield a candidate with its knobs turned; the one that has been played is left out."""
    turns = product(*(getattr(space, name) for name in _KNOBS))
    for number, (*values, ahead) in enumerate(turns):
        settings: dict[str, Any] = dict(zip(_TURNED, values, strict=True))
        if number and (best.gather is None or settings["layout"] != "matrices"):
            yield replace(best, **settings), ahead


def _accumulation_of(
    candidate: Candidate, seq: int, space: Space, tokens_per_step: int | None
) -> int | str:
    """Return the micro-batches per step that make the tokens within one per cent, or why not."""
    least = candidate.pp if space.fills_pipelines else 1
    count = max(candidate.accumulation, least)
    if tokens_per_step is not None:
        per_micro_batch = candidate.micro_batch * seq * candidate.data_parallel
        count = round(tokens_per_step / per_micro_batch)
        missed = abs(count * per_micro_batch - tokens_per_step)
        if not count or missed * 100 > tokens_per_step:
            return (
                f"one micro-batch of all ranks is {per_micro_batch:,} tokens, which does not make "
                f"{tokens_per_step:,} a step"
            )
        if count < least:
            return (
                f"a run of {least} pipeline stages takes {least} micro-batches or more, and "
                f"{tokens_per_step:,} tokens a step make {count}"
            )
    return count


# -- the best plans so far
class _Figures(NamedTuple):
    """The figures of a plan that another one beats; its program would take megabytes."""

    candidate: Candidate
    tokens_per_s: float
    high_bytes: int
    exposed_s: float

    def why(self, best: Sequence[Plan]) -> str:
        """Name the fastest plan that needs no more, and where the time goes."""
        by = next(p for p in best if p.memory.high_bytes <= self.high_bytes)
        slower = 1 - self.tokens_per_s / by.tokens_per_s
        larger = self.high_bytes - by.memory.high_bytes
        if slower < 0.005:
            less = f"needs {format_bytes(larger)} less" if larger else "is alike"
            return f"as fast as {by.candidate.label}, which {less}"
        bigger = f" and {format_bytes(larger)} larger" if larger else ""
        waits = self.exposed_s - by.exposed_s
        cause = f"waits {waits:.3g} s longer for collectives" if waits > 0 else "computes longer"
        return f"{slower:.0%} slower than {by.candidate.label}{bigger}: {cause}"


class _Front:
    """The plans so far that none beats in both speed and memory, and figures of the others.

    If two are equal in both, the first one stays.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] = []
        self._beaten: list[_Figures] = []

    def add(self, made: Plan) -> None:
        """Take a plan in, unless one that is there beats it."""
        speed, high = made.tokens_per_s, made.memory.high_bytes
        lost, kept = [made], self._plans
        if self.beats(speed, high) is None:
            ids = {id(p) for p in kept if speed >= p.tokens_per_s and high <= p.memory.high_bytes}
            lost = [p for p in kept if id(p) in ids]
            self._plans = [*(p for p in kept if id(p) not in ids), made]
        self._beaten += [
            _Figures(p.candidate, p.tokens_per_s, p.memory.high_bytes, p.exposed_s) for p in lost
        ]

    def beats(self, tokens_per_s: float, high_bytes: int) -> Plan | None:
        """Return a plan that is at least as fast as this and no larger, or None.

        With bounds of a plan: it beats that one too.
        """
        for made in self._plans:
            if made.tokens_per_s >= tokens_per_s and made.memory.high_bytes <= high_bytes:
                return made
        return None

    @property
    def fastest(self) -> Plan | None:
        """The fastest plan so far."""
        return max(self._plans, key=lambda made: made.tokens_per_s, default=None)

    def result(self) -> tuple[list[Plan], list[Rejected]]:
        """Return the plans of the front, fastest first, and why the others lost."""
        best = sorted(self._plans, key=lambda made: -made.tokens_per_s)
        return best, [Rejected(b.candidate, b.why(best), was_played=True) for b in self._beaten]


# -- the search
class _Entry(NamedTuple):
    """A way with a micro-batch, and the bounds of its speed and memory.

    ``has_more``: a larger batch takes more memory. ``least_bytes`` are alive beside the state.
    """

    way: Way
    micro_batch: int
    accumulation: int
    has_more: bool
    tokens_per_s: float
    least_bytes: int

    def candidate(self, base: Candidate) -> Candidate:
        return replace(base, micro_batch=self.micro_batch, accumulation=self.accumulation)


class _Search:
    """One search: ``front`` has the best plans so far, ``rejected`` what lost to no plan.

    In a space that ``narrows``, one candidate stands for all that are rejected by their bounds for
    one reason; ``num_met`` counts all.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        space: Space,
        limits: Limits,
        prices_of: Callable[[Candidate], Pricer] | None,
    ) -> None:
        self.front, self.rejected = _Front(), list[Rejected]()
        self.num_played = self.num_met = 0
        self._model, self._cluster, self._space, self._limits = model, cluster, space, limits
        self._prices_of = prices_of or (lambda candidate: Prices(cluster, candidate))
        capacity = cluster.node.accelerator.memory_bytes
        self._capacity = min(capacity, limits.max_memory_bytes or capacity)
        self._over = (
            f"needs more than the {format_bytes(self._capacity)} of a rank, by its formulas"
        )
        self._rests: dict[Candidate, tuple[Rest, int]] = {}
        self._too_large: dict[Family, int] = {}  # the smallest micro-batch that is
        self._fitting: set[Candidate] = set()
        self._said: set[str] = set()

    def play(self, ways: Sequence[Way], progress: Callable[[int, int], None] | None) -> None:
        """Play what may be worth it; ``progress`` is called with (done, all)."""
        refused: list[ConfigError] = []
        entries = [entry for way in ways for entry in self._entries(way, refused)]
        if len(refused) == len(ways):
            raise refused[0]
        entries.sort(key=lambda entry: -entry.tokens_per_s)
        for number, entry in enumerate(entries, 1):
            self._try(entry)
            if progress is not None:
                progress(number, len(entries))

    def _entries(self, way: Way, refused: list[ConfigError]) -> Iterator[_Entry]:
        """Yield a way's micro-batches that may fit, smallest first.

        Degrees that the model cannot have are added to ``refused``, and there is no entry.
        """
        base, tokens = way[0][0], self._limits.tokens_per_step
        asked = sorted(self._space.micro_batches)
        for micro_batch in asked or (_DIVISORS if tokens else _POWERS_OF_TWO):
            candidate = replace(base, micro_batch=micro_batch)
            try:
                self._model.check_degrees(candidate)
            except ConfigError as error:
                refused.append(error)
                self._reject(replace(candidate, accumulation=1), str(error))
                return
            count = _accumulation_of(candidate, self._model.seq, self._space, tokens)
            if isinstance(count, str):
                if not asked and micro_batch % 3 == 0:
                    continue  # tried beside powers of two, where they divide
                self._reject_all(_Entry(way, micro_batch, 1, False, 0.0, 0), count)
                beyond = micro_batch * self._model.seq * base.data_parallel
                if tokens is not None and beyond > tokens and not asked:
                    return
                continue
            has_more = tokens is None or count > base.pp
            bounds = self._bounds(replace(candidate, accumulation=count))
            yield _Entry(way, micro_batch, count, has_more, *bounds)
            if bounds[1] > self._capacity and tokens is None and not asked:
                return

    def _bounds(self, candidate: Candidate) -> tuple[float, int]:
        """Return the most tokens/s, and the least bytes beside state, where formulas tell."""
        model, prices = self._model, self._prices_of(candidate)
        if not isinstance(model, ShapedModel) or not isinstance(prices, Prices):
            return float("inf"), 0
        costs, alive, inputs = model.least(candidate)
        seconds = prices.device_seconds(Compute(costs))
        passes = candidate.accumulation + candidate.pp - 1
        windows = candidate.micro_batch * candidate.accumulation * candidate.data_parallel
        moves_inputs = self._space.may_move_inputs or candidate.offload.activations != "device"
        whole = moves_inputs and candidate.activation_checkpointing == "full"
        return windows * model.seq / (passes * seconds), alive - (inputs if whole else 0)

    def _try(self, entry: _Entry) -> None:
        """Reject a way, or go through its families."""
        reason = self._beaten(entry.tokens_per_s, entry.least_bytes)
        if self._space.narrows and entry.least_bytes > self._capacity:
            reason = self._over
        if reason is not None:
            self._reject_all(entry, reason)
            return
        for family in entry.way:
            candidate = self._prefetching(entry.candidate(family[0]), family[1])
            reason = self._hopeless(entry, family, candidate)
            if reason is not None:
                self._reject(candidate, reason)
            else:
                self._play(candidate, family)

    def _hopeless(self, entry: _Entry, family: Family, candidate: Candidate) -> str | None:
        """Say why a candidate need not be played, or return None."""
        smallest = self._too_large.get(family, candidate.micro_batch)
        if candidate.micro_batch > smallest and entry.has_more:
            return "a smaller micro-batch is too large already"
        if self._space.narrows and replace(candidate, offload=Offload()) in self._fitting:
            return "all of it fits on the device, where nothing has to be moved"
        rest, _ = self._rest(candidate)
        state = rest.resting.total
        if state > self._capacity:
            return (
                f"parameters and optimizer state alone are {format_bytes(state)} of "
                f"{format_bytes(self._capacity)} a rank"
            )
        if candidate.pp == 1:  # else it is the rest of the first stage alone
            away = {0: (rest.host.total, rest.files.total)}
            missing = node_room(self._cluster, candidate, away).missing
            if missing is not None:
                return missing
        least = Ledger(activations=state + entry.least_bytes)
        is_real = self._cluster.node.accelerator.asynchronous
        high = memory_interval(least, num_groups(candidate), is_real).high_bytes
        if high > self._capacity:
            self._too_large[family] = min(smallest, candidate.micro_batch)
            return self._over
        return self._beaten(entry.tokens_per_s, high)

    def _beaten(self, tokens_per_s: float, least_bytes: int) -> str | None:
        """Say which plan is better than one with such bounds can be, or return None."""
        fastest = self.front.fastest
        if fastest is None:
            return None
        narrows = self._space.narrows and tokens_per_s <= fastest.tokens_per_s
        if narrows and tokens_per_s < _SLOWEST * fastest.tokens_per_s:
            return f"can at best be half as fast as {fastest.candidate.label}"
        by = self.front.beats(tokens_per_s, round(least_bytes * (_NEAR if narrows else 1)))
        return (
            f"can be no faster and hardly smaller than {by.candidate.label}"
            if by is not None
            else None
        )

    def _prefetching(self, candidate: Candidate, ahead: int | None) -> Candidate:
        """Return a candidate that gathers so many of the largest units ahead; None: as it is."""
        if ahead is None:
            return candidate
        largest = self._rest(candidate)[1]
        return replace(candidate, prefetch_bytes=None if ahead == 1 else ahead * largest)

    def _rest(self, candidate: Candidate) -> tuple[Rest, int]:
        """Return what rests between steps, and the bytes of the largest unit in full.

        Neither depends on the batch, or on how layers are computed.
        """
        plain = candidate.at_rest
        if candidate.offload.activations != "device":
            plain = replace(plain, activation_checkpointing="full")
        if plain not in self._rests:
            tape = self._model.tape(plain if isinstance(self._model, ShapedModel) else candidate)
            rest = resting_state(tape, plain.with_context_shards)
            largest = max((unit.numel for unit in tape.units[1:]), default=0)
            self._rests[plain] = rest, largest * DTYPE_BYTES[tape.compute_dtype]
        return self._rests[plain]

    def _play(self, candidate: Candidate, family: Family) -> None:
        tape = self._model.tape(candidate)
        ways, is_whole = [candidate], candidate.activation_checkpointing == "full"
        if self._space.may_move_inputs and is_whole and candidate.offload.activations == "device":
            ways.append(replace(candidate, offload=replace(candidate.offload, activations="cpu")))
        for each in ways:
            memory = plan_memory(self._model, self._cluster, each, tape)
            self.num_played += 1
            self.num_met += 1
            reason = memory.room.missing
            if memory.device.high_bytes > self._capacity:
                reason = self._why_too_large(memory)
            if reason is not None:
                self.rejected.append(Rejected(each, reason, was_played=True))
                continue
            self._fitting.add(candidate)
            prices = self._prices_of(each)
            made = plan(self._model, self._cluster, each, prices=prices, memory=memory)
            target = self._limits.target_tokens_per_s or 0
            if made.tokens_per_s >= target:
                self.front.add(made)
            else:
                reason = f"{made.tokens_per_s:,.0f} tokens/s of {target:,.0f} asked for"
                self.rejected.append(Rejected(each, reason, was_played=True))
            return
        smallest = self._too_large.get(family, candidate.micro_batch)
        self._too_large[family] = min(smallest, candidate.micro_batch)

    def _why_too_large(self, memory: Memory) -> str:
        """Name the moment at which memory is missing, how much, and the largest lines there."""
        peak = memory.played[memory.stage].peak
        lines = sorted(peak.ledger.lines().items(), key=lambda line: -line[1])[:2]
        largest = " and ".join(f"{name} {format_bytes(num)}" for name, num in lines)
        needed, capacity = format_bytes(memory.device.high_bytes), format_bytes(self._capacity)
        unit = memory.tapes[memory.stage].units[peak.unit].name or "(root)"
        return f"needs up to {needed} of {capacity}, in {peak.phase} of {unit}: {largest}"

    def _reject_all(self, entry: _Entry, reason: str) -> None:
        """Reject all families of a way, with the batch of the entry."""
        shown = entry.way[:1] if self._space.narrows else entry.way
        self.num_met += len(entry.way) - len(shown)
        for base, ahead in shown:
            self._reject(self._prefetching(entry.candidate(base), ahead), reason)

    def _reject(self, candidate: Candidate, reason: str) -> None:
        self.num_met += 1
        if not self._space.narrows or reason not in self._said:
            self._said.add(reason)
            self.rejected.append(Rejected(candidate, reason, was_played=False))
