"""A step whose micro-batches go through each unit before the next: the tape, cut into rounds.

What `engine.accumulate` does, in the events of one micro-batch: a round begins before a unit's
forward, ends after a unit's backward, and is walked by each micro-batch before the next round.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwise.plan.model.tape import LiveBytes, Visit, Work
from shardwise.plan.step.doubles import UnitDouble


def rounds_of(events: Sequence[Work | Visit]) -> list[list[Work | Visit]]:
    """Cut the events of a micro-batch into rounds."""
    rounds: list[list[Work | Visit]] = [[]]
    in_backward = False
    for event in events:
        turns = (event.phase if isinstance(event, Work) else event.kind) in (
            "backward",
            "before_backward",
        )
        is_forward = isinstance(event, Visit) and event.kind == "before_forward"
        if not in_backward and (turns or is_forward):
            rounds.append([])
        in_backward = in_backward or turns
        rounds[-1].append(event)
        if isinstance(event, Visit) and event.kind == "after_backward":
            rounds.append([])
    return [each for each in rounds if each]


@dataclass
class Rounds:
    """Which of ``num`` micro-batches walks a round now; ``num`` 1: one after the other, as ever.

    ``sum_scale``: bytes of a sum over micro-batches for each byte of a gradient, where the two have
    other dtypes; gradients then join the sum as they come.
    """

    num: int
    sum_scale: float
    number: int = 0
    backward_is_next: bool = False
    _written: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def is_first(self) -> bool:
        """Tell whether no other micro-batch has walked this round before."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Tell whether no other micro-batch is yet to walk this round."""
        return self.number == self.num - 1

    def sum_grads(
        self, work: Work, units: Sequence[UnitDouble]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return peak and net, by line, of a work whose gradients join sums of another dtype."""
        unit = self._owner(work, units)
        grads, largest = work.net.grads, unit.weight.largest_grad
        self._written[self.number, unit.index] += grads
        joins = int(grads * self.sum_scale) if self.is_first else 0
        unit.sums += joins
        cast = int(min(grads, largest) * self.sum_scale)
        peak = replace(work.peak, grads=min(work.peak.grads, largest) + max(joins, cast))
        return peak.lines(), replace(work.net, grads=joins).lines()

    def _owner(self, work: Work, units: Sequence[UnitDouble]) -> UnitDouble:
        """Find whose gradients a work writes: its unit's, or those of one that is in backward."""
        unit = units[work.unit]
        for each in (unit, *(u for u in units if u.in_backward)):
            written = self._written[self.number, each.index]
            if each.weight.sums_apart and written + work.net.grads <= each.weight.written_grads:
                return each
        return unit


def added(work: Work, largest_grad: int) -> tuple[LiveBytes, LiveBytes]:
    """Return peak and net of a work whose gradients are added to sums and freed, one by one."""
    if work.summed_peak is not None and work.summed_net is not None:
        return work.summed_peak, work.summed_net
    peak = replace(work.peak, grads=min(work.peak.grads, largest_grad))
    return peak, replace(work.net, grads=0)
