"""Comparison of ranks during training: their trained parameters and their optimizer steps.

Note [When ranks are compared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If ranks train different parameters, they send different bytes in the next reduction. If a rank
skips a step, or steps with another optimizer or learning rate, the slices silently belong to two
different models. So before the first reduction of a pass, a rank compares itself with the others
over the control group:

- if a parameter was frozen or thawed since the last comparison. If the other ranks have no change,
  they are in the reduction while this rank waits. The limit of `debug.watch` ends the wait and
  names both;
- in passes 2, 4, 8 and so on: the optimizers' classes and options in each optimizer's steps 1, 2,
  4, 8 and so on.

All ranks of the model's mesh reach that reduction, including a rank that has skipped the step. If
ranks may skip layers, their first reductions are in different layers, and other ranks may wait for
them in a collective of a layer between: such models compare before the backward pass. Each stage of
a pipeline has its mesh and may have different optimizers.
A step that a loss scaler skips does not count, on any rank.

Note [Passes and steps are counted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If a rank takes a micro-batch or a step more than the others, its next gather meets a gather of
their next step, and full parameters would mix slices of two steps. So with the first collective of
each training pass, a gather or a reduction, ranks exchange the number of the pass and that of the
steps so far: 20 bytes, over the control group, in flight together with the collective. On the CPU
they are compared before the wait for the collective; on a device, where no host waits for it, at
the end of the backward pass. Ranks that differ raise the same StateError. A forward pass that is
not recorded does not count.
"""

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.engine.agreement import describe_difference, find_difference
from shardwise.engine.first_step import check_first_step
from shardwise.errors import StateError
from shardwise.tensor.plain_state import owner_of, owning_rank
from shardwise.tensor.replaced import params_of
from shardwise.unit.unit import Unit

_NUMBERS = struct.Struct("<qqI")  # of the pass, and of steps so far; a digest of the collective
_EXCHANGE = "(passes)"
_STEPS = "_shardwise_steps"
_SLICES_DIFFER = "From then on the ranks' slices belong to different models"
_SHOWN = 3


def _no_error() -> None:
    """Return no error: on a device the end of the pass compares the numbers."""


def is_power_of_two(count: int) -> bool:
    """Tell whether a check with growing intervals runs now: in its calls 1, 2, 4, 8 and so on."""
    return count & (count - 1) == 0


def _describe_numbers(number: int, num_steps: int) -> str:
    return f"[{num_steps} steps of optimizers so far, in backward pass {number}]"


class RankChecks:
    """The checks of one model, over the ranks of its mesh.

    ``refuse`` marks the parameters unusable if the ranks' steps differ.
    """

    def __init__(self, comm: Comm, units: Sequence[Unit], refuse: Callable[[str], None]) -> None:
        mesh = comm.axes.mesh
        self.units = [u for u in units if u.comm is comm or u.comm.axes.mesh == mesh]
        self._params = [param for unit in self.units for param in unit.params]
        self._trained = self._read_trained()  # of each parameter, when ranks compared them last
        self._comm = comm
        self._refuse = refuse
        self._num_compared = 0  # passes that have reached `before_reduction`
        self._num_passes = 0  # backward passes that have begun
        self._last_exchanged = 0  # the pass in which ranks exchanged their numbers last
        self._compare_received: Callable[[], StateError | None] | None = None
        self._comms = list({id(c): c for c in (comm, *(u.comm for u in self.units))}.values())
        self._is_due = True  # no reduction yet in this pass
        self.num_steps = 0  # of all optimizers of the model
        self.optimizers: list[list[str]] = []  # the facts of each optimizer, as lines of text

    def _read_trained(self) -> list[bool]:
        return [param.is_trained for param in self._params]

    @property
    def num_ranks(self) -> int:
        """The ranks over which the model is spread."""
        return self._comm.axes.num_ranks

    def begin_pass(self, compares: bool) -> None:
        """Schedule the comparison before the next reduction; if ``compares``, run it now."""
        self._num_passes += 1
        self._is_due = True
        self._exchange_numbers_in(self._num_passes)
        if compares:
            self.before_reduction()

    def begin_forward(self) -> None:
        """Exchange the numbers of passes and steps with the first collective of a pass."""
        self._exchange_numbers_in(self._num_passes + 1)

    def _exchange_numbers_in(self, number: int) -> None:
        if number > self._last_exchanged and self._comm.axes.num_ranks > 1:
            self._last_exchanged = number
            for comm in self._comms:
                comm.before_next = self._send_numbers

    def _send_numbers(self, collective: CollectiveId) -> Callable[[], StateError | None]:
        """Send this rank's numbers, with the collective that it begins."""
        for comm in self._comms:
            comm.before_next = None
        self.end_pass()  # the numbers of a pass that raised
        call = crc32(f"{collective.kind} {collective.index}".encode())
        row = _NUMBERS.pack(self._last_exchanged, self.num_steps, call)
        receive = self._comm.control.start_exchange(row, _EXCHANGE)

        def compare() -> StateError | None:
            if self._compare_received is not compare:
                return None
            self._compare_received = None
            return self._compare_numbers(receive())

        self._compare_received = compare
        return compare if self._comm.device.type == "cpu" else _no_error

    def _exchange_numbers_now(self) -> None:
        """Compare the numbers of this pass before the next exchange.

        A rank in another pass would not reach that exchange.
        """
        if self._comm.before_next is not None:
            self._send_numbers(CollectiveId("exchange", "", 0))
        self.end_pass()

    def end_pass(self) -> None:
        """Compare the numbers of this pass, unless that has happened."""
        if self._compare_received is None:
            return
        with self._comm.tracer.span("exchange"), self._comm.control.waiting(_EXCHANGE):
            error = self._compare_received()
        if error is not None:
            raise error

    def _compare_numbers(self, rows: dict[int, bytes]) -> StateError | None:
        """Return the error if ranks differ; raise it if they are in different collectives.

        Then messages are left that no rank receives: the groups cannot be used any more.
        """
        members = self._comm.control.members
        if not members:
            return None  # the other ranks are those of a fake process group
        ranks_with: dict[tuple[int, int], list[int]] = {}
        calls = set()
        for rank, row in sorted(rows.items()):
            number, num_steps, call = _NUMBERS.unpack(row)
            ranks_with.setdefault((number, num_steps), []).append(members[rank])
            calls.add(call)
        if len(ranks_with) == 1:
            return None
        (first, (rank, *_)), *others = ranks_with.items()
        reference = _describe_numbers(*first)
        parts = [
            describe_difference(ranks, _describe_numbers(*numbers), rank, reference)
            for numbers, ranks in others
        ]
        same_steps = len({steps for _, steps in ranks_with}) == 1
        consequence = (
            "Their gradients are of different numbers of micro-batches"
            if same_steps
            else _SLICES_DIFFER
        )
        error = self._refuse_different_steps("; ".join(parts), consequence)
        if len(calls) == 1:
            return error
        for axis in self._comm.axes.all:
            FAILED_GROUPS.add(axis.group, str(error))
        raise error

    def _refuse_different_steps(
        self, difference: str, consequence: str = _SLICES_DIFFER
    ) -> StateError:
        """Mark the parameters unusable; return the error."""
        why = f"the ranks have taken different steps: {difference}"
        self._refuse(f"{why}. load() a checkpoint")
        return StateError(
            f"{why}. {consequence}: start again, or "
            "from a checkpoint that was saved before. Every rank must take as many micro-batches "
            "and call optimizer.step() as often as the others, with the same class of optimizer "
            "and the same options"
        )

    def before_reduction(self) -> None:
        """Compare this rank with the others, once per pass. See Note [When ranks are compared].

        **Raises** StateError on all ranks, naming the ranks and the first difference.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._num_compared += 1
        compares_steps = self._num_compared > 1 and is_power_of_two(self._num_compared)
        trained = self._read_trained()
        changed = [
            f"'{param.name}' {'is trained' if now else 'is frozen'}"
            for param, now, before in zip(self._params, trained, self._trained, strict=True)
            if now != before
        ]
        if not changed and not compares_steps:
            return
        # Ranks wait for the slowest one here, and not in a gather or a reduction.
        with self._comm.tracer.span("exchange"):
            self._compare_facts(trained, changed)

    def _compare_facts(self, trained: list[bool], changed: list[str]) -> None:
        """Compare options of optimizers and what is trained, now."""
        self._exchange_numbers_now()
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        about = ""
        if changed:
            about = f"{', '.join(changed[:_SHOWN])}{more} on this rank since the last pass"
        facts = [line for lines in self.optimizers for line in lines]
        control = self._comm.control
        difference = find_difference(control, facts, about or "the steps so far")
        if difference is not None:
            raise self._refuse_different_steps(difference)
        facts = [
            f"parameter '{param.name}' is {'trained' if now else 'frozen'}"
            for param, now in zip(self._params, trained, strict=True)
        ]
        difference = find_difference(control, facts, about or "which parameters are trained")
        if difference is not None:
            raise StateError(
                f"backward(): the ranks differ: {difference}. Call requires_grad_() in the same "
                "way on every rank"
            )
        self._trained = trained


@dataclass
class _Steps:
    """The steps of one optimizer, and the place of its facts in each model's checks."""

    places: list[tuple[weakref.ref[RankChecks], int]]
    state: Any
    num: int = 0
    num_loads: int = 0

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; record class and options in steps 1, 2, 4, 8 ... and after a load."""
        self.num += 1
        is_loaded = self.state is not optimizer.state  # every load replaces it
        self.num_loads += is_loaded
        self.state = optimizer.state
        records_facts = is_loaded or is_power_of_two(self.num)
        for ref, place in self.places:
            checks = ref()
            if checks is not None:
                checks.num_steps += 1
                if records_facts:
                    checks.optimizers[place] = list(self._facts(optimizer, place))

    def _facts(self, optimizer: torch.optim.Optimizer, place: int) -> Iterator[str]:
        kind = type(optimizer).__name__
        what = f"optimizer {place}, {kind}, in its step {self.num}"
        yield f"{what}, state loaded {self.num_loads} times"
        for number, group in enumerate(optimizer.param_groups):
            options = (f"{key}={_option(group[key])}" for key in optimizer.defaults if key in group)
            yield f"{what}, group {number}: {', '.join(options)}"


def _option(value: Any) -> str:
    """Return an option as text, floats with 6 digits because hosts may round differently."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_option, value))})"
    return str(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _note_step(optimizer: Any, *_: object) -> None:
    """Count a step of an optimizer in the checks of each model whose parameters it has."""
    # A wrapper of several optimizers is not counted; each inner optimizer is.
    if torch.compiler.is_compiling() or hasattr(optimizer, "optimizers"):
        return
    steps: _Steps | None = vars(optimizer).get(_STEPS)
    if steps is None:
        checks_by_id: dict[int, RankChecks] = {}
        params = params_of(optimizer)
        for param in params:
            engine = getattr(getattr(owner_of(param), "unit", None), "engine", None)
            checks = getattr(engine, "rank_checks", None)
            if checks is not None:
                checks_by_id[id(checks)] = checks
        num_ranks = max((checks.num_ranks for checks in checks_by_id.values()), default=0)
        check_first_step(optimizer, num_ranks)
        places = []
        for checks in checks_by_id.values():
            places.append((weakref.ref(checks), len(checks.optimizers)))
            checks.optimizers.append([])
        # A matrix that is whole on one rank has state on that rank only.
        is_loaded = any(optimizer.state.get(p) for p in params if owning_rank(p) is None)
        steps = _Steps(places, None if is_loaded else optimizer.state)
        vars(optimizer)[_STEPS] = steps
    steps.note(optimizer)


register_optimizer_step_pre_hook(_note_step)
