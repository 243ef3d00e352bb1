"""Figures that are read where they stand, once for each line: memory, padding, waits for a core."""

import threading
from collections.abc import Mapping

import torch

from shardwise.device import memory_figures
from shardwise.host import core_wait_s
from shardwise.monitor.metrics import (
    CORE_WAIT_S,
    GIB,
    MAX_ACTIVE_GIB,
    MAX_ACTIVE_SHARE,
    MAX_RESERVED_GIB,
    OOMS,
    PADDING_SHARE,
    RETRIES,
)
from shardwise.monitor.record import RunFacts


class Standing:
    """Reads them for the thread that makes it, which is the one that trains; any may ask.

    **Cost** some system calls, 0.1 to 0.3 ms: so not on the thread that trains.
    """

    def __init__(self, facts: RunFacts, device: torch.device) -> None:
        self._facts = facts
        self._device = device
        self._thread = threading.get_native_id()
        self._core_wait_s = core_wait_s(self._thread)

    def read(self, num_steps: int) -> Mapping[str, float]:
        """Return the figures now; waits for a core since the last time, for each step."""
        waited_s, self._core_wait_s = self._core_wait_s, core_wait_s(self._thread)
        told = memory_figures(self._device)
        return {
            CORE_WAIT_S: (self._core_wait_s - waited_s) / num_steps,
            PADDING_SHARE: 100 * self._facts.padding_share,
            MAX_ACTIVE_GIB: told.peak_bytes / GIB,
            MAX_RESERVED_GIB: told.reserved_bytes / GIB,
            MAX_ACTIVE_SHARE: 100 * told.peak_bytes / told.capacity_bytes,
            RETRIES: told.num_retries,
            OOMS: told.num_ooms,
        }
