"""Trials of the campaigns `crashes` and `errors`: ranks in lockstep on a simulated disk."""

import errno
from contextlib import suppress

from disk import Fault, Killed, PowerCut
from shardwise.checkpoint.folder import clean_up
from shardwise.checkpoint.write import Written
from tables import (
    RUN,
    Verdicts,
    assert_an_error_leaves_nothing,
    disk_with,
    kept,
    run_ranks_on,
    write,
    write_and_rotate,
)

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


def _save(mode):
    def body(files, control):
        if mode == "replace":
            return write(files, control, "B", 1, replace=True)
        return (write_and_rotate if mode == "rotating" else write)(files, control, "B", 2)

    return body


def crash(number, rng):
    """Cut the power at some operation of a save, in some order of the ranks; try what may be left.

    Before it a rank may be killed, and the cut comes in the next run's clean-up.
    """
    ranks, mode = rng.randint(1, 4), rng.choice(("new", "replace", "rotating"))
    seed, killed = rng.randrange(1 << 32), rng.random() < 0.4
    start = disk_with(ranks, {1: "A"})
    whole = kept(start)
    run_ranks_on(whole, ranks, _save(mode), seed)
    at = rng.randrange(len(whole.operations) + 1)
    disk, faults = kept(start), {}
    if killed:
        when = rng.choice(("before", "middle", "after"))
        faults = {rng.randrange(ranks): (Fault(at // ranks, when=when),)}
    else:
        disk.crash_at = at
    results, _ = run_ranks_on(disk, ranks, _save(mode), seed, faults)
    if killed and any(isinstance(result, Killed) for result in results):
        disk.crash_at = len(disk.operations) + rng.randrange(20)
        with suppress(PowerCut):
            clean_up(disk, RUN)
    disk.crash_at = None
    old, new = (1, "A"), (1 if mode == "replace" else 2, "B")
    told = any(isinstance(result, Written) for result in results)
    found = set(Verdicts(ranks).after_power_cut(disk, 256, seed))
    assert found <= ({new} if told else {old, new}), (ranks, mode, at, faults, found)
    return " or ".join(sorted(save for _, save in found if save))


def fail(number, rng):
    """Fail one operation of one rank or of several, once or from then on."""
    ranks, replace = rng.randint(1, 4), rng.random() < 0.5
    chosen = rng.sample(range(ranks), rng.randint(1, ranks))
    error, lasting = rng.choice(ERRNOS), rng.random() < 0.2
    op = rng.choice((None, None, None, "sync", "sync_folder", "write"))
    faults = {
        rank: Fault(rng.randrange(40 if op is None else 6), error, op, lasting=lasting)
        for rank in chosen
    }
    return assert_an_error_leaves_nothing(ranks, faults, replace, rng.randrange(1 << 32))
