"""A rank that waits for others is told who is missing; one that waits for ever is told why."""

import atexit
import io
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from ranks import begin_all, run_ranks
from shardwise import Axes, shard
from shardwise.comm.collective_key import CollectiveKey
from shardwise.comm.listener import WAITS, Listener
from shardwise.errors import CollectiveError
from shardwise.hangs.abort import WATCH

WAIT_S = 4.0  # the least that `watch` takes
LIMIT_S = 300.0  # against hangs only


class Chosen(nn.Module):
    """Runs one of its layers, which the caller chooses."""

    def __init__(self, widths):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, w), nn.Linear(w, 4)) for w in widths)

    def forward(self, x, which):
        return self.layers[which](self.first(x))


def error_of(calls):
    """Return the CollectiveError that calls end with, on this rank."""
    WATCH.look_every_s = 0.2
    shardwise.debug.watch(WAIT_S)
    with pytest.raises(CollectiveError) as caught:
        calls()
    return str(caught.value)


def stay_until_all_raised(rank, world_size, folder):
    """Wait for the errors of the others: they name a rank otherwise once it has ended."""
    Path(folder, f"raised-{rank}").touch()
    end = time.monotonic() + LIMIT_S
    while len(list(Path(folder).glob("raised-*"))) < world_size and time.monotonic() < end:
        time.sleep(0.05)


def run_layers(model, *layers):
    for which in layers:
        model(torch.ones(2, 4), which).sum().backward()
        model.zero_grad()


def choose_different_layers(rank, world_size, how, widths, folder):
    """Run two steps alike, then another layer on rank 0; return the error."""
    model = Chosen(widths)
    if how == "fully_shard":
        for layer in model.layers:
            shardwise.fully_shard(layer)
        shardwise.fully_shard(model)
    else:
        shard(model, stage=3, units=[nn.Sequential], layout=how)
    run_layers(model, 1, 0)
    begun = time.monotonic()
    text = error_of(lambda: run_layers(model, *3 * [int(rank == 0)]))
    assert time.monotonic() - begun < LIMIT_S
    stay_until_all_raised(rank, world_size, folder)
    assert "start again from a checkpoint" in error_of(lambda: run_layers(model, 0))
    return text


@pytest.mark.parametrize("name", ["rows of 2", "fully_shard of 3"])
def test_ranks_that_run_different_units_end_with_both_named(ended, name):
    found = ended(name)
    for text in found:
        assert "it has not ended in" in text and "in different calls" in text, found
        assert "optional=" in text and "of unit 'layers.1'" in text
        assert text.count("of unit '") >= 3 and "test_waits.py:" in text


def save_on_rank_0_only(rank, world_size, folder):
    model = shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def save_and_train():
        if rank == 0:
            shardwise.save(Path(folder, "run"), model, optimizer, step=1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()

    text = error_of(save_and_train)
    stay_until_all_raised(rank, world_size, folder)
    return text


def test_a_save_on_one_rank_while_the_others_train_is_named_with_its_line(ended):
    found = ended("a save on one")
    for text in found[1:]:
        assert "rank 0 in an exchange between all ranks" in text, found
        assert "all_gather of unit" in text and "in different calls" in text, found


def log_norm(model):
    return model.weight.full_tensor().norm()


def log_on_rank_0_only(rank, world_size, folder):
    """Read a whole weight in a helper of rank 0 alone, while the other one goes on."""
    model = shard(nn.Linear(4, 4))

    def log_and_train():
        for step in range(3):
            if rank == 0 and step == 1:
                log_norm(model)
            model(torch.ones(2, 4)).sum().backward()

    text = error_of(log_and_train)
    stay_until_all_raised(rank, world_size, folder)
    return text


def test_a_message_begins_with_each_ranks_call_its_line_and_the_line_that_called_the_helper(ended):
    number = log_norm.__code__.co_firstlineno + 1
    for text in ended("a norm on one"):
        begin = text[:300]
        assert "rank 0 in gather of a whole tensor" in begin, text
        assert f"(test_waits.py:{number}, called from test_waits.py:{number + 10})" in begin, text
        assert "rank 1 in " in begin and text.index("rank 1 in ") < text.index("different calls")
        assert "optional=" not in text and "/" not in text, "a guess, or a path of gloo's"


class Heard(io.StringIO):
    """What was written to standard error, and a moment when it is known that something was."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def write(self, text):
        count = super().write(text)
        self.event.set()
        return count


def come_late(rank, world_size, folder):
    """Let the last rank come to a gather only when all others have complained."""
    model = shard(nn.Linear(4, 4))
    heard, before = Heard(), sys.stderr
    sys.stderr, WATCH.patience_s, WATCH.look_every_s = heard, 2.0, 0.2
    complaints = Path(folder)
    try:
        for number in range(2):
            if rank == world_size - 1:
                while len(list(complaints.glob(f"{number}-*"))) < world_size - 1:
                    time.sleep(0.05)
            else:
                threading.Thread(
                    target=lambda n=number, e=heard.event: (
                        e.wait(),
                        (complaints / f"{n}-{rank}").touch(),
                    )
                ).start()
            model(torch.ones(2, 4)).sum().backward()
            heard.event = threading.Event()
    finally:
        sys.stderr, WATCH.patience_s, WATCH.look_every_s = before, 30.0, 1.0
    assert model.weight.grad is not None  # who ends first must not leave others sending
    return heard.getvalue()


def test_who_waits_long_is_told_once_who_is_missing_and_goes_on(ended):
    *early, late = ended("late")
    assert late == ""
    for rank, text in enumerate(early):
        lines = text.splitlines()
        assert len(lines) == 2, text  # one for each of two waits
        for line in lines:
            assert line.startswith(f"shardwise: rank {rank} has waited 2 s in all_gather of unit")
            assert "test_waits.py:" in line
            missing = "rank 2 is in no call of Shardwise, but in come_late ("
            assert (missing in line) is (rank == 0), line  # the lowest rank tells of all
            how = (
                "Every rank must make this call" if not rank else "rank 0 logs what each rank does"
            )
            assert line.endswith(how)


def test_what_waits_has_a_name_that_people_understand():
    def text(kind, unit):
        return CollectiveKey(kind, unit, 0, "shard", None).text

    assert text("all_gather", "") == "all_gather of unit '(root)' over axis 'shard'"
    assert text("all_gather", "blocks.0") == "all_gather of unit 'blocks.0' over axis 'shard'"
    assert text("broadcast", "head.bias") == "broadcast of 'head.bias' over axis 'shard'"
    assert text("gather", "(norm)") == "gather of a norm over axis 'shard'"
    sources = Path(shardwise.__file__).parent.rglob("*.py")
    named = re.findall(r'CollectiveId\("(\w+)", "(\(\w+\))"', "".join(map(Path.read_text, sources)))
    assert len(named) > 5
    assert not [pair for pair in named if pair[1] in text(*pair)]


def gather_alone(rank, world_size, folder):
    """Gather the root unit, whose name is empty, without a rank that has ended."""
    model = shard(nn.Linear(4, 4), stage=3)
    if rank:
        atexit._run_exitfuncs()  # its program is over
        return ""
    return error_of(lambda: [model(torch.ones(2, 4)).sum().backward() for _ in range(2)])


def test_the_root_unit_is_named_when_another_rank_has_ended(ended):
    found = ended("a rank alone")
    assert "rank 0: all_gather of unit '(root)' over axis 'shard' (2 ranks) failed" in found[0]
    assert "has ended without an error" in found[0] and "shardwise.parallel.join(" in found[0]
    assert "died" not in found[0]


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def one_replica_differs(rank, world_size, folder):
    """Rank 3 runs another layer than its shard group; the other replica does nothing wrong."""
    model = shard(Chosen((8, 8)), stage=3, units=[nn.Sequential], mesh=grid())
    run_layers(model, 1, 0)
    text = error_of(lambda: run_layers(model, *3 * [int(rank == 3)]))
    stay_until_all_raised(rank, world_size, folder)
    return text


def test_all_replicas_are_told_which_two_ranks_of_one_of_them_differ(ended):
    found = ended("a replica differs")
    for rank, text in enumerate(found):
        assert text.startswith(f"rank {rank}: ") and "it has not ended in" in text, found
        assert "rank 2 in " in text and "rank 3 in " in text, found
    assert all("over axis 'replicate' (2 ranks) failed" in text for text in found[:2]), found


def one_pair_hangs(rank, world_size, folder):
    """Two jobs in one process group, each over a pair of ranks; those of the first differ.

    The second job is at work as long as the first one hangs, and for some steps more.
    """
    WATCH.look_every_s = 0.2
    shardwise.debug.watch(WAIT_S)
    mesh = grid()["shard"]
    model = shard(Chosen((8, 8)), stage=3, units=[nn.Sequential], mesh=mesh)
    steps, left = 0, 10
    try:
        while left:
            run_layers(model, int(rank == 0 and steps > 1))
            steps += 1
            if rank > 1:
                num_ended = torch.tensor(len(list(Path(folder).iterdir())))
                dist.all_reduce(num_ended, dist.ReduceOp.MIN, mesh.get_group())
                left -= int(num_ended) == 2
                time.sleep(0.05)
    except CollectiveError as error:
        Path(folder, str(rank)).touch()
        return steps, str(error)
    return steps, ""


def test_a_group_that_hangs_leaves_another_group_of_the_same_process_group_alone(ended):
    found = ended("a pair hangs")
    assert [text for _, text in found[2:]] == ["", ""] and found[2][0] == found[3][0] >= 10
    for _, text in found[:2]:
        assert text and "rank 2" not in text and "rank 3" not in text
        assert "rank 0 in " in text and "rank 1 in " in text, found


def save_without_the_last(rank, world_size, folder):
    """Save two models, each over a pair of ranks; the last rank ends instead."""
    model = shard(nn.Linear(4, 4), mesh=grid()["shard"])
    try:
        if rank != 3:
            shardwise.save(Path(folder, str(rank // 2)), model)
    except CollectiveError as error:
        return str(error)
    return ""


def test_a_save_over_a_part_of_the_ranks_names_them_by_their_global_numbers(ended):
    found = ended("a save without the last")
    assert found[0] == found[1] == found[3] == ""
    assert "rank 2: the ranks could not agree: rank 3 did not come" in found[2]


def step_alone(rank, world_size, folder):
    """Step with tied weights, without the other stage, which has ended; return the error."""
    names = "head.weight", "embed.weight"
    stage = nn.Sequential()
    stage.add_module(names[rank].partition(".")[0], nn.Linear(4, 4, bias=False))
    shard(stage, mesh=Axes(pp=2))
    shardwise.parallel.tie(stage, dict([names]))
    if rank:
        atexit._run_exitfuncs()
        return ""
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    stage(torch.ones(2, 4)).sum().backward()
    return error_of(optimizer.step)


def test_a_step_with_tied_weights_names_them_when_the_other_stage_has_ended(ended):
    found = ended("a stage alone")[0]
    assert "rank 0: exchange of 'embed.weight' over axis 'stages' (2 ranks) failed" in found


def wait_by_default(rank, world_size, folder):
    """Come late without a call of `watch`: at work for longer than the limit, then asleep."""
    WATCH.look_every_s, WAITS.idle_limit_s = 0.05, 3.0
    group = dist.new_group()  # whose timeout is torch's
    model = shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(2, 4)).sum().backward()
    if rank:
        until_s = time.monotonic() + 5.0
        while time.monotonic() < until_s:  # as a compiler or a loader
            pass
    model(torch.ones(2, 4)).sum().backward()
    if rank:
        while not Path(folder, "over").exists():
            time.sleep(0.05)
        return ""
    try:
        model(torch.ones(2, 4)).sum().backward()
    except CollectiveError as error:
        return str(error)
    finally:
        Path(folder, "over").touch()
    return "no error"


def test_without_watch_a_rank_at_work_is_waited_for_and_one_that_sleeps_is_not(ended):
    text = ended("by default")[0]
    assert "it has not ended in 3 s: rank 1 is in no call of Shardwise, but in wait_by" in text, (
        text
    )


# By name: what ranks run, how many, and with what; a folder of its own comes last.
WAITING = {
    "rows of 2": (choose_different_layers, 2, "rows", (8, 8)),
    "fully_shard of 3": (choose_different_layers, 3, "fully_shard", (8, 8)),
    "a save on one": (save_on_rank_0_only, 3),
    "a norm on one": (log_on_rank_0_only, 2),
    "late": (come_late, 3),
    "by default": (wait_by_default, 2),
    "a rank alone": (gather_alone, 2),
    "a stage alone": (step_alone, 2),
    "a replica differs": (one_replica_differs, 4),
    "a pair hangs": (one_pair_hangs, 4),
    "a save without the last": (save_without_the_last, 4),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Start all groups; return a function that gives the results of one."""
    folder = tmp_path_factory.mktemp
    return begin_all({name: (*call, str(folder("ranks"))) for name, call in WAITING.items()})


def hear(rank, world_size):
    """Return the waits of a start, a step and clipping, as a listener hears them."""
    heard, before = [], WAITS.listener

    class Hears(Listener):
        def enter(self, key, number):
            heard.append(key.text)

    WAITS.attach(Hears)
    try:
        model = shard(nn.Linear(4, 2))
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finally:
        WAITS.attach(lambda: before)
    return heard


def test_each_wait_of_a_start_and_a_step_has_a_name():
    assert run_ranks(hear, 2) == 2 * [
        [
            "the opening of a group",
            "an exchange between all ranks (shard())",
            "broadcast of 'weight' over axis 'shard'",
            "broadcast of 'bias' over axis 'shard'",
            "all_gather of unit '(root)' over axis 'shard'",
            "reduce_scatter of unit '(root)' over axis 'shard'",
            "gather of a norm (() torch.float64) over axis 'shard'",
        ]
    ]
