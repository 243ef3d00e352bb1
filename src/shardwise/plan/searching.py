"""The search for the best plans: configurations in the order of their lower bounds, best first.

Note [How the search prunes]
A `ConfigVariant` is a candidate without a micro-batch. A `ConfigGroup` holds the variants that
compute their layers in the same way on as many ranks; they differ in where state is kept and when
it is sent. The search goes through pairs of a group and a micro-batch.

The state between steps does not depend on the batch. If parameters and optimizer state do not fit
on the device or on its node, nothing is played. Memory grows with the micro-batch, so the first one
that does not fit ends its variant. The exception is a search with the tokens of a step given: a
larger micro-batch then means fewer micro-batches. A window of one sums no gradients, and a pipeline
has fewer micro-batches in flight, so larger ones are still played.

If the model has formulas, they give lower bounds of a group's time and memory at little cost: the
time of its operations, and its state with its activations. Groups are tried in the order of that
time. A group is rejected if its bounds exceed the memory, or if a plan is already better than the
bounds. The other groups are played, priced and simulated in full. So there is one model of time,
and the search finds the plans that playing everything would find.

Note [A wide space]
With ``narrows`` the search gives up three things:

1. How units are cut, prefetched and reduced is varied for the best plans only. Plans without
   prefetch are tried only if nothing else fits. So a plan that fits only without prefetch, and is
   faster than the plans that fit with it, is not found.
2. A configuration that fits on the device is not tried with offload.
3. The Pareto set has no plans that can at best be half as fast as the fastest plan, and none that
   save less than a tenth of the memory of a plan as fast.
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
from shardwise.plan.pareto import ParetoSet, Rejected
from shardwise.plan.planning import Plan, PlannedMemory, num_groups, plan, plan_memory
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.play import bytes_between_steps
from shardwise.plan.step.program import BytesBetweenSteps, Compute, Ledger
from shardwise.quantities import format_bytes
from shardwise.stages import STAGES, LayoutName, ReduceEvery

if TYPE_CHECKING:
    from shardwise.plan.planning import Model

_VARIED = {  # settings of a candidate, and the field of the space that has their values
    "stage": "stages",
    "layout": "layouts",
    "units": "units",
    "bucket_bytes": "bucket_bytes",
    "reduce_every": "reduce_every",
}
# In a wide space these are varied for the best plans only.
_REFINED = {name: _VARIED[name] for name in ("layout", "units", "bucket_bytes", "reduce_every")}
_REFINED_FIELDS = (*_REFINED.values(), "prefetch_units")
_NUM_REFINED = 4  # plans
_POWERS_OF_TWO = [1 << i for i in range(17)]
_DIVISORS = sorted(_POWERS_OF_TWO + [3 << i for i in range(15)])  # of the windows of a step
# In a wide space, a plan is left out if it is slower than this share of the fastest plan's speed,
_SLOWEST_SHARE = 0.5
# or if a plan as fast needs less than so many times its memory.
_LEAST_SAVING = 1.1


class ConfigVariant(NamedTuple):
    """A candidate without a micro-batch, and the units to prefetch (None: as in the candidate)."""

    base: Candidate
    prefetch_units: int | None


# Variants that compute their layers in the same way on as many ranks, so that the computation of a
# micro-batch takes as long in each.
ConfigGroup = tuple[ConfigVariant, ...]


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
class SearchResult:
    """The fastest plan that keeps the limits, the Pareto set, and what lost.

    The Pareto set holds the plans that no other one beats in both tokens/s and memory, fastest
    first; ``winner`` is the first of them. ``num_candidates`` counts the candidates considered, and
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
    """Search a space; return the fastest plan that keeps the limits, the Pareto set and the others.

    ``progress`` is called with (candidates done, candidates in all).

    **Cost** see Note [How the search prunes]; about 20 ms per candidate of a 32-layer model.

    **Raises** ConfigError when the space is empty or a limit is not positive.
    """
    limits = limits or Limits()
    for name in (limit.name for limit in fields(limits)):
        value = getattr(limits, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: expected more than 0")
    for name in (setting.name for setting in fields(space)):
        if getattr(space, name) == () and name not in ("num_shards", "micro_batches"):
            raise ConfigError(f"search: {name} is empty; give at least one value to try")
    coarse = space
    if space.narrows:
        coarse = replace(space, **{name: getattr(space, name)[:1] for name in _REFINED_FIELDS})
    groups = list(_groups_of(coarse, cluster))
    if not groups:
        raise ConfigError(
            f"search: no way to place {cluster.num_ranks} ranks; num_shards="
            f"{list(space.num_shards)} and degrees={list(space.degrees)} leave none (their "
            "products must divide the ranks)"
        )
    run = _Search(model, cluster, space, limits, prices_of)
    run.play(groups, progress)
    if space.narrows:
        best = run.pareto_set.result()[0][:_NUM_REFINED]
        if not best and 0 in space.prefetch_units:
            groups = list(_groups_of(replace(coarse, prefetch_units=(0,)), cluster))
            run.play(groups, progress)
            best = run.pareto_set.result()[0][:_NUM_REFINED]
        for refined in best:
            run.play([tuple(_refine(space, refined.candidate))], None)
    pareto, beaten = run.pareto_set.result()
    return SearchResult(
        winner=next(iter(pareto), None),
        pareto=tuple(pareto),
        rejected=(*run.rejected, *beaten),
        num_played=run.num_played,
        num_candidates=run.num_candidates,
    )


# -- the configurations of a space
def _groups_of(space: Space, cluster: Cluster) -> Iterator[ConfigGroup]:
    """Yield the groups of a space, each with its variants; variants without offload come first.

    Of equivalent variants there is one: offload of parameters has no effect if they stay full, and
    prefetch has none without gathers.
    """
    offloads = [planned_offload(offload) for offload in space.offloads]
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
        variants = list[ConfigVariant]()
        for num_shards in space.num_shards or splits:
            if not ranks % num_shards:
                placed = replace(base, num_shards=num_shards, num_replicas=ranks // num_shards)
                variants += _variants(space, placed, offloads)
        if variants:
            yield tuple(variants)


def _variants(
    space: Space, base: Candidate, offloads: Sequence[Offload]
) -> Iterator[ConfigVariant]:
    """Yield the variants of one group over so many shards and replicas."""
    varied = product(offloads, *(getattr(space, name) for name in _VARIED.values()))
    for (offload, *values), prefetch_units in product(varied, space.prefetch_units):
        settings: dict[str, Any] = dict(zip(_VARIED, values, strict=True))
        try:
            candidate = replace(base, offload=offload, **settings)
        except ConfigError:
            if base.gather is None:
                raise
            continue  # encoded gathers do not go with these settings
        stage = STAGES[candidate.stage]
        keeps_full_params = not stage.frees_after_backward and offload.params == "cpu"
        if keeps_full_params and replace(offload, params="device") in offloads:
            continue  # full parameters stay on the device
        is_cut = candidate.num_shards * candidate.cp > 1
        is_cut |= candidate.ep > 1 and candidate.expert_shards > 1
        gathers = is_cut and stage.shards_state
        if gathers or prefetch_units == space.prefetch_units[0]:
            yield ConfigVariant(candidate, prefetch_units)


def _refine(space: Space, best: Candidate) -> Iterator[ConfigVariant]:
    """Yield variants of a candidate with other refined settings; the first has been played."""
    refinements = product(*(getattr(space, name) for name in _REFINED_FIELDS))
    for number, (*values, prefetch_units) in enumerate(refinements):
        settings: dict[str, Any] = dict(zip(_REFINED, values, strict=True))
        if number and (best.gather is None or settings["layout"] != "matrices"):
            yield ConfigVariant(replace(best, **settings), prefetch_units)


def _accumulation_of(
    candidate: Candidate, seq: int, space: Space, tokens_per_step: int | None
) -> int | str:
    """Return the micro-batches per step that make the tokens within one per cent.

    If there is no such number, return the reason.
    """
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


# -- the search
class _BoundedGroup(NamedTuple):
    """A group with a micro-batch, and the bounds of its speed and memory.

    ``grows``: a larger micro-batch takes more memory. ``least_bytes`` are alive beside the state.
    """

    variants: ConfigGroup
    micro_batch: int
    accumulation: int
    grows: bool
    tokens_per_s: float
    least_bytes: int

    def candidate(self, base: Candidate) -> Candidate:
        return replace(base, micro_batch=self.micro_batch, accumulation=self.accumulation)


class _Search:
    """One search: ``pareto_set`` has the best plans so far, ``rejected`` what lost to no plan.

    In a space that ``narrows``, of the candidates that are rejected by their bounds for the same
    reason only the first is in ``rejected``; ``num_candidates`` counts all.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        space: Space,
        limits: Limits,
        prices_of: Callable[[Candidate], Pricer] | None,
    ) -> None:
        self.pareto_set = ParetoSet()
        self.rejected: list[Rejected] = []
        self.num_played = 0
        self.num_candidates = 0
        self._model = model
        self._cluster = cluster
        self._space = space
        self._limits = limits
        self._prices_of = prices_of or (lambda candidate: Prices(cluster, candidate))
        capacity = cluster.node.accelerator.memory_bytes
        self._capacity = min(capacity, limits.max_memory_bytes or capacity)
        self._too_large_reason = (
            f"needs more than the {format_bytes(self._capacity)} of a rank, by its formulas"
        )
        # By `Candidate.state_key`: the state, and the bytes of the largest unit.
        self._states: dict[Candidate, tuple[BytesBetweenSteps, int]] = {}
        self._too_large: dict[ConfigVariant, int] = {}  # the smallest micro-batch that is
        self._fitting: set[Candidate] = set()
        self._reported: set[str] = set()  # reasons

    def play(
        self, groups: Sequence[ConfigGroup], progress: Callable[[int, int], None] | None
    ) -> None:
        """Play the candidates that may be among the best; call ``progress`` with (done, all)."""
        refused: list[ConfigError] = []
        bounded = [one for group in groups for one in self._bounded_groups(group, refused)]
        if len(refused) == len(groups):
            raise refused[0]
        bounded.sort(key=lambda one: -one.tokens_per_s)
        for number, one in enumerate(bounded, 1):
            self._try(one)
            if progress is not None:
                progress(number, len(bounded))

    def _bounded_groups(
        self, group: ConfigGroup, refused: list[ConfigError]
    ) -> Iterator[_BoundedGroup]:
        """Yield a group with each micro-batch that may fit, smallest first.

        If the model cannot have the group's degrees, yield nothing and add the error to
        ``refused``.
        """
        base, tokens = group[0].base, self._limits.tokens_per_step
        requested = sorted(self._space.micro_batches)
        for micro_batch in requested or (_DIVISORS if tokens else _POWERS_OF_TWO):
            candidate = replace(base, micro_batch=micro_batch)
            try:
                self._model.check_degrees(candidate)
            except ConfigError as error:
                refused.append(error)
                self._reject(replace(candidate, accumulation=1), str(error))
                return
            count = _accumulation_of(candidate, self._model.seq, self._space, tokens)
            if isinstance(count, str):
                if not requested and micro_batch % 3 == 0:
                    continue  # multiples of three are tried only where they divide
                self._reject_all(_BoundedGroup(group, micro_batch, 1, False, 0.0, 0), count)
                smallest_step = micro_batch * self._model.seq * base.data_parallel
                if tokens is not None and smallest_step > tokens and not requested:
                    return
                continue
            grows = tokens is None or count > base.pp
            tokens_per_s, least_bytes = self._bounds(replace(candidate, accumulation=count))
            yield _BoundedGroup(group, micro_batch, count, grows, tokens_per_s, least_bytes)
            if least_bytes > self._capacity and tokens is None and not requested:
                return

    def _bounds(self, candidate: Candidate) -> tuple[float, int]:
        """Return the most tokens/s and the least bytes beside state that the formulas allow."""
        model, prices = self._model, self._prices_of(candidate)
        if not isinstance(model, ShapedModel) or not isinstance(prices, Prices):
            return float("inf"), 0
        costs, alive, inputs = model.lower_bounds(candidate)
        seconds = prices.device_seconds(Compute(costs))
        passes = candidate.accumulation + candidate.pp - 1
        windows = candidate.micro_batch * candidate.accumulation * candidate.data_parallel
        moves_inputs = self._space.may_move_inputs or candidate.offload.activations != "device"
        if moves_inputs and candidate.activation_checkpointing == "full":
            alive -= inputs
        return windows * model.seq / (passes * seconds), alive

    def _try(self, group: _BoundedGroup) -> None:
        """Reject a group by its bounds, or reject and play its variants one by one."""
        reason = self._beaten_reason(group.tokens_per_s, group.least_bytes)
        if self._space.narrows and group.least_bytes > self._capacity:
            reason = self._too_large_reason
        if reason is not None:
            self._reject_all(group, reason)
            return
        for variant in group.variants:
            candidate = self._with_prefetch(group.candidate(variant.base), variant.prefetch_units)
            reason = self._reason_to_skip(group, variant, candidate)
            if reason is not None:
                self._reject(candidate, reason)
            else:
                self._play(candidate, variant)

    def _reason_to_skip(
        self, group: _BoundedGroup, variant: ConfigVariant, candidate: Candidate
    ) -> str | None:
        """Return the reason to skip a candidate, or None."""
        smallest = self._too_large.get(variant, candidate.micro_batch)
        if candidate.micro_batch > smallest and group.grows:
            return "a smaller micro-batch is too large already"
        if self._space.narrows and replace(candidate, offload=Offload()) in self._fitting:
            return "all of it fits on the device, where nothing has to be moved"
        between_steps, _ = self._between_steps(candidate)
        state = between_steps.device.total
        if state > self._capacity:
            return (
                f"parameters and optimizer state alone are {format_bytes(state)} of "
                f"{format_bytes(self._capacity)} a rank"
            )
        if candidate.pp == 1:  # with a pipeline, this is the state of its first stage only
            by_stage = {0: (between_steps.host.total, between_steps.files.total)}
            missing = node_room(self._cluster, candidate, by_stage).missing
            if missing is not None:
                return missing
        lower_bound = Ledger(activations=state + group.least_bytes)
        is_real = self._cluster.node.accelerator.asynchronous
        high = memory_interval(lower_bound, num_groups(candidate), is_real).high_bytes
        if high > self._capacity:
            self._too_large[variant] = min(smallest, candidate.micro_batch)
            return self._too_large_reason
        return self._beaten_reason(group.tokens_per_s, high)

    def _beaten_reason(self, tokens_per_s: float, least_bytes: int) -> str | None:
        """Name a plan that is better than any plan with such bounds, or return None."""
        fastest = self.pareto_set.fastest
        if fastest is None:
            return None
        narrows = self._space.narrows and tokens_per_s <= fastest.tokens_per_s
        if narrows and tokens_per_s < _SLOWEST_SHARE * fastest.tokens_per_s:
            return f"can at best be half as fast as {fastest.candidate.label}"
        saving = _LEAST_SAVING if narrows else 1
        better = self.pareto_set.find_better(tokens_per_s, round(least_bytes * saving))
        if better is None:
            return None
        return f"cannot be faster than, and is not much smaller than, {better.candidate.label}"

    def _with_prefetch(self, candidate: Candidate, num_units: int | None) -> Candidate:
        """Return a candidate that prefetches so many of the largest units; None: as it is."""
        if num_units is None:
            return candidate
        _, largest = self._between_steps(candidate)
        return replace(candidate, prefetch_bytes=None if num_units == 1 else num_units * largest)

    def _between_steps(self, candidate: Candidate) -> tuple[BytesBetweenSteps, int]:
        """Return the state between steps, and the bytes of the largest unit in full.

        Neither depends on the batch, or on how layers are computed.
        """
        key = candidate.state_key
        if candidate.offload.activations != "device":
            key = replace(key, activation_checkpointing="full")
        if key not in self._states:
            tape = self._model.tape(key if isinstance(self._model, ShapedModel) else candidate)
            state = bytes_between_steps(tape, key.with_context_shards)
            largest = max((unit.numel for unit in tape.units[1:]), default=0)
            self._states[key] = state, largest * DTYPE_BYTES[tape.compute_dtype]
        return self._states[key]

    def _play(self, candidate: Candidate, variant: ConfigVariant) -> None:
        """Play a candidate; if it does not fit, also with its blocks' inputs on the host."""
        tape = self._model.tape(candidate)
        attempts = [candidate]
        is_full = candidate.activation_checkpointing == "full"
        if self._space.may_move_inputs and is_full and candidate.offload.activations == "device":
            offload = replace(candidate.offload, activations="cpu")
            attempts.append(replace(candidate, offload=offload))
        for attempt in attempts:
            memory = plan_memory(self._model, self._cluster, attempt, tape)
            self.num_played += 1
            self.num_candidates += 1
            reason = memory.room.missing
            if memory.device.high_bytes > self._capacity:
                reason = self._describe_excess(memory)
            if reason is not None:
                self.rejected.append(Rejected(attempt, reason, was_played=True))
                continue
            self._fitting.add(candidate)
            prices = self._prices_of(attempt)
            result = plan(self._model, self._cluster, attempt, prices=prices, memory=memory)
            target = self._limits.target_tokens_per_s or 0
            if result.tokens_per_s >= target:
                self.pareto_set.add(result)
            else:
                reason = f"{result.tokens_per_s:,.0f} tokens/s of {target:,.0f} asked for"
                self.rejected.append(Rejected(attempt, reason, was_played=True))
            return
        smallest = self._too_large.get(variant, candidate.micro_batch)
        self._too_large[variant] = min(smallest, candidate.micro_batch)

    def _describe_excess(self, memory: PlannedMemory) -> str:
        """Name the moment at which memory is missing, the amount, and the largest lines then."""
        peak = memory.played[memory.stage].peak
        lines = sorted(peak.ledger.lines().items(), key=lambda line: -line[1])[:2]
        largest = " and ".join(f"{name} {format_bytes(num)}" for name, num in lines)
        needed, capacity = format_bytes(memory.device.high_bytes), format_bytes(self._capacity)
        unit = memory.tapes[memory.stage].units[peak.unit].name or "(root)"
        return f"needs up to {needed} of {capacity}, in {peak.phase} of {unit}: {largest}"

    def _reject_all(self, group: _BoundedGroup, reason: str) -> None:
        """Reject all variants of a group with this micro-batch."""
        shown = group.variants[:1] if self._space.narrows else group.variants
        self.num_candidates += len(group.variants) - len(shown)
        for base, prefetch_units in shown:
            self._reject(self._with_prefetch(group.candidate(base), prefetch_units), reason)

    def _reject(self, candidate: Candidate, reason: str) -> None:
        self.num_candidates += 1
        if not self._space.narrows or reason not in self._reported:
            self._reported.add(reason)
            self.rejected.append(Rejected(candidate, reason, was_played=False))
