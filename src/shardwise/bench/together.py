"""A stopwatch for several ranks at once: what each does is timed while all the others do it too.

Note [All ranks at once]
The ranks of one machine share its cores, its memory and its network, and in a training step they
do the same at the same time. A kernel timed by one rank alone would be too fast, by a factor of two
where four ranks share two cores. So every measurement begins together, lasts for a window of time
rather than for a number of calls, and is the mean over the ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import all_reduce_scalars


@dataclass(frozen=True)
class Pace:
    """How long to measure: a window, how many at most, how long in all.

    A sweep of sizes ends with the first call that takes ``longest_call_s``.
    """

    window_s: float
    num_windows: int
    most_s: float
    longest_call_s: float


FULL = Pace(0.05, 5, 0.5, 0.03)
QUICK = Pace(0.005, 1, 0.05, 0.002)


class Stopwatch:
    """Times work on this rank's device, together with the other ranks."""

    def __init__(self, device: torch.device, num_ranks: int, pace: Pace) -> None:
        self.device = device
        self.num_ranks = num_ranks
        self.pace = pace

    def now(self) -> float:
        """Return the clock once the device has done everything that was issued."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        all_reduce_scalars([0.0])

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the means over the ranks, the same on every rank."""
        return [total / self.num_ranks for total in all_reduce_scalars(values)]

    def parts(self, work: Callable[[], Sequence[float]], *, in_step: bool = False) -> list[float]:
        """Return the seconds of each part of ``work``, which times its parts itself.

        The lower quartile of the windows, since other processes only add, and the mean over the
        ranks; see Note [All ranks at once]. With ``in_step`` all ranks make the same number of
        calls, as they must if ``work`` communicates.
        """
        work()
        pace = self.pace
        (call_s,) = self.mean([sum(work())])
        calls = max(1, math.ceil(pace.window_s / call_s)) if in_step else None
        num_windows = max(1, min(pace.num_windows, int(pace.most_s / max(call_s, pace.window_s))))
        windows = [self._window(work, calls) for _ in range(num_windows)]
        quartile = (num_windows - 1) // 4
        return self.mean([sorted(part)[quartile] for part in zip(*windows, strict=True)])

    def seconds(self, work: Callable[[], object], *, in_step: bool = False) -> float:
        """Return the seconds of one call of ``work``; see `parts`."""

        def timed() -> tuple[float]:
            begin = self.now()
            work()
            return (self.now() - begin,)

        return self.parts(timed, in_step=in_step)[0]

    def _window(self, work: Callable[[], Sequence[float]], num_calls: int | None) -> list[float]:
        self.wait_for_all()
        end = time.perf_counter() + self.pace.window_s
        calls = [work()]
        while time.perf_counter() < end if num_calls is None else len(calls) < num_calls:
            calls.append(work())
        return [sum(part) / len(calls) for part in zip(*calls, strict=True)]

    def sweep(
        self, sizes: Sequence[int], measure: Callable[[int], Sequence[float]]
    ) -> list[tuple[int, Sequence[float]]]:
        """Measure growing sizes until a call takes too long; at least two sizes."""
        found: list[tuple[int, Sequence[float]]] = []
        for size in sizes:
            parts = measure(size)  # the same on every rank, so that all stop at the same size
            found.append((size, parts))
            if len(found) > 1 and sum(parts) > self.pace.longest_call_s:
                break
        return found
