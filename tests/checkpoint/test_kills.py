"""Real ranks are killed at random moments of a real save; somebody else finds a whole checkpoint.

The trials are those of tests/campaigns/soak.py, which `make soak` runs by the hundred: 1 to 4
ranks, a new step, the same name, the background, rotation; all ranks at once or one first. Here
they are few, on 1 to 3 ranks, spread evenly over all phases of the save. Every eighth is looked at
by fresh ranks, which load and save on, the others byte by byte. They run in processes of their own
that have imported everything and started no thread, so that a world of ranks is a fork.
"""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from programs import is_running, start_program
from saving import until
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import lock_holder
from shardwise.checkpoint.memory import ROOT, folder_in_memory

SOAK = Path(__file__).parents[1] / "campaigns" / "soak.py"

pytestmark = pytest.mark.slow


class Campaign:
    """A campaign under way in processes of its own."""

    def __init__(self, name, trials, jobs, seed, folder, *how):
        self.trials = trials
        options = ("--trials", trials, "--seed", seed, "--jobs", jobs, "--folder", folder)
        self.program = start_program(folder, SOAK, name, *options, "--json", *how)

    def found(self):
        """Return the verdicts. A violation fails the test with what replays it."""
        code, out, err = self.program.finish()
        assert code == 0, err[-8000:]
        counted = json.loads(out)
        assert sum(counted["verdicts"].values()) == self.trials and not counted["violations"]
        verdicts = counted["verdicts"]
        return verdicts

    def end(self):
        """Kill what still runs of it; ranks die with the process that forked them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.program.pid, signal.SIGKILL)
        self.program.process.join()


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory):
    """Start both at once: a power cut mostly waits for what the system writes back by itself."""
    kill, power = (tmp_path_factory.mktemp(name) for name in ("kill", "power"))
    started = {"kill": Campaign("kill", 12, 2, 1, kill, "--spread")}
    if not os.geteuid():
        started["power"] = Campaign("power", 6, 3, 2, power, "--spread")
    yield started
    for campaign in started.values():
        campaign.end()


def test_kills_in_every_phase_of_a_save_leave_the_old_or_the_new_one(campaigns):
    found = campaigns["kill"].found()
    assert set(found) <= {"A", "B", "B after save had returned"}
    # A tenth of the moments are before any save can have ended, a tenth after all have.
    assert found["A"] >= 1 and found["B after save had returned"] >= 1


def test_power_cuts_in_the_middle_of_a_save_and_after_it_leave_the_old_or_the_new_one(campaigns):
    if "power" not in campaigns:
        pytest.skip("a power cut is made by mounting and stopping a disk, which needs root")
    try:
        found = campaigns["power"].found()
    except AssertionError as error:
        if "CalledProcessError" in str(error) or "PermissionError" in str(error):
            pytest.skip(f"this system lets root mount no disk: {str(error)[-300:]}")
        raise
    assert set(found) <= {"A", "B", "B after save had returned"}
    assert found.get("B after save had returned", 0) > 0


ORPHANS = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
import shardwise
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
model = shardwise.shard(torch.nn.Linear(4, 4), stage=3)
optimizer = torch.optim.AdamW(model.parameters())
with shardwise.Checkpoints(folder / "saved", model, optimizer, memory_every=1) as checkpoints:
    for step in range(1, 10000):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.copy_to_memory(step)
        if step == 3:
            (folder / f"rank{rank}").touch()
        ends = torch.tensor([int((folder / "end").exists())])
        dist.all_reduce(ends)
        if ends:
            break
        time.sleep(0.01)
dist.destroy_process_group()
print("went to its end", flush=True)
"""


def test_ranks_of_a_killed_torchrun_tell_it_go_to_their_end_and_leave_nothing(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(ORPHANS)
    options = ("--standalone", "--nproc-per-node", 2, script, tmp_path)
    job = start_program(tmp_path, "torch.distributed.run", *options, launches=True)
    until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)))
    ranks = job.ranks
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: job.printed()[1].count("has died. Nothing starts or ends this rank") == 2)
    assert all(f"to end it now: kill {pid}\n" in job.printed()[1] for pid in ranks)
    (tmp_path / "end").touch()
    until(lambda: not any(map(is_running, ranks)))
    assert job.printed()[0].count("went to its end") == 2
    assert lock_holder(Files(), tmp_path / "saved") is None
    assert not folder_in_memory(tmp_path / "saved", ROOT).exists()
