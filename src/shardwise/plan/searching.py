"""Search the best ways to run a model: candidates in the order of their bounds, best first.

Note [How the search prunes]
Candidates are taken by the way in which their layers are computed and by the micro-batch; they
differ in where state rests and when it is sent. What rests between steps does not depend on the
batch, so where parameters and optimizer state do not fit, on the device or on its node, nothing is
played; and memory grows with the micro-batch, so the first one that does not fit ends its family.
But where the tokens of a step are given, a larger micro-batch means fewer of them: no gradients
need to be summed over a window of one, and a pipeline has fewer in flight; those are still played.

Where the model has formulas they tell, for little, the least time and memory that a way can have:
what its own operations take, and its state beside its activations. Ways are taken in the order of
that time. One that does not fit by it, or is beaten by it already, is rejected; what is left is
played, priced and simulated in full. So there is no second model of time, and the best plans are
those that playing everything would find.

Note [A wide space]
With ``narrows`` three things are given up. How units are cut, gathered ahead and reduced is varied
for the best plans alone, and gathering nothing ahead is tried where nothing fits otherwise; a plan
that fits only so, and is faster than those that fit anyway, is not found. What fits on the
device is not tried away from it. And the front has no plans that can at best be half as fast as the
fastest, nor those that save less than a tenth of the memory of a plan as fast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate, no_window
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Pricer, Prices
from shardwise.plan.margins import memory_interval, node_room
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.tape import full_bytes
from shardwise.plan.planning import Memory, Model, Plan, num_groups, plan, plan_memory
from shardwise.plan.space import (
    KNOBS,
    Limits,
    Space,
    Way,
    check_some_fit,
    check_space,
    turned,
    ways_of,
)
from shardwise.plan.step.ledger import Ledger, Rest
from shardwise.plan.step.play import resting_state
from shardwise.plan.step.program import Compute
from shardwise.quantities import format_bytes


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, with the reason in words."""

    candidate: Candidate
    reason: str
    was_played: bool


@dataclass(frozen=True)
class _Beaten:
    """What is kept of a plan that another one beats; its program would take megabytes."""

    candidate: Candidate
    tokens_per_s: float
    high_bytes: int
    exposed_s: float

    def why(self, best: Sequence[Plan]) -> str:
        """Name the fastest plan that needs no more, and where the time goes."""
        by = next(p for p in best if p.memory.high_bytes <= self.high_bytes)
        slower = 1 - self.tokens_per_s / by.tokens_per_s
        larger = self.high_bytes - by.memory.high_bytes
        memory = format_bytes(larger)
        if slower < 0.005:
            less = f"needs {memory} less" if larger else "is alike"
            return f"as fast as {by.label}, which {less}"
        bigger = f" and {memory} larger" if larger else ""
        waits = self.exposed_s - by.exposed_s
        cause = f"waits {waits:.3g} s longer for collectives" if waits > 0 else "computes longer"
        return f"{slower:.0%} slower than {by.label}{bigger}: {cause}"


class Front:
    """The plans so far that none beats in both speed and memory, and what is left of the others.

    Of two that are alike in both, the first one stays.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] = []
        self._beaten: list[_Beaten] = []

    def add(self, made: Plan) -> None:
        """Take a plan in, unless one that is there beats it."""
        if any(_beats(other, made) for other in self._plans):
            self._beaten.append(_rest_of(made))
            return
        self._beaten += [_rest_of(other) for other in self._plans if _beats(made, other)]
        self._plans = [other for other in self._plans if not _beats(made, other)] + [made]

    def beats(self, tokens_per_s: float, high_bytes: int) -> Plan | None:
        """Return a plan that is at least as fast as this, and no larger; None where there is none.

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


def _beats(one: Plan, other: Plan) -> bool:
    return (
        one.tokens_per_s >= other.tokens_per_s and one.memory.high_bytes <= other.memory.high_bytes
    )


def _rest_of(made: Plan) -> _Beaten:
    return _Beaten(made.candidate, made.tokens_per_s, made.memory.high_bytes, made.exposed_s)


_POWERS_OF_TWO = [1 << i for i in range(17)]
_DIVISORS = sorted(_POWERS_OF_TWO + [3 << i for i in range(15)])  # of the windows of a step
_ALREADY_TOO_LARGE = "a smaller micro-batch is too large already"
_FITS_WITHOUT = "all of it fits on the device, where nothing has to be moved"
# In a wide space: of the fastest plan's speed, and how much smaller a plan has to be at least.
_SLOWEST, _NEAR = 0.5, 1.1

Family = tuple[Candidate, int | None]  # without a micro-batch, and the units gathered ahead


@dataclass(frozen=True)
class _Entry:
    """A way with a micro-batch, and what it can be at best.

    ``has_more``: a larger batch takes more memory. ``least_bytes`` are alive beside the state.
    """

    way: Way
    micro_batch: int
    accumulation: int
    has_more: bool
    tokens_per_s: float
    least_bytes: int


class Searching:
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
        self.front, self.rejected = Front(), list[Rejected]()
        self.num_played = self.num_met = 0
        self._model, self._cluster, self._space, self._limits = model, cluster, space, limits
        self._prices_of = prices_of or (lambda candidate: Prices(cluster, candidate))
        capacity = cluster.node.accelerator.memory_bytes
        self._capacity = min(capacity, limits.max_memory_bytes or capacity)
        self._rests: dict[Candidate, tuple[Rest, int]] = {}
        self._too_large: dict[Family, int] = {}
        self._fitting: set[Candidate] = set()
        self._said: set[str] = set()

    def play(self, ways: Sequence[Way], progress: Callable[[int, int], None] | None) -> None:
        """Play what may be worth it; ``progress`` is called with (done, all)."""
        entries = [entry for way in ways for entry in self._entries(way)]
        entries.sort(key=lambda entry: -entry.tokens_per_s)
        for number, entry in enumerate(entries):
            self._try(entry)
            if progress is not None:
                progress(number + 1, len(entries))

    # -- candidates
    def _entries(self, way: Way) -> Iterator[_Entry]:
        """Yield a way's micro-batches that may fit, smallest first."""
        base, tokens = way.variants[0][0], self._limits.tokens_per_step
        micro_batches = sorted(self._space.micro_batches)
        for micro_batch in micro_batches or (_DIVISORS if tokens else _POWERS_OF_TWO):
            candidate = replace(base, micro_batch=micro_batch)
            try:
                self._model.check_degrees(candidate)
            except ConfigError as error:
                if base.world_size == base.data_parallel and base.ep == 1:
                    raise  # it is not the degrees that the model cannot have
                self._say(replace(candidate, accumulation=1), str(error))
                return
            accumulation = accumulation_of(candidate, self._model.seq, self._space, tokens)
            if isinstance(accumulation, str):
                if not micro_batches and micro_batch % 3 == 0:
                    continue  # tried beside powers of two, where they divide
                self._reject(way, replace(candidate, accumulation=1), accumulation)
                beyond = micro_batch * self._model.seq * base.data_parallel
                if tokens is not None and beyond > tokens and not micro_batches:
                    return
                continue
            has_more = tokens is None or accumulation > base.pp
            bounds = self._bounds(replace(candidate, accumulation=accumulation))
            yield _Entry(way, micro_batch, accumulation, has_more, *bounds)
            if bounds[1] > self._capacity and tokens is None and not micro_batches:
                return

    def _bounds(self, candidate: Candidate) -> tuple[float, int]:
        """Return the most tokens/s, and the least bytes beside state, where formulas tell."""
        model, prices = self._model, self._prices_of(candidate)
        if not isinstance(model, ShapedModel) or not isinstance(prices, Prices):
            return float("inf"), 0
        least = model.least(candidate)
        seconds = prices.device_seconds(Compute(least.costs))
        passes = candidate.accumulation + candidate.pp - 1
        windows = candidate.micro_batch * candidate.accumulation * candidate.data_parallel
        moves_inputs = self._space.may_move_inputs or candidate.offload.activations != "device"
        whole = moves_inputs and candidate.activation_checkpointing == "full"
        alive = least.alive_bytes - (least.input_bytes if whole else 0)
        return windows * model.seq / (passes * seconds), alive

    def _try(self, entry: _Entry) -> None:
        """Reject a way, or go through its variants."""
        reason = None
        if self._space.narrows and entry.least_bytes > self._capacity:
            reason = self._over
        reason = reason or self._beaten(entry.tokens_per_s, entry.least_bytes)
        batch: dict[str, Any] = {
            "micro_batch": entry.micro_batch,
            "accumulation": entry.accumulation,
        }
        if reason is not None:
            self._reject(entry.way, replace(entry.way.variants[0][0], **batch), reason)
            return
        for family in entry.way.variants:
            candidate = self._prefetching(replace(family[0], **batch), family[1])
            reason = self._hopeless(entry, family, candidate)
            if reason is not None:
                self._say(candidate, reason)
            else:
                self._play(candidate, family)

    @property
    def _over(self) -> str:
        return f"needs more than the {format_bytes(self._capacity)} of a rank, by its formulas"

    def _hopeless(self, entry: _Entry, family: Family, candidate: Candidate) -> str | None:
        """Say why a candidate need not be played, or return None."""
        smallest = self._too_large.get(family)
        if smallest is not None and candidate.micro_batch > smallest and entry.has_more:
            return _ALREADY_TOO_LARGE
        if self._space.narrows and replace(candidate, offload=Offload()) in self._fitting:
            return _FITS_WITHOUT
        reason = self._state_alone(candidate)
        if reason is not None:
            return reason
        rest, _ = self._rest(candidate)
        least = Ledger(activations=rest.device.total + entry.least_bytes)
        is_real = self._cluster.node.accelerator.asynchronous
        high = memory_interval(least, num_groups(candidate), is_real).high_bytes
        if high > self._capacity:
            self._note_too_large(family, candidate.micro_batch)
            return self._over
        return self._beaten(entry.tokens_per_s, high)

    def _beaten(self, tokens_per_s: float, least_bytes: int) -> str | None:
        """Say which plan is better than one with such bounds can be, or return None."""
        fastest = self.front.fastest
        if fastest is None:
            return None
        narrows = self._space.narrows and tokens_per_s <= fastest.tokens_per_s
        if narrows and tokens_per_s < _SLOWEST * fastest.tokens_per_s:
            return f"can at best be half as fast as {fastest.label}"
        by = self.front.beats(tokens_per_s, round(least_bytes * (_NEAR if narrows else 1)))
        return f"can be no faster and hardly smaller than {by.label}" if by is not None else None

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
        plain = replace(candidate, micro_batch=1, accumulation=1, kernels="eager", loss="eager")
        plain = replace(plain, activation_checkpointing="none", prefetch_bytes=None)
        if plain.offload.activations != "device":
            plain = replace(plain, activation_checkpointing="full")
        if plain not in self._rests:
            tape = self._model.tape(plain if isinstance(self._model, ShapedModel) else candidate)
            rest = resting_state(tape, plain.with_context_shards)
            sizes = (full_bytes(unit, tape.compute_dtype) for unit in tape.units[1:])
            self._rests[plain] = rest, max(sizes, default=0)
        return self._rests[plain]

    def _state_alone(self, candidate: Candidate) -> str | None:
        """Say why the state alone is too large; see Note [How the search prunes]."""
        rest, _ = self._rest(candidate)
        state = rest.device.total
        if state <= self._capacity:
            if candidate.pp > 1:  # of the first stage alone
                return None
            away = {0: (rest.host.total, rest.files.total)}
            return node_room(self._cluster, candidate, away).missing
        return (
            f"parameters and optimizer state alone are {format_bytes(state)} of "
            f"{format_bytes(self._capacity)} a rank"
        )

    # -- outcomes
    def _play(self, candidate: Candidate, family: Family) -> None:
        tape = self._model.tape(candidate)
        moved = candidate.with_inputs_away if self._space.may_move_inputs else ()
        for each in (candidate, *moved):
            memory = plan_memory(self._model, self._cluster, each, tape)
            self.num_played += 1
            reason = memory.room.missing
            if memory.device.high_bytes > self._capacity:
                reason = self._why_too_large(memory)
            if reason is None:
                prices = self._prices_of(each)
                self._take(plan(self._model, self._cluster, each, prices=prices, memory=memory))
                self._fitting.add(candidate)
                return
            self.num_met += 1
            self.rejected.append(Rejected(each, reason, was_played=True))
        self._note_too_large(family, candidate.micro_batch)

    def _why_too_large(self, memory: Memory) -> str:
        """Say at which moment how much is missing, and what is largest there."""
        peak = memory.played[memory.stage].peak
        lines = sorted(peak.ledger.lines().items(), key=lambda line: -line[1])[:2]
        largest = " and ".join(f"{name} {format_bytes(num)}" for name, num in lines)
        needed, capacity = format_bytes(memory.device.high_bytes), format_bytes(self._capacity)
        unit = memory.tapes[memory.stage].units[peak.unit].name or "(root)"
        return f"needs up to {needed} of {capacity}, in {peak.phase} of {unit}: {largest}"

    def _take(self, made: Plan) -> None:
        self.num_met += 1
        target = self._limits.target_tokens_per_s or 0
        if made.tokens_per_s >= target:
            self.front.add(made)
            return
        reason = f"{made.tokens_per_s:,.0f} tokens/s of {target:,.0f} asked for"
        self.rejected.append(Rejected(made.candidate, reason, was_played=True))

    def _note_too_large(self, family: Family, micro_batch: int) -> None:
        self._too_large[family] = min(self._too_large.get(family, micro_batch), micro_batch)

    def _reject(self, way: Way, candidate: Candidate, reason: str) -> None:
        """Reject all variants of a way, with the batch of this one."""
        shown = way.variants[:1] if self._space.narrows else way.variants
        self.num_met += len(way.variants) - len(shown)
        batch: dict[str, Any] = {
            name: getattr(candidate, name) for name in ("micro_batch", "accumulation")
        }
        for base, ahead in shown:
            self._say(self._prefetching(replace(base, **batch), ahead), reason)

    def _say(self, candidate: Candidate, reason: str) -> None:
        self.num_met += 1
        if not self._space.narrows or reason not in self._said:
            self._said.add(reason)
            self.rejected.append(Rejected(candidate, reason, was_played=False))


def accumulation_of(
    candidate: Candidate, seq: int, space: Space, tokens_per_step: int | None
) -> int | str:
    """Return the micro-batches per step that make the tokens within one per cent, or why not."""
    least = candidate.pp if space.fills_pipelines else 1
    if candidate.step_in_backward and least > 1:
        return f"step in backward: {no_window(least)}"
    if tokens_per_step is None:
        return max(candidate.accumulation, least)
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
    if candidate.step_in_backward and count > 1:
        return f"step in backward: {no_window(count)}"
    return count


_TURNED = 4  # plans whose knobs are turned in a wide space


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
    notes: tuple[str, ...] = field(default=())

    def _repr_html_(self) -> str:
        """Show the search in a notebook."""
        from shardwise.plan.report.page import plans_html

        return plans_html(self.pareto, self.reasons)

    @property
    def reasons(self) -> Mapping[str, Sequence[Candidate]]:
        """Every reason for which candidates lost, with those that it was given for."""
        found: dict[str, list[Candidate]] = {}
        for rejected in self.rejected:
            found.setdefault(rejected.reason, []).append(rejected.candidate)
        return found


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
    check_space(space, limits)
    wide = replace(space, **{k: getattr(space, k)[:1] for k in KNOBS}) if space.narrows else space
    ways = list(ways_of(wide, cluster))
    if not ways:
        raise ConfigError(
            f"search: no way to place {cluster.num_ranks} ranks; num_shards="
            f"{list(space.num_shards)} and degrees={list(space.degrees)} leave none (their "
            "products must divide the ranks)"
        )
    check_some_fit(model, ways)
    run = Searching(model, cluster, space, limits, prices_of)
    run.play(ways, progress)
    if space.narrows:
        best = run.front.result()[0][:_TURNED]
        if not best and 0 in space.prefetch_units:
            run.play(list(ways_of(replace(wide, prefetch_units=(0,)), cluster)), progress)
            best = run.front.result()[0][:_TURNED]
        for made in best:
            run.play([Way(tuple(turned(space, made.candidate)))], None)
    pareto, beaten = run.front.result()
    rejected = (*run.rejected, *beaten)
    winner = next(iter(pareto), None)
    return SearchResult(winner, tuple(pareto), rejected, run.num_played, run.num_met)
