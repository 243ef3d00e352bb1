"""Search: every way to run a model that is worth asking about, the best ones, and why others lost.

Note [How the search prunes]
Candidates are taken in families that differ in the micro-batch alone, smallest first. What rests
between steps does not depend on the batch, so a family whose parameters and optimizer state do not
fit, on the device or on its node, is rejected without being played; and memory grows with the
micro-batch, so the first one that does not fit ends its family. But where the tokens of a step are
given, a larger micro-batch means fewer of them: no gradients need to be summed over a window of
one, and a pipeline has fewer in flight; those are still played. What is left is played, priced and
simulated in full: there is no second, cheaper model of time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import prod
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import ALL_DEGREES, DEGREES, Candidate, planned_offload
from shardwise.plan.front import Front, Rejected
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Pricer
from shardwise.plan.model.tape import full_bytes
from shardwise.plan.node_room import node_room
from shardwise.plan.planning import Model, Plan, plan
from shardwise.plan.step.play import resting_state
from shardwise.quantities import format_bytes
from shardwise.stages import STAGES

_POWERS_OF_TWO = [1 << i for i in range(17)]
_ALREADY_TOO_LARGE = "a smaller micro-batch is too large already"
_MAY_BE_EMPTY = ("num_shards", "micro_batches")
_TRIED = {  # settings of a candidate, and the field of the space that has their values
    "stage": "stages",
    "layout": "layouts",
    "units": "units",
    "bucket_bytes": "bucket_bytes",
    "reduce_every": "reduce_every",
    "activation_checkpointing": "activation_checkpointing",
    "offload": "offloads",
}


@dataclass(frozen=True)
class Space:
    """What is varied, each as the values to try; everything else is as in ``base``.

    ``micro_batches`` empty: powers of two from 1 for as long as they fit. ``fills_pipelines``: with
    as many micro-batches as stages, as a run. ``may_move_inputs`` to the host: where needed to fit.
    """

    base: Candidate
    stages: Sequence[int] = (0, 1, 2, 3)
    layouts: Sequence[Literal["rows", "flat"]] = ("rows",)
    units: Sequence[tuple[str, ...] | None] = (None,)
    num_shards: Sequence[int] = ()
    prefetch_units: Sequence[int | None] = (1, 0, 2)  # None: as in base
    bucket_bytes: Sequence[int] = (1 << 20,)
    reduce_every: Sequence[Literal["step", "micro_batch"] | None] = (None,)
    activation_checkpointing: Sequence[str] = ("none", "full")
    micro_batches: Sequence[int] = ()
    offloads: Sequence[Offload] = (Offload(),)
    degrees: Sequence[tuple[int, int, int]] = ((1, 1, 1),)  # tensor, pipeline, context
    fills_pipelines: bool = False
    may_move_inputs: bool = False


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to; None asks for nothing.

    ``tokens_per_step`` is met by accumulation and may not be missed by more than one per cent.
    """

    max_memory_bytes: int | None = None
    tokens_per_step: int | None = None
    target_tokens_per_s: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The fastest plan that keeps the limits, the Pareto set, and what lost.

    The Pareto set holds the plans that no other one beats in both tokens/s and memory, fastest
    first; ``winner`` is the first of them. ``num_played`` counts the candidates that were
    simulated.
    """

    winner: Plan | None
    pareto: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    num_played: int
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

    @property
    def num_candidates(self) -> int:
        """Number of candidates looked at."""
        return len(self.pareto) + len(self.rejected)


def search(
    model: Model,
    cluster: Cluster,
    space: Space,
    limits: Limits = Limits(),
    prices_of: Callable[[Candidate], Pricer] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Play every candidate of the space; return the fastest that keeps the limits, and the rest.

    ``progress`` is called with (families done, families in all).

    **Cost** see Note [How the search prunes]; about 20 ms per candidate of a 32-layer model.

    **Raises** ConfigError when the space is empty or a limit is not positive.
    """
    _check(space, limits)
    families = list(_families(space, cluster))
    if not families:
        raise ConfigError(
            f"search: no way to place {cluster.num_ranks} ranks; num_shards="
            f"{list(space.num_shards)} and degrees={list(space.degrees)} leave none (their "
            "products must divide the ranks)"
        )
    _check_some_fit(model, families)
    front = Front()
    rejected: list[Rejected] = []
    num_played = 0
    for number, family in enumerate(families):
        for outcome in _play_family(model, cluster, family, space, limits, prices_of):
            num_played += isinstance(outcome, Plan) or outcome.was_played
            if isinstance(outcome, Rejected):
                rejected.append(outcome)
            elif outcome.tokens_per_s < (limits.target_tokens_per_s or 0):
                rejected.append(_too_slow(outcome, limits))
            else:
                front.add(outcome)
        if progress is not None:
            progress(number + 1, len(families))
    pareto, beaten = front.result()
    return SearchResult(next(iter(pareto), None), tuple(pareto), (*rejected, *beaten), num_played)


def _check(space: Space, limits: Limits) -> None:
    for name in ("max_memory_bytes", "tokens_per_step", "target_tokens_per_s"):
        value = getattr(limits, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: expected more than 0")
    for name in (f.name for f in fields(space) if f.name not in _MAY_BE_EMPTY):
        if getattr(space, name) == ():
            raise ConfigError(f"search: {name} is empty; give at least one value to try")


def _check_some_fit(model: Model, families: Sequence[tuple[Candidate, int | None]]) -> None:
    """Refuse degrees that the model cannot have, where no placement has others."""
    first: ConfigError | None = None
    for placed in dict.fromkeys(_placed(candidate) for candidate, _ in families):
        try:
            model.check_degrees(placed)
        except ConfigError as error:
            first = first or error
        else:
            return
    assert first is not None  # there is at least one family
    raise first


def _placed(candidate: Candidate) -> Candidate:
    """Return a candidate with the same ranks in each degree, and nothing else."""
    sizes = {
        name: getattr(candidate, name) for name in ("num_shards", "num_replicas", *ALL_DEGREES)
    }
    return Candidate(**sizes)


def _families(space: Space, cluster: Cluster) -> Iterator[tuple[Candidate, int | None]]:
    """Yield candidates without a micro-batch, each with the number of units to prefetch."""
    offloads = [*map(planned_offload, space.offloads)]
    for degrees in space.degrees:
        ranks, rest = divmod(cluster.num_ranks, prod(degrees))
        if rest:
            continue
        for num_shards in space.num_shards or _splits(ranks, cluster.node.num_accelerators):
            if ranks % num_shards:
                continue
            sizes = {"num_shards": num_shards, "num_replicas": ranks // num_shards}
            placed: dict[str, Any] = {**sizes, **dict(zip(DEGREES, degrees, strict=True))}
            tried = product(*(getattr(space, name) for name in _TRIED.values()))
            for values, ahead in product(tried, space.prefetch_units):
                settings: dict[str, Any] = dict(zip(_TRIED, values, strict=True))
                candidate = replace(space.base, **placed, **settings)
                stage, offload = STAGES[candidate.stage], candidate.offload
                is_same = not stage.frees_after_backward and offload.params == "cpu"
                if is_same and replace(offload, params="device") in offloads:
                    continue  # full parameters stay on the device
                gathers = candidate.has_shards and stage.shards_state
                if not gathers and ahead != space.prefetch_units[0]:
                    continue  # nothing to prefetch, whatever the setting
                yield candidate, ahead


def _splits(ranks: int, ranks_per_node: int) -> list[int]:
    """Return the shard-axis sizes worth trying: all ranks, and one node."""
    return [ranks] if ranks <= ranks_per_node or ranks % ranks_per_node else [ranks, ranks_per_node]


def _state_alone(model: Model, candidate: Candidate, cluster: Cluster, capacity: int) -> str | None:
    """Say why the state alone is too large, or return None; see Note [How the search prunes]."""
    shards = candidate.num_shards * candidate.cp  # see planning, on contexts
    sharded = replace(candidate, num_shards=shards, cp=1)
    rest = resting_state(model.tape(candidate), sharded)
    state = rest.device.total
    if state <= capacity:
        if candidate.pp > 1:  # of the first stage alone
            return None
        away = {0: (rest.host.total, rest.files.total)}
        return node_room(cluster, candidate, away).missing
    return (
        f"parameters and optimizer state alone are {format_bytes(state)} of "
        f"{format_bytes(capacity)} a rank"
    )


def _play_family(
    model: Model,
    cluster: Cluster,
    family: tuple[Candidate, int | None],
    space: Space,
    limits: Limits,
    prices_of: Callable[[Candidate], Pricer] | None,
) -> Iterator[Plan | Rejected]:
    """Yield the outcome of each micro-batch, smallest first, until one is too large."""
    base, ahead = family
    capacity = cluster.node.accelerator.memory_bytes
    capacity = min(capacity, limits.max_memory_bytes or capacity)
    micro_batches = sorted(space.micro_batches)
    smallest = replace(base, micro_batch=micro_batches[0] if micro_batches else 1)
    try:
        reason = _state_alone(model, smallest, cluster, capacity)
    except ConfigError as error:
        if base.world_size == base.data_parallel and base.ep == 1:
            raise  # it is not the degrees that the model cannot have
        reason = str(error)
    if reason is not None:
        yield Rejected(replace(base, accumulation=1), reason, was_played=False)
        return
    is_too_large = False
    for micro_batch in micro_batches or _POWERS_OF_TWO:
        candidate = replace(base, micro_batch=micro_batch)
        accumulation = _accumulation(candidate, model.seq, space, limits.tokens_per_step)
        if isinstance(accumulation, str):
            yield Rejected(replace(candidate, accumulation=1), accumulation, was_played=False)
            tokens = micro_batch * model.seq * base.data_parallel
            is_beyond = limits.tokens_per_step is not None and tokens > limits.tokens_per_step
            if is_beyond and not micro_batches:
                return
            continue
        candidate = replace(candidate, accumulation=accumulation)
        has_more = limits.tokens_per_step is None or accumulation > base.pp
        if is_too_large and has_more:
            yield Rejected(candidate, _ALREADY_TOO_LARGE, was_played=False)
            continue
        tape = model.tape(candidate)
        if ahead is not None:
            largest = max((full_bytes(u, tape.compute_dtype) for u in tape.units[1:]), default=0)
            candidate = replace(candidate, prefetch_bytes=None if ahead == 1 else ahead * largest)
        for each in (candidate, *(candidate.with_inputs_away if space.may_move_inputs else ())):
            made = plan(model, cluster, each, prices=prices_of and prices_of(each), tape=tape)
            reason = made.room.missing
            if made.memory.high_bytes > capacity:
                reason = _why_too_large(made, capacity)
            if reason is None:
                yield made
                break
            yield Rejected(each, reason, was_played=True)
        else:
            is_too_large = True
        if is_too_large and limits.tokens_per_step is None and not micro_batches:
            return


def _accumulation(
    candidate: Candidate, seq: int, space: Space, tokens_per_step: int | None
) -> int | str:
    """Return the micro-batches per step that make the tokens within one per cent, or why not."""
    least = candidate.pp if space.fills_pipelines else 1
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
    return count


def _why_too_large(made: Plan, capacity: int) -> str:
    """Say at which moment how much is missing, and what is largest there."""
    peak = made.played.peak
    lines = sorted(peak.ledger.lines().items(), key=lambda line: -line[1])[:2]
    largest = " and ".join(f"{name} {format_bytes(num)}" for name, num in lines)
    return (
        f"needs up to {format_bytes(made.memory.high_bytes)} of {format_bytes(capacity)}, in "
        f"{peak.phase} of {made.unit_name(peak.unit)}: {largest}"
    )


def _too_slow(made: Plan, limits: Limits) -> Rejected:
    target = limits.target_tokens_per_s or 0
    reason = f"{made.tokens_per_s:,.0f} tokens/s of {target:,.0f} asked for"
    return Rejected(made.candidate, reason, was_played=True)
