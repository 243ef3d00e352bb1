"""Inputs of checkpointed blocks on the host, in a step that is played.

As `engine.activations` moves them: a block's input is copied to the host while the next block
computes, and its memory freed when the one after that begins; the last block's stays. In backward
the input of the block before is fetched while a block is computed again. So two are on the device
beside what a block makes. The host has a place for each of the others, for every micro-batch that
a pipeline has in flight.

Of micro-batches in rounds all inputs are one row, in the order in which they are saved. The first
one to be through the model ends it, so the last block's inputs of the others stay as well.
"""

from math import ceil

from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Tape, Visit
from shardwise.plan.step.issue import Issuer
from shardwise.plan.step.ledger import Meter


class _Input:
    """One block's input in the micro-batch under way; of the operations the last that moved it."""

    def __init__(self, unit: int, num_bytes: int, ready: tuple[int, ...]) -> None:
        self.unit, self.num_bytes, self.ready = unit, num_bytes, ready
        self.evicted: int | None = None
        self.fetched: int | None = None
        self.is_away = False


class Inputs:
    """Moves the inputs of one tape's blocks; does nothing where they stay on the device."""

    def __init__(self, tape: Tape, candidate: Candidate, meter: Meter, issue: Issuer) -> None:
        self._meter, self._issue = meter, issue
        self._moves = candidate.offload.activations != "device"
        self._tape = tape
        self._order: list[_Input] = []
        self._is_open = False
        self._num = candidate.accumulation if candidate.in_rounds else ceil(tape.in_flight)
        sizes = [e.input_bytes for e in tape.events if isinstance(e, Visit) and e.input_bytes]
        self._each = sum(sizes[:-1]) if self._moves else 0  # of one micro-batch

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are taken for them."""
        return self._num * self._each

    def others(self, micro_batch: int) -> int:
        """Return the bytes that the tape has on the device for micro-batches beside this one."""
        is_fewer = micro_batch > 0 and self._tape.first_bytes > 0
        return round(max(self._tape.in_flight - 1 - is_fewer, 0) * self._each)

    def visit(self, visit: Visit, in_backward: bool) -> None:
        """Do what is done where a unit is about to run, and where the whole model has."""
        if not self._moves:
            return
        if visit.unit == 0 and visit.kind == "before_forward" and not in_backward:
            self._is_open = True
        if visit.input_bytes:
            self._save(visit)
        elif visit.kind == "after_forward" and visit.unit == 0 and not in_backward:
            self._give_up(self._order)
            self._is_open = False
        elif in_backward and visit.kind in ("before_forward", "before_backward"):
            self._ask(visit.unit)

    def _save(self, visit: Visit) -> None:
        if self._is_open:
            self._give_up(self._order)
        for each in self._order[-1:] if self._is_open else ():
            each.evicted = self._issue.transfer("to_host", each.num_bytes, each.unit, each.ready)
        self._order.append(_Input(visit.unit, visit.input_bytes, self._issue.inputs))

    def _give_up(self, inputs: list[_Input]) -> None:
        for each in inputs:
            if each.evicted is not None and not each.is_away:
                self._issue.wait(each.evicted)
                self._meter.add("activations", -each.num_bytes)
                each.is_away = True

    def _ask(self, unit: int) -> None:
        """Compute a block again: with its input, while the one before is fetched."""
        places = [place for place, each in enumerate(self._order) if each.unit == unit]
        if not places:
            return
        last = places[-1]
        for each in self._order[max(last - 1, 0) : last + 1][::-1]:
            self._fetch(each)
        self._issue.wait(self._order[last].fetched)
        del self._order[last]

    def _fetch(self, each: _Input) -> None:
        if each.is_away:
            after = (*self._issue.inputs, *([] if each.evicted is None else [each.evicted]))
            each.fetched = self._issue.transfer("to_device", each.num_bytes, each.unit, after)
            self._meter.add("activations", each.num_bytes)
            each.is_away = False
