"""The exchange of rows through a store, before ranks have a process group.

The error of a process group that cannot be opened rarely names the missing rank. Here rank 0
collects the rows, so it knows the ranks that are late, and sends instructions to the others.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.errors import CollectiveError
from shardwise.train.launch import RankPlace

Row = dict[str, Any]  # JSON
_MARGIN_S, _GOODBYE_S = 2.0, 10.0


class MissingRanksError(CollectiveError):
    """Some ranks sent no row in time; ``ranks`` are their numbers."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        """Keep the ranks."""
        super().__init__(message)
        self.ranks = ranks


class Meeting:
    """The exchanges of one rank with rank 0; a rank may be late by ``timeout_s``."""

    def __init__(self, store: dist.Store, place: RankPlace, timeout_s: float) -> None:
        # Ranks that an elastic launcher starts again may find the store of those before.
        self.store = dist.PrefixStore(f"shardwise/preflight/{place.world_size}", store)
        self.place = place
        self.timeout_s = timeout_s
        self._late: list[int] = []

    def gather(self, name: str, row: Row) -> list[Row] | None:
        """Send this rank's row; return all rows in rank order on rank 0, None on the others.

        **Raises** MissingRanksError on rank 0, CollectiveError on a rank that reaches no store.
        """
        try:
            self.store.set(f"{name}/{self.place.rank}", json.dumps(row))
        except RuntimeError as error:
            raise self._lost(name, error) from None
        if self.place.rank:
            return None
        keys = [f"{name}/{rank}" for rank in range(self.place.world_size)]
        try:
            # A rank whose work timed out sends a row about it, a little after its time.
            self.store.wait(keys, timedelta(seconds=self.timeout_s + _MARGIN_S))
        except RuntimeError:
            self._late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if self._late:
                text = f"nothing came from them within {self.timeout_s:g} s"
                raise MissingRanksError(text, self._late) from None
        return [json.loads(self.store.get(key)) for key in keys]

    def broadcast(self, name: str, row: Row | None) -> Row:
        """Send rank 0's row to all ranks; return it.

        **Raises** CollectiveError on a rank that hears nothing from rank 0.
        """
        key = f"{name}/broadcast"
        if not self.place.rank:
            self.store.set(key, json.dumps(row))
        try:
            # Rank 0 may have waited for another rank, after all its time for the part.
            self.store.wait([key], timedelta(seconds=2 * self.timeout_s + _GOODBYE_S))
            return dict(json.loads(self.store.get(key)))
        except RuntimeError as error:
            raise self._lost(name, error) from None

    def _lost(self, name: str, error: RuntimeError) -> CollectiveError:
        return CollectiveError(
            f"preflight: rank {self.place.rank} heard nothing from rank 0, which judges what the "
            f"ranks find, in the part '{name}': {error}. Look at the log of rank 0"
        )

    def leave(self) -> None:
        """Let rank 0, which may hold the store, wait until the others need it no more."""
        with suppress(RuntimeError):  # the store has ended with rank 0
            num_left = self.store.add("left", 1)
            num = self.place.world_size - len(self._late) if self.place.rank == 0 else 0
            until_s = time.monotonic() + _GOODBYE_S
            while num_left < num and time.monotonic() < until_s:
                time.sleep(0.05)
                num_left = self.store.add("left", 0)


def open_store(environment: Mapping[str, str], place: RankPlace, timeout_s: float) -> dist.Store:
    """Connect to the store that the launcher's variables name; rank 0 opens it if no agent has.

    No rank waits here for the others. **Raises** CollectiveError with the address.
    """
    if place.world_size == 1:
        return dist.HashStore()
    host, port = environment.get("MASTER_ADDR", "?"), environment.get("MASTER_PORT", "0")
    is_agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        return dist.TCPStore(
            host,
            int(port),
            is_master=place.rank == 0 and not is_agents,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"preflight: rank {place.rank} on {os.uname().nodename} cannot reach the store at "
            f"{host}:{port} (MASTER_ADDR, MASTER_PORT), where ranks meet: {error}. Check that the "
            "name leads to an address of the first node, and that no firewall closes the port"
        ) from None
