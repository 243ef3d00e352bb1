"""The rank runner itself: what every distributed test relies on."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kept_groups
import ranks as module
from programs import is_running, run_program
from ranks import RankError, on_ranks, run_ranks, run_sizes, start_ranks


def rank_times_ten(rank, world_size, offset=0):
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return rank * 10 + offset, total


def raise_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


def crash(rank, world_size):
    os.kill(os.getpid(), signal.SIGSEGV)


def sleep_on(rank, world_size, slow_rank, seconds):
    if rank == slow_rank:
        time.sleep(seconds)
    return rank


def wait_for_the_others(rank, world_size, pid_dir):
    Path(pid_dir, str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def warn_on_one(rank, world_size):
    if rank == 1:
        warnings.warn("look here", UserWarning, stacklevel=1)


@pytest.mark.parametrize("kind", ["a", "b"])
@on_ranks(1, 3)
def test_a_test_on_ranks_gets_what_it_names(kind, rank, world_size, tmp_path):
    assert kind in "ab" and world_size in (1, 3) and tmp_path.is_dir()
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())


@on_ranks(2)
def body_that_fails():
    assert dist.get_rank() == 0, "on the other rank"


def test_a_test_on_ranks_fails_if_one_rank_does():
    with pytest.raises(RankError, match="on the other rank") as caught:
        body_that_fails(world_size=2)
    assert caught.value.rank == 1


def wait_until(condition, timeout_s=module.HANG_S):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.01)


def pids_in(folder):
    """Return what `wait_for_the_others` has written there so far."""
    return [pid for path in sorted(folder.iterdir()) if (pid := path.read_text())]


def pid_of(rank, world_size):
    return os.getpid()


def leave_a_mess(rank, world_size):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.rand(3)


def random_number(rank, world_size):
    return torch.rand(()).item(), torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    """Here ranks are left hanging on purpose, so each wait lasts as long as it may."""
    monkeypatch.setattr(module, "GRACE_S", 0.4)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("fresh", [False, True])
def test_results_come_back_in_rank_order(world_size, fresh):
    results = run_ranks(rank_times_ten, world_size, fresh=fresh, offset=1)
    assert [number for number, _ in results] == [10 * rank + 1 for rank in range(world_size)]
    assert all(total == sum(range(world_size)) for _, total in results)


def test_an_exception_arrives_with_its_rank_and_its_remote_traceback():
    with pytest.raises(RankError, match="rank 1 of 3 raised ValueError") as caught:
        run_ranks(raise_on, 3, 1)
    assert caught.value.rank == 1
    assert "boom on 1" in str(caught.value)
    assert "in raise_on" in str(caught.value)


def test_a_warning_in_a_rank_is_the_error_that_it_is_in_the_test():
    with pytest.raises(RankError, match="rank 1 of 2 raised UserWarning"):
        run_ranks(warn_on_one, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(warn_on_one, 2)


def default_signals(rank, world_size):
    """Put back what Python knows of signals, as a fit of Lightning does at its end."""
    signal.signal(signal.SIGSEGV, signal.getsignal(signal.SIGSEGV))


def test_a_rank_shows_where_it_crashed_whatever_has_set_signals_before():
    run_ranks(default_signals, 1)
    with pytest.raises(RankError, match="without a result, exit code -11; its stacks") as caught:
        run_ranks(crash, 1)
    assert "in crash" in str(caught.value)


def test_a_rank_that_never_returns_is_killed_and_shows_where_it_stood():
    ranks = start_ranks(sleep_on, 2, 1, 2 * module.HANG_S)
    assert ranks.pipes[0].poll(module.HANG_S), "the other one returned"
    with pytest.raises(RankError, match="rank 1 of 2 was still running") as caught:
        module._results(ranks, timeout_s=0.1)
    assert "in sleep_on" in str(caught.value)
    assert [outcome.ok for outcome in caught.value.outcomes] == [True, False]


def meet(rank, world_size, folder, expected):
    Path(folder, f"{rank} of {world_size}").touch()
    wait_until(lambda: len(list(Path(folder).iterdir())) == expected)
    return 10 * world_size + rank


def test_worlds_of_several_sizes_run_at_once(tmp_path):
    args = (str(tmp_path), 1 + 2 + 3)
    assert run_sizes(meet, {1: args, 2: args, 3: args}) == {
        1: [10],
        2: [20, 21],
        3: [30, 31, 32],
    }


def test_a_failure_in_a_world_of_one_size_ends_those_of_the_others():
    before = run_ranks(pid_of, 2)
    with pytest.raises(RankError, match="rank 0 of 1 raised ValueError"):
        run_sizes(raise_on, {1: (0,), 2: (1,)})
    wait_until(lambda: not any(map(is_running, before)))
    assert set(run_ranks(pid_of, 2)).isdisjoint(before)


def test_a_pool_is_used_again():
    before = run_ranks(pid_of, 4)
    after = [run_ranks(pid_of, 4) for _ in range(10)]
    assert all(pids == before for pids in after)


def test_a_pool_that_nobody_calls_is_stopped_until_its_next_call():
    before = run_ranks(pid_of, 2)
    pool = module._pools[2]
    pool.answered_at_s = float("-inf")
    module.rest_idle_pools()
    wait_until(lambda: all(map(pool._is_stopped, range(2))))
    assert run_ranks(pid_of, 2) == before
    assert not pool.resting
    module.rest_idle_pools()
    assert not pool.resting, "it has just been called"


def test_a_failure_waits_for_no_rank_that_hangs_and_its_pool_is_replaced():
    before = run_ranks(pid_of, 2)
    with pytest.raises(RankError, match="rank 0 of 2 raised ValueError") as caught:
        run_ranks(raise_on, 2, 0)
    assert caught.value.outcomes[1].timed_out  # its barrier would have failed by itself, far later
    after = run_ranks(pid_of, 2)
    assert not set(before) & set(after)
    assert not any(is_running(pid) for pid in before)


def test_every_call_starts_from_the_same_state():
    first = run_ranks(random_number, 2)
    run_ranks(leave_a_mess, 2)
    assert run_ranks(random_number, 2) == first
    assert all(grad_enabled for _, grad_enabled in first)


def groups_of_a_mesh(rank, world_size, name):
    before = len(dist.distributed_c10d._world.pg_map)
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", name))
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mesh.get_group(name))
    return total.item(), [group.group_name for group in mesh.get_all_groups()], before


def test_a_call_takes_the_groups_of_the_one_before_and_few_stay_open():
    first = run_ranks(groups_of_a_mesh, 4, "a")
    again = run_ranks(groups_of_a_mesh, 4, "a")
    assert [total for total, _, _ in first] == [1.0, 1.0, 5.0, 5.0]
    assert [row[:2] for row in again] == [row[:2] for row in first]
    for name in "bcdefg":
        found = run_ranks(groups_of_a_mesh, 4, name)
        assert [total for total, _, _ in found] == [1.0, 1.0, 5.0, 5.0]
        assert all(before <= 1 + kept_groups.KEPT for _, _, before in found)


def test_a_test_can_kill_a_rank_and_read_how_each_one_ended(tmp_path):
    ranks = start_ranks(wait_for_the_others, 3, str(tmp_path))
    wait_until(lambda: len(pids_in(tmp_path)) == 3)
    killed_at_s = ranks.kill(0)
    victim, *survivors = ranks.wait()
    assert victim.exit_code == -signal.SIGKILL
    for outcome in survivors:  # their connections broke, so they did not wait for a timeout
        assert outcome.error is not None and "barrier" in outcome.error
        assert "imed out" not in outcome.error
        assert outcome.ended_at_s >= killed_at_s


def test_a_stopped_rank_is_killed_at_the_end_of_the_wait(tmp_path):
    ranks = start_ranks(wait_for_the_others, 2, str(tmp_path))
    wait_until(lambda: len(pids_in(tmp_path)) == 2)
    pids = ranks.pids
    ranks.kill(1, signal.SIGSTOP)
    outcomes = ranks.wait(timeout_s=1)
    assert [outcome.timed_out for outcome in outcomes] == [True, True]
    assert not any(is_running(pid) for pid in pids)


def test_ranks_do_not_outlive_a_parent_that_was_killed(tmp_path):
    script = (
        "import sys, time; sys.path[:0] = sys.argv[1].split(':')\n"
        "import ranks, test_ranks\n"
        "ranks.PRELOADED[:] = ['test_ranks']\n"
        "if __name__ == '__main__':\n"
        "    (resting,) = ranks.run_ranks(test_ranks.pid_of, 1)\n"
        "    ranks._pools[1].answered_at_s = float('-inf')\n"
        "    ranks.rest_idle_pools()\n"
        "    group = ranks.start_ranks(test_ranks.wait_for_the_others, 2, sys.argv[2])\n"
        "    open(sys.argv[2] + '/resting', 'w').write(str(resting))\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "parent.py").write_text(script)
    (tmp_path / "pids").mkdir()
    arguments = [str(tmp_path / "parent.py"), str(Path(__file__).parent), str(tmp_path / "pids")]
    parent = subprocess.Popen([sys.executable, *arguments])
    wait_until(lambda: len(pids_in(tmp_path / "pids")) == 3)
    pids = pids_in(tmp_path / "pids")
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_a_program_has_the_place_that_torchrun_gives_and_its_own_words_and_code(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['7']\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')\n"
        "print(*(os.environ.get(name) for name in names), file=sys.stderr, flush=True)\n"
        "sys.exit(3 if os.environ.get('RANK') == '1' else None)\n"
    )
    done = run_program(script, 7, num_ranks=2)
    assert (done.returncode, done.stdout) == (3, "")
    assert sorted(done.stderr.splitlines()) == ["0 0 2", "1 1 2"]
    alone = run_program(script, 7)
    assert (alone.returncode, alone.stderr) == (0, "None None None\n")
