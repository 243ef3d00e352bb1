"""A stopwatch for several ranks at once: work is timed while all ranks do it.

Note [All ranks at once]
The ranks of one machine share its cores, its memory and its network, and in a training step they
do the same at the same time. A kernel timed by one rank alone would be too fast, by a factor of two
where four ranks share two cores. So every measurement begins together, lasts for a window of time
rather than for a number of calls, and is the mean over the ranks.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from shardwise.comm.collectives import all_reduce_scalars


@dataclass(frozen=True)
class Pace:
    """The duration of a measurement: seconds of a window, most windows, most seconds in all.

    A window lasts for ``calls_per_window`` at least: a call that it cuts off is not counted, so let
    that be one of several. A sweep of sizes ends with the first call that takes ``longest_call_s``.
    """

    window_s: float
    num_windows: int
    most_s: float
    longest_call_s: float
    calls_per_window: int

    @property
    def is_rough(self) -> bool:
        """True if a measurement is made only once."""
        return self.num_windows == 1


FULL = Pace(0.05, 5, 0.5, 0.03, 6)
QUICK = Pace(0.005, 1, 0.05, 0.002, 1)


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
        """Wait until every rank has called this."""
        all_reduce_scalars([0.0])

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the means over the ranks, the same on every rank."""
        return [total / self.num_ranks for total in all_reduce_scalars(values)]

    def parts(self, work: Callable[[], Sequence[float]], *, in_step: bool = False) -> list[float]:
        """Return the seconds of each part of ``work``, which times its parts itself.

        The mean of the windows and of the ranks: a step is a sum of many such parts, and of all
        averages only means can be added; see Note [All ranks at once]. With ``in_step`` all ranks
        make the same number of calls, as they must if ``work`` communicates.
        """
        work()
        pace = self.pace
        (call_s,) = self.mean([sum(work())])
        window_s = max(pace.window_s, pace.calls_per_window * call_s)
        num_windows = max(1, min(pace.num_windows, int(pace.most_s / window_s)))
        if in_step:
            count = max(1, math.ceil(window_s / call_s))
            windows = [self._calls(work, count) for _ in range(num_windows)]
        else:
            windows = [self._window(work, window_s, call_s) for _ in range(num_windows)]
        return self.mean([mean(part) for part in zip(*windows, strict=True)])

    def seconds(self, work: Callable[[], object], *, in_step: bool = False) -> float:
        """Return the seconds of one call of ``work``; see `parts`."""

        def timed() -> tuple[float]:
            begin = self.now()
            work()
            return (self.now() - begin,)

        return self.parts(timed, in_step=in_step)[0]

    def _calls(self, work: Callable[[], Sequence[float]], count: int) -> list[float]:
        self.wait_for_all()
        return _means([work() for _ in range(count)])

    def _window(
        self, work: Callable[[], Sequence[float]], window_s: float, call_s: float
    ) -> list[float]:
        """Return the means of the calls within a window; repeat until all ranks have finished.

        A rank that stopped earlier would leave its share of the cores to the others.
        """
        self.wait_for_all()
        end = time.perf_counter() + window_s
        calls = [work()]
        while time.perf_counter() < end + call_s:
            call = work()
            if time.perf_counter() < end:
                calls.append(call)
        return _means(calls)

    def sweep(
        self, sizes: Sequence[int], measure: Callable[[int], Sequence[float]]
    ) -> list[tuple[int, Sequence[float]]]:
        """Measure growing sizes until a call takes too long; at least two sizes."""
        results: list[tuple[int, Sequence[float]]] = []
        for size in sizes:
            parts = measure(size)  # the same on every rank, so that all stop at the same size
            results.append((size, parts))
            if len(results) > 1 and sum(parts) > self.pace.longest_call_s:
                break
        return results


def _means(calls: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each part over the calls."""
    return [mean(part) for part in zip(*calls, strict=True)]
