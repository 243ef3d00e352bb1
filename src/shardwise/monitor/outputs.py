"""The outputs of an observed run on one rank: its files, the doctor and the user's sinks."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol

from shardwise.monitor.lines import JsonLines
from shardwise.monitor.live_run import LiveDoctor
from shardwise.monitor.rank_lines import RankLine, keys_of
from shardwise.monitor.record import StepLine

_LOG = logging.getLogger("shardwise")


class Sink(Protocol):
    """An output of figures besides the run's files."""

    def write(self, line: StepLine) -> None:
        """Take the figures of a few steps; rank 0 calls it, behind the training."""

    def close(self) -> None:
        """Close files and connections."""


class Outputs:
    """The outputs of this rank: its lines and, on rank 0, those of all ranks.

    The first error of writing is logged and ends all writing, but not the training. ``doctor`` and
    ``sinks`` receive each line of all ranks, the doctor those of this rank too.
    """

    def __init__(
        self, rank: int, steps: JsonLines, own: JsonLines, doctor: LiveDoctor, sinks: Sequence[Sink]
    ) -> None:
        self.doctor = doctor
        self._rank = rank
        self._steps, self._own, self._sinks = steps, own, sinks
        self._has_failed = False

    def note(self, line: RankLine) -> None:
        """Write a line of this rank now; any thread may."""
        with self._writing():
            self._own.write(**keys_of(line))

    def write_own(self, line: RankLine) -> None:
        """Write a line of this rank, and tell the doctor."""
        self.note(line)
        self.doctor.note(line)

    def write(self, line: StepLine) -> None:
        """Write a line over all ranks, on rank 0."""
        with self._writing():
            self._steps.write(**asdict(line))
            for sink in (*self._sinks, self.doctor):
                sink.write(line)

    def close(self) -> None:
        """Close all outputs."""
        self._close()
        with self._writing():
            self.doctor.close()

    def _close(self) -> None:
        for close in (self._steps.close, self._own.close, *(sink.close for sink in self._sinks)):
            with self._writing():
                close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._has_failed:
                return
            self._has_failed = True
            _LOG.warning(
                "rank %d: observe() could not write its record of the run and writes no more: "
                "%s: %s",
                *(self._rank, type(error).__name__, error),
            )
            self._close()
            self._sinks = ()
