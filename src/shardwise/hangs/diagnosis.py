"""Diagnosis of a wait: which ranks keep it from ending, found by a walk over heartbeats.

Note [A wait that has no end]
A collective needs all ranks of its group. If rank 0 waits in one that rank 1 has not begun, and
rank 1 waits in one that rank 0 has not begun, neither ever begins another. A heartbeat has the wait
and the number of collectives that the rank has begun by key, which cannot change while it waits. So
if ranks wait for each other in a circle, and each is still in the same wait at its next look, that
is a proof, however slow the machine or the network is.

Note [Four words]
A missing rank has *never entered* the collective: dead, stopped, or in the same line since. Or it
is *late*: it has computed, or begun other collectives meanwhile. Ranks that wait in different calls
are *mismatched*. If all ranks have begun it they are *stuck inside*: the network or a device is at
fault, or a process was stopped there.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey, describe_key, name_ranks
from shardwise.comm.process_groups import timeout_s_of, waits_block
from shardwise.hangs.heartbeat import (
    ENDED_WELL,
    FAILED,
    Heartbeat,
    Heartbeats,
    WaitRecord,
    WatchStore,
)
from shardwise.hangs.waits import (
    CollectiveCounts,
    TorchCall,
    Wait,
    computed_s,
    lines_of_main,
    num_begun,
)
from shardwise.processes import Life

MAX_RANKS = 256  # that one rank reads: the store must serve all ranks that look
_NEAR = 32  # that are read at each look
_FIND_CAUSE_S = 3.0  # a rank may be about to publish why it has ended
_POLL_S = 0.1
_MAX_SHOWN = 8
_COMPUTES = 0.1  # share of the time on a core above which a rank is not asleep
_SILENT = "it does not answer: stopped, dead, or in a call that does not let Python go on"
_REMEDY = (
    "Every rank must make the same calls and run the same units in the same order. Where ranks may "
    "skip layers (layerdrop, stochastic depth, experts, a head per task), name them: "
    "shard(..., units=Units(optional=[...])); stages 0 to 2 need no such list"
)


class HangFinder:
    """This rank's heartbeats in the store, and the verdicts that follow from those of others."""

    def __init__(self) -> None:
        self.counts = CollectiveCounts()
        self.failure = ""  # the error that this rank raises, until it begins another collective
        self._exit: tuple[str, str, bool] = ("", "", False)
        self._store: tuple[dist.Store, WatchStore] | None = None
        self._heard = Heartbeats(1.0)
        self._beats, self._changes = 0, -1
        self._suspects: dict[int, WaitRecord] = {}
        self._publishing = threading.Lock()

    @property
    def store(self) -> WatchStore:
        """The store of the current process group. **Raises** ValueError if there is no group."""
        store = dist.distributed_c10d._get_default_store()
        if self._store is None or self._store[0] is not store:
            self._store = store, WatchStore(store)
            self._heard = Heartbeats(self._heard.look_every_s)  # of other processes
        return self._store[1]

    def start(self, look_every_s: float) -> None:
        """Publish that this rank is there."""
        self._heard = Heartbeats(look_every_s)
        self.publish()

    def publish(self, wait: Wait | None = None) -> None:
        """Publish a heartbeat; ``wait`` is the main thread's. **Cost** a message to the store."""
        with self._publishing:
            self._beats += 1
            changes = self.counts.total + num_begun()
            is_idle = changes == self._changes
            self._changes = changes
            self.store.publish(self._heartbeat(wait, is_idle))

    def publish_exit(self, left: str, came: str = "", follows: bool = False) -> None:
        """Publish how this rank's program ends; see `Heartbeat`."""
        self._exit = left, came, follows
        self.publish()

    def _heartbeat(self, wait: Wait | None, has_counts: bool = True) -> Heartbeat:
        left, came, follows = self._exit
        last, number = self.counts.last
        record = None
        with suppress(KeyError, ValueError):  # the group was destroyed
            record = None if wait is None else wait.record()
        return Heartbeat(
            beat=self._beats,
            process=self._heard.process,
            last=last,
            number=number,
            changes=self._changes,
            computed_s=computed_s(),
            where=lines_of_main(),
            begun=dict(self.counts.by_key) if has_counts or wait or self.failure or left else {},
            wait=record,
            failed=self.failure,
            left=left,
            came=came,
            follows=follows,
        )

    def hear(self, look_every_s: float) -> None:
        """Read which processes the nearest ranks are, before the store may end with one of them."""
        self._heard.look_every_s = look_every_s
        ranks = {0, *nearest_ranks(range(dist.get_world_size()), dist.get_rank(), _NEAR)}
        list(read_heartbeats(self.store, self._heard, sorted(ranks)))

    def judge(self, wait: Wait, limit_s: float | None) -> str | None:
        """Return why a wait cannot end, or that it is over its limit; None while it may end.

        Verdicts of other ranks count too. Replicas wait for a rank of a circle in another group.
        """
        if (told := self.store.verdict(wait.key.group_name)) is not None:
            return told
        is_over = limit_s is not None and wait.waited_s >= limit_s and wait.looks > 1
        graph = self.graph(wait, MAX_RANKS if is_over else _NEAR)
        if wait.number and (verdict := self._judge_circle(wait, graph)) is not None:
            return verdict
        if wait.looks == 1:
            return None
        if (told := self.store.verdict("", self._near_and_self(wait))) is not None:
            return told
        if wait.looks == 2:
            self._heard.forget()  # the progress of others counts from now on
        if not is_over and not graph.gone:
            return None
        why = FAILED if graph.gone else f"it has not ended in {wait.waited_s:.0f} s: "
        verdict = why + describe_waits(graph)
        self._tell(wait.key, graph, verdict)
        return verdict

    def _judge_circle(self, wait: Wait, graph: WaitGraph) -> str | None:
        """Return a verdict if the wait is in a circle, or leads to one, that is proven."""
        circle = find_circle(graph.waiting, dist.get_rank())
        waits = {rank: record for rank in circle if (record := graph.waiting[rank].wait)}
        before = self._suspects
        if {r: w.serial for r, w in waits.items()} != {r: w.serial for r, w in before.items()}:
            self._suspects = before = waits
        if not waits or any(waits[rank].look == before[rank].look for rank in waits):
            return None  # a rank has not looked again yet, and may be out of that wait
        verdict = describe_circle(waits)
        self.store.tell(wait.key.group_name, circle, verdict)
        return verdict

    def graph(self, wait: Wait, max_ranks: int = MAX_RANKS) -> WaitGraph:
        """Return the ranks that keep a wait from ending, see `walk_waits`.

        **Raises** KeyError if the group was destroyed.
        """
        own = self._heartbeat(wait)
        if own.wait is None:
            raise KeyError(wait.key.group_name)
        return walk_waits(self.store, self._heard, own, max_ranks)

    def _near_and_self(self, wait: Wait) -> list[int]:
        return [dist.get_rank(), *nearest_ranks(wait.ranks, dist.get_rank(), _NEAR)]

    def judge_without_store(self, wait: Wait) -> str:
        """Return the verdict about a wait that is over its limit while the store does not answer.

        As a rule it is rank 0's, and that rank is stopped, as the system can tell.
        """
        own = self._heartbeat(wait)
        graph = WaitGraph({dist.get_rank(): own}, missing={0: "the missing rank is unknown"})
        if dist.get_rank() != 0 and self._heard.life(0)[0] != "alive":
            graph.missing[0] = describe_rank(0, "", self._heard, own.wait)
        silent = (
            "the store of the process group does not answer, which rank 0 or the launcher keeps"
        )
        return f"{silent}: {describe_waits(graph)}"

    def _tell(self, key: CollectiveKey, graph: WaitGraph, verdict: str) -> None:
        # A verdict about a rank stays, and ranks survive a small exchange: tell only its group.
        self.store.tell(key.group_name, graph.ranks if key.axis else (), verdict)

    def limit_s(self, wait: Wait, asked_s: float | None) -> float | None:
        """Return when a wait is broken off; None if its own timeout ends it with a verdict."""
        look_s = self._heard.look_every_s
        if not wait.key.axis:  # small exchanges end by themselves
            return None if asked_s is None else asked_s + look_s
        if asked_s is not None or (wait.call is None and waits_block(wait.key.group)):
            return asked_s
        own_s = timeout_s_of(wait.key.group)
        return None if own_s is None else own_s - 3 * look_s

    def tell_cause(self, key: CollectiveKey, verdict: str) -> None:
        """Tell ranks that wait for this one, or in this collective, the cause of its failure."""
        with suppress(RuntimeError, ValueError):
            self.store.tell(key.group_name, [dist.get_rank()], verdict)

    def find_cause(
        self, key: CollectiveKey, reason: str, call: TorchCall | None, has_store: bool
    ) -> str:
        """Return why a collective has failed: a verdict, or the ranks that are gone, or ``reason``.

        It waits a little for a rank that is about to die, or to publish why it has ended.
        """
        wait = Wait(key, self.counts.by_key[key.key], time.monotonic(), call=call)
        if not has_store:
            return f"{reason}; {self.judge_without_store(wait)}"
        try:
            num_ranks = len(wait.ranks)
            graph = WaitGraph({dist.get_rank(): self._heartbeat(wait)})
        except (KeyError, ValueError):  # the group was destroyed: its ranks are unknown
            return reason
        timed_out = "imed out" in reason or "did not come within" in reason
        first_beats: dict[int, int] = {}
        while has_store and wait.waited_s < _FIND_CAUSE_S:
            told = None
            try:
                told = self.store.verdict(key.group_name, self._near_and_self(wait))
            except dist.DistNetworkError:  # only the heartbeats that were read before are left
                has_store = False
            except (RuntimeError, ValueError):  # the process group was destroyed
                pass
            if told is not None:
                self.tell_cause(key, told)
                return told
            with suppress(ValueError):
                graph = self.graph(wait)
            graph.gone = graph.gone or graph.unexplained
            num_gone = len(graph.gone) + len(graph.followers)
            if timed_out or (graph.gone and (call is None or num_gone == num_ranks - 1)):
                break
            if graph.missing and self._all_alive(graph, first_beats):
                return reason
            time.sleep(_POLL_S)
        if not timed_out and not graph.gone:
            return reason
        verdict = (FAILED if graph.gone else f"{reason}. ") + describe_waits(graph)
        with suppress(RuntimeError, ValueError):
            self._tell(key, graph, verdict)
        return verdict

    def _all_alive(self, graph: WaitGraph, first_beats: dict[int, int]) -> bool:
        """Tell whether all other ranks have published twice since the first call."""
        others = {rank: self._heard.newest(rank) for rank in graph.ranks if rank != dist.get_rank()}
        beats = {rank: beat.beat for rank, beat in others.items() if beat is not None}
        for rank, beat in beats.items():
            first_beats.setdefault(rank, beat)
        return len(beats) == len(others) and all(b >= first_beats[r] + 2 for r, b in beats.items())


@dataclass
class WaitGraph:
    """The ranks that a wait needs, and in turn the ranks that these wait for.

    ``waiting`` has those that wait, ``elsewhere`` those of them that wait in another collective.
    ``missing`` has a description of each other one. Of these, ``gone`` never come: they have died
    or failed; ``followers`` have ended because of another rank; ``unexplained`` have died, and
    with no cause from them or the system. ``arguments`` are those of calls of torch's.
    """

    waiting: dict[int, Heartbeat]
    missing: dict[int, str] = field(default_factory=dict)
    elsewhere: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)
    unexplained: list[int] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """All ranks of the graph."""
        return sorted({*self.missing, *self.waiting})


def walk_waits(
    store: WatchStore,
    heard: Heartbeats,
    own: Heartbeat,
    max_ranks: int = MAX_RANKS,
) -> WaitGraph:
    """Walk from this rank's wait to all ranks that keep it from ending.

    ``own`` is this rank's heartbeat. At most about ``max_ranks`` are read, the nearest first.

    **Cost** two requests to the store for each group of ranks on the way.
    """
    assert own.wait is not None
    trains, kind = own.wait.trains, own.wait.came.partition(" of ")[0]
    graph = WaitGraph({store.rank: own}, arguments={store.rank: own.wait.came})

    def add_missing(rank: int, beat: Heartbeat | None, wait: WaitRecord | None) -> None:
        life, cause = heard.life(rank)
        failed = beat.failed if beat and (trains or wait is None) else ""
        left = beat.left if beat else ""
        if failed or _is_gone(beat, life, cause, wait):
            (graph.followers if beat and left and beat.follows else graph.gone).append(rank)
        elif life == "dead" and not (cause or left):
            graph.unexplained.append(rank)
        graph.missing[rank] = describe_rank(rank, failed, heard, wait)

    seen, todo = {store.rank}, [(store.rank, own.wait)]
    while todo and len(seen) < max_ranks:
        at, wait = todo.pop(0)
        others = [rank for rank in nearest_ranks(wait.ranks, at, max_ranks) if rank not in seen]
        seen.update(others)
        for rank, beat in read_heartbeats(store, heard, others):
            if beat and beat.arguments.partition(" of ")[0] == kind:
                graph.arguments[rank] = beat.arguments
            is_there = beat is not None and heard.life(rank)[0] == "alive" and not beat.left
            if beat and beat.wait and is_there and not (beat.failed and trains):
                graph.waiting[rank] = beat
                if not beat.has_begun(wait):
                    graph.elsewhere.append(rank)
                    todo.append((rank, beat.wait))
            else:
                add_missing(rank, beat, wait)
    if graph.followers and not graph.gone:
        # A victim takes with it ranks that are in no group with the rank that has died.
        near = nearest_ranks(range(store.num_ranks), store.rank, MAX_RANKS)
        others = [rank for rank in near if rank not in graph.ranks]
        for rank, beat in read_heartbeats(store, heard, others):
            if beat is None or beat.follows or beat.left == ENDED_WELL:
                continue
            if beat.left or beat.failed or heard.life(rank)[0] == "dead":
                add_missing(rank, beat, None)
        graph.gone = graph.gone or graph.unexplained
    return graph


def read_heartbeats(
    store: WatchStore, heard: Heartbeats, ranks: Sequence[int]
) -> Iterator[tuple[int, Heartbeat | None]]:
    """Yield each rank's newest heartbeat, after noting it in ``heard``.

    If the store has ended, what a rank waited in when it was last heard is out of date: left out.
    """
    found: Mapping[int, Heartbeat] = {}
    is_stale = False
    try:
        found = store.read(ranks)
    except (RuntimeError, ValueError):  # the store may have ended with rank 0
        is_stale = True
    for rank, beat in found.items():
        heard.add(rank, beat)
    for rank in ranks:
        newest = heard.newest(rank)
        if newest is not None and is_stale:
            newest = replace(newest, wait=None, failed="")
        yield rank, newest


def nearest_ranks(ranks: Sequence[int], rank: int, most: int) -> list[int]:
    """Return other ranks of a group, the nearest to a rank first."""
    at = ranks.index(rank) if rank in ranks else 0
    ordered = sorted(range(len(ranks)), key=lambda place: abs(place - at))
    return [ranks[place] for place in ordered if ranks[place] != rank][:most]


def find_circle(waiting: Mapping[int, Heartbeat], rank: int) -> list[int]:
    """Return ranks that wait for each other, reached from one rank, if there are any.

    See Note [A wait that has no end].
    """
    path, seen = list[int](), set[int]()

    def visit(at: int) -> list[int]:
        if at in path:
            return path[path.index(at) :]
        wait = waiting[at].wait
        if at in seen or wait is None or not wait.is_counted:
            return []
        seen.add(at)
        path.append(at)
        for other in wait.ranks:
            is_needed = other != at and other in waiting and not waiting[other].has_begun(wait)
            if is_needed and (circle := visit(other)):
                return circle
        path.pop()
        return []

    return visit(rank)


def describe_circle(waits: Mapping[int, WaitRecord]) -> str:
    """Return the verdict about ranks that wait for each other."""
    parts = [f"rank {rank} waits in {waits[rank].text}" for rank in sorted(waits)]
    return f"{', and '.join(parts)}, for each other. {_REMEDY}"


def describe_waits(graph: WaitGraph) -> str:
    """Return the verdict about a graph, in sentences."""
    sentences: list[str] = []
    if len(set(graph.arguments.values())) > 1:
        came = (f"rank {rank} came with {text}" for rank, text in sorted(graph.arguments.items()))
        sentences.append(f"the ranks are mismatched: {', '.join(came)}")
    if graph.missing:
        shown = graph.gone or list(graph.missing)
        sentences += [graph.missing[rank] for rank in shown[:_MAX_SHOWN]]
        sentences += [f"and {len(shown) - _MAX_SHOWN} more"] * (len(shown) > _MAX_SHOWN)
    elif graph.elsewhere and not sentences:
        sentences = ["the ranks are mismatched, each of them waits for others that are elsewhere"]
    elif not sentences:
        sentences = [
            "all ranks have begun it, and are stuck inside: a network or a device is slow, or hangs"
        ]
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, beat in sorted(graph.waiting.items()):
        by_text[beat.wait.text if beat.wait else ""].append(rank)
    waiting = (f"{name_ranks(ranks)} in {text}" for text, ranks in by_text.items())
    return f"{'; '.join(sentences)}. Waiting: {'; '.join(waiting)}"


def describe_rank(rank: int, failed: str, heard: Heartbeats, wait: WaitRecord | None) -> str:
    """Return the description of a rank that is missing in a wait; None is any wait."""
    beat = heard.newest(rank)
    if beat is None:
        told = f"rank {rank} is in no call of Shardwise, and does not answer: it may not have begun"
        return failed.removeprefix(FAILED) or told
    last = f"; its last collective: {describe_key(beat.last)}" if beat.last else ""
    return (failed.removeprefix(FAILED) or _state_of(rank, beat, heard, wait)) + last


def _state_of(rank: int, beat: Heartbeat, heard: Heartbeats, wait: WaitRecord | None) -> str:
    who = f"rank {rank} ({beat.process})"
    is_inside = wait is not None and wait.is_counted and beat.has_begun(wait)
    entered = "is stuck inside it too" if is_inside else "has never entered it"
    life, cause = heard.life(rank)
    if beat.left == ENDED_WELL:
        return (
            f"{who} has ended without an error, after fewer collectives than this rank: if ranks "
            "have different numbers of batches, iterate over "
            "shardwise.parallel.join(model, batches)"
        )
    if beat.left:
        return f"{who} has ended: {beat.left}"
    if life == "dead":
        by = f"ended by {cause}" if cause else "killed or crashed, as its launcher's log may tell"
        if cause.startswith("signal 6 "):
            by += ", which is what gloo does to a rank that is sent more bytes than it expects"
        return f"{who} has died: {by}"
    if life == "stopped":
        return f"{who} {entered}: it is stopped (by SIGSTOP, or a debugger)"
    if life == "silent" or heard.is_silent(rank):
        return f"{who} {entered}: {_SILENT}"
    has_begun_more, core_s, since_s = heard.progress(rank)
    state = f"and {entered.replace('it', 'this one', 1)}"
    if has_begun_more:
        state = "and is late: it has been in other collectives meanwhile"
    elif core_s > _COMPUTES * since_s:
        state = f"and is late: it has computed for {core_s:.1f} s meanwhile"
    place = f", but {beat.where}," if beat.where else ""
    return f"rank {rank} is in no call of Shardwise{place} {state} ({beat.process})"


def _is_gone(beat: Heartbeat | None, life: Life, cause: str, wait: WaitRecord | None) -> bool:
    """Tell whether a rank has ended, and is needed in a wait; None is any wait.

    A rank that has ended without an error may have done its part: of a message, or of a collective
    of other ranks. It is missing only from a call that needs all ranks, and that it has not begun.
    """
    left = beat.left if beat is not None else ""
    if life == "dead" and cause.startswith("signal"):
        return True
    has_begun = beat is not None and wait is not None and wait.is_counted and beat.has_begun(wait)
    if (life != "dead" and not left) or has_begun:
        return False
    return (wait is not None and wait.needs_all) or left not in ("", ENDED_WELL)
