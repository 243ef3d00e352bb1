"""A kill or a power cut at any operation of a save, a rotation or a clean-up loses nothing.

Two checkpoints at most are in question: "A", which was there, and "B", which was being saved. What
is left must be one of them to the last byte, and B once a rank was told that it is saved. Disks are
simulated (disk.py), so every operation and every loss of what was not synced is tried.
"""

import random
from contextlib import suppress
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disk import Fault, Killed, PowerCut, all_crashes
from shardwise.checkpoint.folder import clean_up, step_name, steps_in
from shardwise.checkpoint.verify import check_quickly
from shardwise.checkpoint.write import Written
from shardwise.comm.control import SoloControl
from shardwise.errors import CollectiveError
from tables import RUN, Verdicts, disk_with, kept, run_ranks_on, write, write_and_rotate

LIMIT = 1024  # disks tried after one power cut, if more are possible
A, B = (1, "A"), (2, "B")
OLD, NEW = (1, "A"), (1, "B")  # under one name
RANKS = [1, 2, 3, 4]


def save(replace):
    """Return a body that saves B: as the next step, or in the place of A."""
    if replace:
        return lambda files, control: write(files, control, "B", 1, replace=True)
    return lambda files, control: write(files, control, "B", 2)


def outcomes(replace):
    return (OLD, NEW) if replace else (A, B)


def cut_everywhere(start, ranks, body, check, seed=None):
    """Cut the power before each operation in turn, and after the last; return their number."""
    for k in count():
        disk = kept(start)
        disk.crash_at = k
        results, _ = run_ranks_on(disk, ranks, body, seed)
        disk.crash_at = None
        check(disk, results)
        if not any(isinstance(result, PowerCut) for result in results):
            assert not any(isinstance(result, BaseException) for result in results), results
            return k


@pytest.mark.parametrize(("ranks", "replace"), [(1, False), (1, True), (2, True)])
def test_a_power_cut_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(ranks, replace):
    """At every one; more ranks are cut at operations that are drawn, see below."""
    old, new = outcomes(replace)
    verdicts, seen = Verdicts(ranks), set()

    def check(disk, results):
        told = any(isinstance(result, Written) for result in results)
        found = set(verdicts.after_power_cut(disk, LIMIT, seed=0))
        assert found <= ({new} if told else {old, new}), (disk.operations, found)
        seen.update(found)

    num_operations = cut_everywhere(disk_with(ranks, {1: "A"}), ranks, save(replace), check)
    assert seen == {old, new} and num_operations > 8 * ranks


@given(
    ranks=st.integers(2, 4),
    replace=st.booleans(),
    seed=st.integers(0, 1 << 32),
    at=st.floats(0, 1),
)
@settings(max_examples=40)
def test_in_whatever_order_the_ranks_run_a_power_cut_leaves_one_checkpoint_whole(
    ranks, replace, seed, at
):
    old, new = outcomes(replace)
    start = disk_with(ranks, {1: "A"})
    whole = kept(start)
    run_ranks_on(whole, ranks, save(replace), seed)
    start.crash_at = int(at * len(whole.operations))
    results, _ = run_ranks_on(start, ranks, save(replace), seed)
    told = any(isinstance(result, Written) for result in results)
    found = set(Verdicts(ranks).after_power_cut(start, 256, seed))
    assert found <= ({new} if told else {old, new}), found


def killed(start, ranks, rank, fault, body, seed=None):
    """Run a body and kill one rank at an operation of its own; the others go on or fail."""
    disk = kept(start)
    results, _ = run_ranks_on(disk, ranks, body, seed, {rank: (fault,)})
    for result in results:
        assert isinstance(result, Written | Killed | CollectiveError | type(None)), result
    return disk, results


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_killed_at_any_of_its_operations_leaves_one_whole_and_the_next_run_saves(
    ranks, replace
):
    old, new = outcomes(replace)
    start, verdicts = disk_with(ranks, {1: "A"}), Verdicts(ranks)
    for rank in {0, ranks - 1}:
        for op, when in ((None, "before"), ("write", "middle"), (None, "after")):
            for at in count():
                fault = Fault(at, op=op, when=when)
                disk, results = killed(start, ranks, rank, fault, save(replace))
                told = any(isinstance(result, Written) for result in results)
                where = f"rank {rank} killed {when} its operation {at}"
                assert verdicts.of(disk) in ({new} if told else {old, new}), where
                if not any(isinstance(result, Killed) for result in results):
                    break
                again, left = the_next_run(disk, ranks)
                assert verdicts.of(disk) == (3, "C") and not again, (where, again, left)


def the_next_run(disk, ranks):
    """Start anew: clean up, then save; return the temporary names that are left."""
    left = clean_up(disk, RUN)
    results, _ = run_ranks_on(disk, ranks, lambda files, control: write(files, control, "C", 3))
    assert all(isinstance(result, Written) for result in results), results
    return [name for name in disk.tree() if "/.tmp-" in name or "/.old-" in name], left


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("ranks", [1])
def test_a_power_cut_in_the_clean_up_after_a_kill_takes_no_checkpoint_along(ranks, replace):
    """Names that the killed run changed are not durable yet when the next one removes files."""
    old, new = outcomes(replace)
    start, verdicts = disk_with(ranks, {1: "A"}), Verdicts(ranks)
    at, went_on = 0, True
    while went_on:
        crashed, results = killed(start, ranks, 0, Fault(at), save(replace))
        went_on = any(isinstance(result, Killed) for result in results)
        k = 0
        while went_on:
            # The disk as the killed run left it, with all that is not durable: run it again.
            disk, _ = killed(start, ranks, 0, Fault(at), save(replace))
            disk.crash_at = len(disk.operations) + k
            try:
                clean_up(disk, RUN)
            except PowerCut:
                pass
            else:
                k = -2
            disk.crash_at = None
            found = set(verdicts.after_power_cut(disk, 128, seed=at))
            assert found <= {old, new}, (crashed.operations, k, found)
            if k < 0:
                break
            k += 1
        at += 1


def saving_and_rotating(files, control):
    return write_and_rotate(files, control, "D", 4, keep_last=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_power_cut_while_old_checkpoints_are_removed_never_costs_the_newest(ranks):
    start, verdicts = disk_with(ranks, {1: "A", 2: "B", 3: "C"}), Verdicts(ranks)
    seen = set()

    def check(disk, results):
        told = any(isinstance(result, Written) for result in results)
        removing = any(op == "rename" and name[0] != "." for op, name in disk.operations)
        allowed = {(4, "D")} if told or removing else {(3, "C"), (4, "D")}
        for after in {str(after.tree()): after for after in all_crashes(disk, 128)}.values():
            assert verdicts.of(after) in allowed
            seen.add(verdicts.of(after))
            for step in steps_in(after, RUN):  # half a removal is never half a checkpoint
                check_quickly(after, RUN / step_name(step))

    cut_everywhere(start, ranks, saving_and_rotating, check)
    assert seen == {(3, "C"), (4, "D")}


@given(at=st.integers(0, 60), cut=st.integers(0, 12), seed=st.integers(0, 1 << 32))
@settings(max_examples=25)
def test_killed_while_rotating_then_cut_while_cleaning_up_the_newest_stays(at, cut, seed):
    ranks = 2
    start = disk_with(ranks, {1: "A", 2: "B", 3: "C"})
    disk, results = killed(start, ranks, 0, Fault(at), saving_and_rotating, seed)
    if any(isinstance(result, Written) for result in results):
        allowed = {(4, "D")}
    else:
        allowed = {(3, "C"), (4, "D")}
    disk.crash_at = len(disk.operations) + cut
    with suppress(PowerCut):
        clean_up(disk, RUN)
    disk.crash_at = None
    assert set(Verdicts(ranks).after_power_cut(disk, 64, seed)) <= allowed


@pytest.mark.parametrize("seed", range(5))
def test_many_saves_and_crashes_in_a_row_end_in_a_checkpoint_that_was_last_or_last_but_one(seed):
    """A run that is cut again and again, each time going on from what the cut left."""
    rng = random.Random(seed)
    ranks = rng.choice(RANKS)
    disk, verdicts, letters = disk_with(ranks, {1: "A"}), Verdicts(ranks), "BCDEFGHIJKLM"
    last = A
    for letter in letters:
        step = last[0] + rng.randrange(2)
        replace = step == last[0]
        disk.crash_at = rng.randrange(60 * ranks)
        results, _ = run_ranks_on(
            disk,
            ranks,
            lambda f, c, s=step, n=letter, r=replace: write(f, c, n, s, replace=r),
            rng.randrange(1 << 32),
        )
        told = any(isinstance(result, Written) for result in results)
        disk.crash_at = None
        disk = disk.crash(lambda _, options: rng.randrange(options))
        found = verdicts.of(disk)
        assert found in ({(step, letter)} if told else {last, (step, letter)}), letter
        last = found
        clean_up(disk, RUN)
        assert SoloControl.num_ranks == 1 and not [n for n in disk.tree() if "/.tmp-" in n]
