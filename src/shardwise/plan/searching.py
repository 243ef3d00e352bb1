"""Search: every way to run a model that is worth asking about, the best ones, and why others lost.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.front import Rejected
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Pricer
from shardwise.plan.planning import Model, Plan
from shardwise.plan.playing import Searching
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
