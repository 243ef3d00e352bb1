"""Checks that bits are right: a step computed twice, as often as a share of the time allows.

Note [A share of the time for checks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two checks alternate: copies of state are compared between ranks, and a step is computed twice. Rank
0 measures the cost of both. It requests the next check when all checks together stay within the
share of the time since the first step. The request is sent with the losses that the ranks sum at
the end of a step, so all ranks make the check in the next step.

Note [Errors that a replay finds]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The same operations on the same bits give the same bits. If they do not, memory, a processor or an
accelerator failed, or an operation is not deterministic. An error before gradients are reduced
reaches all ranks with the sum, so all differ; the rank whose loss of its own windows differs is
named first. A later error is on one rank only, until the next gather. A machine that makes the same
error twice is not detected.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor

from shardwise.checkpoint.container import digest_of, memory_of
from shardwise.checkpoint.generators import read_generators, set_generators
from shardwise.errors import StateError
from shardwise.layout.placements import local_of
from shardwise.parallel.parts import Parts
from shardwise.train.setup import Run, gather_integers

Check = Literal["none", "replicas", "replay"]
CHECKS: tuple[Check, ...] = ("none", "replicas", "replay")
_MAX_SHOWN = 3
_T = TypeVar("_T")


class IntegrityBudget:
    """The choice of the next check: see Note [A share of the time for checks].

    ``share`` is of the time, 0 for no checks. ``agreed`` is the check of the coming step.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.agreed: Check = "none"
        self._share = share
        self._clock = clock
        self._began_s = clock()
        self._spent_s = 0.0
        self._cost_s = {"replicas": 0.0, "replay": 0.0}  # of the last one
        self._next: Check = "replicas"
        self._step_s = 0.0

    def next_check(self) -> int:
        """Return the index in `CHECKS` of the check that fits now, for rank 0 to send."""
        if not self._share or not self._step_s:
            return 0
        allowed_s = self._share * (self._clock() - self._began_s) - self._spent_s
        cost_s = self._cost_s[self._next] or self._step_s
        return CHECKS.index(self._next) if cost_s <= allowed_s else 0

    def agree(self, index: int) -> None:
        """Set the check of the coming step; ``index`` is what rank 0 sent."""
        self.agreed = CHECKS[index]

    def note_step(self, seconds: float, is_replayed: bool) -> None:
        """Record the seconds of a step; a second pass counts as the cost of a replay."""
        if is_replayed:
            self._spend("replay", max(0.0, seconds - self._step_s))
        else:
            self._step_s = seconds

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Measure a comparison of copies."""
        begun_s = self._clock()
        yield
        self._spend("replicas", self._clock() - begun_s)

    def _spend(self, check: Literal["replicas", "replay"], seconds: float) -> None:
        self._spent_s += seconds
        self._cost_s[check] = seconds
        self._next = "replay" if check == "replicas" else "replicas"


class ReplayError(StateError):
    """A step gave other bits the second time; the text is the same on every rank.

    Test the machine of the first rank that is named, ``rank``, and continue with `--resume auto`.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


def compute_twice(
    run: Run, compute: Callable[[], _T], numbers_of: Callable[[_T], dict[str, float]]
) -> tuple[_T, int]:
    """Call `compute` (one step) twice from the same state; return its second result.

    The second value is the position of the first difference, among the state and the numbers that
    `numbers_of` returns, as `raise_difference` takes it; 0 means none.

    **Cost** a copy of this rank's state while it runs, a second step, two passes of xxh3-128.
    """
    restore = _snapshot(run)
    first = _digests(run, numbers_of(compute()))
    restore()
    result = compute()
    second = _digests(run, numbers_of(result))
    differs = (n for n, k in enumerate(second, start=1) if first.get(k) != second[k])
    return result, next(differs, 0)


def raise_difference(run: Run, step: int, difference: int, numbers: dict[str, float]) -> None:
    """Raise a ReplayError that lists each rank's difference, the same on all ranks.

    Every rank calls it if any has a difference.
    """
    labels = list(_digests(run, numbers))
    gathered = gather_integers(run.place, difference)
    different = sorted((n, rank) for rank, n in enumerate(gathered) if n)
    shown = [f"rank {rank}: {labels[n - 1]}" for n, rank in different[:_MAX_SHOWN]]
    more = f" (and {len(different) - _MAX_SHOWN} more ranks)" if len(different) > _MAX_SHOWN else ""
    raise ReplayError(
        f"step {step}, computed twice from the same state, gave other bits the second time. First "
        f"difference on {'; '.join(shown)}{more}. A machine errs, or an operation is not "
        "deterministic: test the machine of the first rank named, and go on from the last "
        "checkpoint with --resume auto",
        different[0][1],
    )


def _state_tensors(run: Run) -> dict[str, Tensor]:
    """Return all tensors that a step changes on this rank, by name."""
    # Reading encoded moments does not wait for a step in the background.
    Parts(run.model).finish_pending_work("computing a step twice")
    tensors: dict[str, Tensor] = {}
    for name, param in run.model.named_parameters():
        tensors[f"parameter '{name}'"] = local_of(param)
        for key, value in sorted(run.optimizer.state.get(param, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"parameter '{name}', {key}"] = local_of(value)
    for name, buffer in run.model.named_buffers():
        tensors[f"buffer '{name}'"] = buffer
    return tensors


def _digests(run: Run, numbers: dict[str, float]) -> dict[str, str]:
    """Return the digest of each number and each tensor; the last number is compared last."""
    *first, last = numbers
    digests = {label: numbers[label].hex() for label in first}
    for label, tensor in _state_tensors(run).items():
        digests[label] = digest_of(memory_of(tensor.contiguous().cpu()))
    return {**digests, last: numbers[last].hex()}


@torch.no_grad()
def _snapshot(run: Run) -> Callable[[], None]:
    """Copy the state that a step changes on this rank; return the function that restores it."""
    tensors = {label: tensor.clone() for label, tensor in _state_tensors(run).items()}
    state, scaler = run.optimizer.state, run.scaler.state_dict()
    others = {
        param: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for param, values in state.items()
    }
    generators = read_generators(run.device)

    @torch.no_grad()
    def restore() -> None:
        for label, tensor in _state_tensors(run).items():
            if label in tensors:
                tensor.copy_(tensors[label])
        for param in list(state):
            if param in others:
                state[param].update(others[param])
            else:
                del state[param]  # the step made it
        run.scaler.load_state_dict(scaler)
        set_generators(generators, run.device)

    return restore
