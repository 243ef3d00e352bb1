"""Ranks that were not started alike are all told so, with the first difference, at the start."""

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from models import Block, Stack
from ranks import HANG_S, agreed, on_ranks, start_ranks
from shardwise import shard
from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import SoloControl
from shardwise.config import Schedule, Units
from shardwise.engine import agreement
from shardwise.engine.agreement import agree, find_difference
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError


class Meeting:
    """Rows of ranks that are threads of this process."""

    def __init__(self, num_ranks):
        self.rows = [b""] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=HANG_S)
        self.num_sent = 0


class ThreadControl:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.num_ranks = meeting, rank, len(meeting.rows)

    def exchange(self, row, about=""):
        self.meeting.rows[self.rank] = row
        self.meeting.barrier.wait()
        rows = list(self.meeting.rows)
        if self.rank == 0:
            self.meeting.num_sent += 1
        self.meeting.barrier.wait()
        assert len({len(r) for r in rows}) == 1
        return rows

    def exchange_after(self, work, row_bytes):
        return self.exchange(work())

    def broadcast(self, data, source=0):
        self.meeting.rows[self.rank] = data
        self.meeting.barrier.wait()
        found = self.meeting.rows[0]
        self.meeting.barrier.wait()
        return found


def differences(facts):
    """Return what each rank is told, and the number of exchanges."""
    meeting = Meeting(len(facts))
    found = ["not told"] * len(facts)

    def run(rank):
        found[rank] = find_difference(ThreadControl(meeting, rank), facts[rank], "facts")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, meeting.num_sent


FACTS = st.lists(
    st.sampled_from(["a", "b", "\N{SNOWMAN}" * 3, "\N{GRINNING FACE}" * 400, "\ud800"])
)


@given(st.lists(FACTS, min_size=2, max_size=4))
def test_all_ranks_are_told_the_same_and_only_where_they_differ(facts):
    found, num_sent = differences(facts)
    odd = [rank for rank, lines in enumerate(facts) if lines != facts[0]]
    assert len(set(found)) == 1
    told = found[0]
    if not odd:
        assert told is None and num_sent == 1
        return
    assert told is not None
    first = min(_first(facts[rank], facts[0]) for rank in odd)
    named = [r for r in odd if _first(facts[r], facts[0]) == first]
    assert any(name_ranks([r])[5:] in told for r in named)
    assert told.encode(errors="strict")  # no half character


def _first(lines, of_rank_0):
    for index, (line, expected) in enumerate(zip(lines, of_rank_0, strict=False)):
        if line != expected:
            return index
    return min(len(lines), len(of_rank_0))


def test_ranks_with_the_same_difference_are_named_together():
    found, _ = differences([["x", "y"], ["x"], ["x", "z"], ["x", "z"], ["w", "y"]])
    assert found[0] == (
        "rank 4 has [w] where rank 0 has [x]; rank 1 has nothing more where rank 0 has [y]; "
        "ranks 2, 3 have [z] where rank 0 has [y]"
    )


def test_many_ranks_are_not_all_listed():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(30)) == "ranks 0 to 29"
    assert name_ranks(range(0, 30, 3)) == "ranks 0, 3, 6, 9, 12, 15, 18, 21, ... (10 in all)"
    found, _ = differences([["x"], ["a"], ["b"], ["c"], ["d"], ["e"]])
    assert found[0] is not None and found[0].endswith("; 2 further differences")


def test_one_rank_agrees_with_itself():
    agree(SoloControl(), ["a"], "this")


class Bag(nn.Module):
    """Parameters and a buffer of given shapes, in a given order."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.register_buffer("seen", torch.zeros(2))


def _other_buffer():
    model = Bag(a=(3, 2), b=(4,))
    model.seen = torch.zeros(3)
    return model


def _frozen():
    model = Bag(a=(3, 2), b=(4,))
    model.b.requires_grad_(False)
    return model


def _tied(tied):
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    if tied:
        model["two"].weight = model["one"].weight
    return nn.Sequential(model)


def _bag(**shapes):
    return lambda: Bag(**shapes)


def _meta(make):
    def made():
        with torch.device("meta"):
            return make()

    return made


PLAIN = _bag(a=(3, 2), b=(4,))
# What differs: model and settings of every rank but the last, those of the last rank, and what the
# message must say of them.
CASES = {
    "stage": (PLAIN, {"stage": 3}, PLAIN, {"stage": 2}, "[stage=3]", "[stage=2]"),
    "layout": (PLAIN, {}, PLAIN, {"layout": "flat"}, "[layout=rows]", "[layout=flat]"),
    "precision": (PLAIN, {}, PLAIN, {"precision": "bf16"}, "param=None", "param=torch.bfloat16"),
    "prefetch": (PLAIN, {}, PLAIN, {"schedule": Schedule(7)}, "bytes=None]", "bytes=7]"),
    "init": (
        PLAIN,
        {},
        PLAIN,
        {"units": Units(init=nn.init.zeros_)},
        "[init=NoneType]",
        "[init=zeros_]",
    ),
    "shape": (
        *(PLAIN, {}, _bag(a=(3, 2), b=(5,)), {}),
        "[parameter 'b' (4,) torch.float32, trainable, unit '(root)']",
        "[parameter 'b' (5,) torch.float32, trainable, unit '(root)']",
    ),
    "extra": (PLAIN, {}, _bag(a=(3, 2), b=(4,), c=(1,)), {}, "[buffer 'seen'", "[parameter 'c'"),
    "missing": (PLAIN, {}, _bag(b=(4,)), {}, "[parameter 'a'", "[parameter 'b'"),
    "order": (PLAIN, {}, _bag(b=(4,), a=(3, 2)), {}, "[parameter 'a'", "[parameter 'b'"),
    "dtype": (PLAIN, {}, lambda: PLAIN().double(), {}, "torch.float32, t", "torch.float64, t"),
    "frozen": (
        PLAIN,
        {},
        _frozen,
        {},
        "'b' (4,) torch.float32, trainable",
        "torch.float32, frozen",
    ),
    "meta": (
        PLAIN,
        {"units": Units(init=len)},
        _meta(PLAIN),
        {"units": Units(init=len)},
        "float32, t",
        "float32 on meta, t",
    ),
    "tied": (
        *(lambda: _tied(False), {}, lambda: _tied(True), {}),
        "[parameter '0.one.bias'",
        "[parameter '0.one.weight' tied to '0.two.weight']",
    ),
    "buffer": (PLAIN, {}, _other_buffer, {}, "[buffer 'seen' (2,)", "[buffer 'seen' (3,)"),
    "units": (
        *(Stack, {"units": [Block]}, Stack, {"units": [nn.Linear]}),
        "[unit 'blocks.0' (Block)]",
        "[unit 'blocks.0.up' (Linear)]",
    ),
    "class": (lambda: nn.Sequential(Block()), {}, lambda: Bag(), {}, "(Sequential)]", "(Bag)]"),
    "refused setting": (PLAIN, {}, PLAIN, {"stage": 5}, "[no error]", "[ConfigError: stage=5: exp"),
    "refused model": (
        *(PLAIN, {}, lambda: nn.ModuleList([PLAIN()]), {}),
        *("[no error]", "[ConfigError: model: a ModuleList has no forward"),
    ),
}


@pytest.mark.parametrize("odd", [2, 0])
@on_ranks(3)
def test_a_rank_that_differs_is_named_on_all_ranks_before_anything_is_changed(rank, odd):
    names = "ranks 1, 2 have" if odd == 0 else f"rank {odd} has"
    for make, settings, make_odd, odd_settings, most, other in CASES.values():
        model = (make_odd if rank == odd else make)()
        before = dict(model.named_parameters())
        values = {n: p.detach().clone() for n, p in before.items()}
        told = told_of(model, **(odd_settings if rank == odd else settings))
        here, there = (other, most) if odd == 0 else (most, other)
        left, right = told.split(" where rank 0 has ")
        assert left.startswith(f"shard(): the ranks differ: {names} ") and there in left, told
        assert here in right and "Start every rank with the same" in right, told
        after = dict(model.named_parameters())
        for name, param in after.items():
            assert type(param) is nn.Parameter and param is before[name]
            assert param.is_meta or torch.equal(param, values[name])
        assert after.keys() == before.keys() and not any(
            m._forward_hooks or m._forward_pre_hooks for m in model.modules()
        )
    good = shard(Stack(), stage=3)  # and the ranks may go on
    assert good(torch.ones(1, 8)).shape == (1, 5)


def told_of(model, **options):
    """Return the text of the refusal, which is the same on all ranks."""
    with pytest.raises(ConfigError) as error:
        shard(model, **options)
    return agreed(str(error.value))


@on_ranks(2)
def test_other_versions_of_torch_and_of_shardwise_are_named(rank):
    for module, version in ((torch, "2.12.1+elsewhere"), (agreement, "9.9")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(module, "__version__", version)
            told = told_of(PLAIN())
        name = module.__name__.split(".")[0]
        assert f"rank 1 has [{name} {version}] where rank 0 has [{name} " in told


@on_ranks(2)
def test_meshes_of_other_shapes_are_told(rank):
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    told = told_of(PLAIN(), mesh=two if rank else one)
    assert "[mesh of 1 replicas x 2 shards, cpu, axes ('dp',), ranks [0, 1]]" in told
    assert "[mesh of 2 replicas x 1 shards, cpu, " in told


@on_ranks(1, 3)
def test_ranks_that_all_refuse_alike_say_only_why():
    assert told_of(PLAIN(), stage=7).startswith("stage=7: expected 0, 1, 2 or 3")


@pytest.mark.parametrize("again", [False, True])  # a second call in the same processes
@on_ranks(1, 3)
def test_every_sharded_model_has_a_control_group_of_its_own(rank, world_size, again):
    """Exchange over two models' groups; torch knows of no more groups than before."""
    before = len(dist.distributed_c10d._world.pg_map)
    first, second = (engine_of(shard(PLAIN())).comm.control for _ in range(2))
    assert first.num_ranks == world_size and first.rank == rank
    assert first.exchange(bytes([rank])) == [bytes([r]) for r in range(world_size)]
    assert second.exchange(bytes([rank + 10])) == [bytes([r + 10]) for r in range(world_size)]
    assert second.broadcast(bytes([rank])) == b"\0"
    assert len(dist.distributed_c10d._world.pg_map) == before


@on_ranks(4)
def test_a_control_group_meets_beside_groups_that_not_all_ranks_have(rank):
    """The user has a group without this rank, and data parallelism is one axis of the mesh."""
    dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(PLAIN(), mesh=mesh["dp"])
    rows = engine_of(model).comm.control.exchange(bytes([rank]))
    assert rows == [bytes([rank % 2]), bytes([rank % 2 + 2])]


@on_ranks(4)
def test_ranks_of_a_control_group_count_replica_by_replica(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    control = engine_of(shard(PLAIN(), mesh=mesh)).comm.control
    assert control.rank == rank
    assert control.exchange(bytes([rank])) == [bytes([r]) for r in range(4)]


@on_ranks(3, fresh=True)
def test_processes_end_cleanly_with_a_control_group():
    model = shard(Stack(), stage=2)
    model(torch.ones(2, 8)).sum().backward()
    agreed([p.grad.full_tensor().sum().item() for p in model.parameters()])


def fail_before_shard(rank, world_size):
    dist.barrier()  # all are connected
    if rank == 1:
        raise OSError("no such file")
    shard(PLAIN(), stage=3)


def test_a_rank_that_died_before_is_not_waited_for():
    outcomes = start_ranks(fail_before_shard, 3).wait()
    assert outcomes[1].error_type == "OSError"
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.error_type == "CollectiveError", outcome.describe()
            assert "the ranks could not agree" in (outcome.error or "")
