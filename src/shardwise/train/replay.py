"""Compute a step twice from the same state and compare the bits, to find a faulty machine.

Note [Errors that a replay finds]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The same operations on the same bits give the same bits. If they do not, memory, a processor or an
accelerator failed, or an operation is not deterministic. An error before gradients are reduced
reaches all ranks with the sum, so all differ; the rank whose own loss differs is named first. An
error after that differs on one rank alone, until the next gather. A machine that makes the same
error twice is not found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.checkpoint.container import memory_of
from shardwise.checkpoint.digest import digest_of
from shardwise.checkpoint.generators import read_generators, set_generators
from shardwise.engine.parts import Parts
from shardwise.errors import StateError
from shardwise.layout.placements import local_of
from shardwise.train.setup import Run, gather_integers

_MAX_SHOWN = 3
_T = TypeVar("_T")


class ReplayError(StateError):
    """A step gave other bits the second time; the text is the same on every rank.

    Test the machine of the first rank that is named, and continue with `--resume auto`.
    """


@dataclass(frozen=True)
class _Snapshot:
    """Copies of everything that a step reads and changes on this rank."""

    values: list[Tensor]
    optimizer: dict[Tensor, dict[str, Any]]
    scaler: dict[str, Any]
    generators: dict[str, Any]


def compute_twice(
    run: Run, compute: Callable[[], _T], numbers_of: Callable[[_T], dict[str, float]]
) -> tuple[_T, int]:
    """Call `compute` (one step) twice from the same state; return its second result.

    The second value is the position of the first difference, among the state and the numbers that
    `numbers_of` returns, as `raise_difference` takes it; 0 means none.

    **Cost** a copy of this rank's state while it runs, a second step, two passes of xxh3-128.
    """
    before = _copy(run)
    result = compute()
    first = _digests(run, numbers_of(result))
    _restore(run, before)
    result = compute()
    second = _digests(run, numbers_of(result))
    differs = (n for n, k in enumerate(second, start=1) if first.get(k) != second[k])
    return result, next(differs, 0)


def raise_difference(run: Run, step: int, difference: int, numbers: dict[str, float]) -> None:
    """Raise a ReplayError that lists each rank's difference, the same on all ranks.

    Every rank calls it if any has a difference.
    """
    labels = list(_digests(run, numbers))
    found = sorted((n, rank) for rank, n in enumerate(gather_integers(run.place, difference)) if n)
    shown = [f"rank {rank}: {labels[n - 1]}" for n, rank in found[:_MAX_SHOWN]]
    more = f" (and {len(found) - _MAX_SHOWN} more ranks)" if len(found) > _MAX_SHOWN else ""
    raise ReplayError(
        f"step {step}, computed twice from the same state, gave other bits the second time. First "
        f"difference on {'; '.join(shown)}{more}. A machine errs, or an operation is not "
        "deterministic: test the machine of the first rank named, and go on from the last "
        "checkpoint with --resume auto"
    )


def _state_tensors(run: Run) -> dict[str, Tensor]:
    """Return all tensors that a step changes on this rank, by name."""
    _rest(run)
    found: dict[str, Tensor] = {}
    for name, param in run.model.named_parameters():
        found[f"parameter '{name}'"] = local_of(param)
        for key, value in sorted(run.optimizer.state.get(param, {}).items()):
            if isinstance(value, Tensor):
                found[f"parameter '{name}', {key}"] = local_of(value)
    for name, buffer in run.model.named_buffers():
        found[f"buffer '{name}'"] = buffer
    return found


def _digests(run: Run, numbers: dict[str, float]) -> dict[str, str]:
    """Return the digest of each number and each tensor; the last number is compared last."""
    *own, last = numbers
    found = {label: numbers[label].hex() for label in own}
    for label, tensor in _state_tensors(run).items():
        found[label] = digest_of(memory_of(tensor.contiguous().cpu()))
    return {**found, last: numbers[last].hex()}


def _rest(run: Run) -> None:
    """Wait for a step in the background, as reading encoded moments does not wait for it."""
    Parts(run.model).rest("computing a step twice")


@torch.no_grad()
def _copy(run: Run) -> _Snapshot:
    _rest(run)
    model, optimizer = run.model, run.optimizer
    return _Snapshot(
        [local_of(tensor).clone() for tensor in (*model.parameters(), *model.buffers())],
        {
            param: {
                key: local_of(value).clone() if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
            for param, state in optimizer.state.items()
        },
        run.scaler.state_dict(),
        read_generators(run.device),
    )


@torch.no_grad()
def _restore(run: Run, before: _Snapshot) -> None:
    """Put the copies back in place; remove optimizer state that did not exist yet."""
    model, optimizer = run.model, run.optimizer
    for tensor, value in zip((*model.parameters(), *model.buffers()), before.values, strict=True):
        local_of(tensor).copy_(value)
    for param in list(optimizer.state):
        if param not in before.optimizer:
            del optimizer.state[param]
            continue
        for key, value in before.optimizer[param].items():
            if isinstance(value, Tensor):
                local_of(optimizer.state[param][key]).copy_(value)
            else:
                optimizer.state[param][key] = value
    run.scaler.load_state_dict(before.scaler)
    set_generators(before.generators, run.device)
