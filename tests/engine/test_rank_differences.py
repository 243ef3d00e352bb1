"""Ranks that use different parameters inside the same units, where the order of reductions could
come to differ; changes that would be lost without a word; ranks that go on differently."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ranks import agreed, begin_all, on_ranks
from shardwise import accumulate, debug, fully_shard, gathered, shard
from shardwise.engine.api import engine_of
from shardwise.errors import CollectiveError, ConfigError, ShardError, StateError
from trainer import ENDS, compare, full_parameters, sgd


class Experts(nn.Module):
    """Adds one of two linear layers, which its caller chooses."""

    def __init__(self, dim):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.both = nn.Linear(dim, dim)

    def forward(self, x, which):
        return self.both(x) + self.experts[which](x)


class TwoTowers(nn.Module):
    """A tower on data and one on ids: neither has an input that needs a gradient."""

    def __init__(self):
        super().__init__()
        self.seen = Experts(8)
        self.read = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, ids, which):
        return self.head(self.seen(x, which) + self.read(ids))


class Checkpointed(nn.Module):
    """Blocks under reentrant checkpoints, whose recomputed inputs are leaves."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Experts(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x, ids, which):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, which, use_reentrant=True)
        return self.head(x)


def loss_of(model, batch):
    x, ids, targets, which = batch
    return F.cross_entropy(model(x, ids, which), targets)


def draw_batch(random):
    """Draw the expert too, so that ranks take the same one in some steps and not in others."""
    x = torch.randn(4, 8, generator=random)
    ids = torch.randint(11, (4,), generator=random)
    which = int(torch.randint(2, (), generator=random))
    return x, ids, torch.randint(3, (4,), generator=random), which


@pytest.mark.parametrize("kind", [TwoTowers, Checkpointed])
@on_ranks(1, 3)
def test_ranks_may_use_different_experts_of_a_unit_without_a_gradient_at_its_input(
    rank, world_size, kind
):
    units = {TwoTowers: [Experts, nn.Embedding], Checkpointed: [Experts]}[kind]
    settings = [dict(end, units=units) for end in ENDS]
    compare(rank, world_size, kind, settings, loss_of, sgd, draw_batch, steps=6)


@on_ranks(1, 2)
def test_a_parameter_that_is_written_in_forward_is_refused_by_name():
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4, max_norm=0.1)
            self.head = nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.table(ids))

    for stage in range(4):
        model = shard(Clipped(), stage=stage)
        with pytest.raises(ShardError, match=r"table\.weight"):
            model(torch.tensor([1, 2]))


@on_ranks(1, 2)
def test_a_step_between_an_outside_use_and_its_backward_is_refused():
    for stage in (1, 3):
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalty = model[0].weight.square().sum()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        with pytest.raises(StateError, match="between forward and backward"):
            penalty.backward()
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def penalty_of(model):
    return (model[0].weight @ model[0].weight.T).square().sum()


@on_ranks(1, 3)
def test_weights_are_read_with_grad_between_backward_and_step(rank, world_size):
    for stage in range(4):
        trained = []
        for reads in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            model = shard(model, stage=stage, units=[nn.Linear])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                if reads:
                    ratio = model[2].weight.norm() / model[0].weight.norm()
                    assert (ratio + penalty_of(model)).detach() > 0.0
                optimizer.step()
                optimizer.zero_grad()
            trained.append(full_parameters(model))
        for name, with_reads in trained[0].items():
            assert torch.equal(with_reads, trained[1][name]), f"stage {stage}: {name}"


@on_ranks(2)
def test_a_graph_of_a_weight_that_outlives_a_step_and_a_pass_is_refused(rank):
    for stage in range(3):
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            penalty = penalty_of(model)
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(StateError, match="between forward and backward"):
            penalty.backward()


def three_layers(kind, mesh=None, layout="rows"):
    """Return a sharded model: `kind` is a stage of shard(), or None for fully_shard()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
    if kind is not None:
        return shard(model, stage=kind, units=[nn.Linear], mesh=mesh, layout=layout)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model):
    model(torch.ones(3, 6)).square().sum().backward()


def train_until_refused(model, optimizers, num_steps=9):
    """Step with one optimizer after the other (None: no step); return what was raised, and when."""
    for step in range(num_steps):
        try:
            backward(model)
        except StateError as error:
            with pytest.raises(StateError, match="not to be used: the ranks have taken different"):
                model(torch.ones(3, 6))
            return step, str(error)
        for optimizer in optimizers(step):
            optimizer.step()
        model.zero_grad()
    return None


def with_loaded_state(params):
    params = list(params)
    plain = [torch.ones(param.shape, requires_grad=True) for param in params]
    trained, optimizer = torch.optim.Adam(plain), torch.optim.Adam(params)
    torch.stack([param.sum() for param in plain[:-1]]).sum().backward()
    trained.step()  # the last one has no gradient, and so no state
    optimizer.load_state_dict(trained.state_dict())
    return optimizer


adam = torch.optim.Adam
# The odd rank's optimizer, the step that it leaves out, and when both are told of what.
ODD_STEPS = [
    (torch.optim.AdamW, None, 1, "optimizer 0, AdamW,", "optimizer 0, Adam,"),
    (partial(adam, lr=0.002), None, 1, "lr=0.002", "lr=0.001"),
    (partial(adam, betas=(0.8, 0.999)), None, 1, "betas=(0.8, 0.999)", "betas=(0.9, 0.999)"),
    (with_loaded_state, None, 1, "state loaded 1 times", "state loaded 0 times"),
    (adam, 2, 3, "2 steps of optimizers so far", "3 steps of optimizers so far"),
]


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, 3), (2, 0), (3, 3), (3, None)])
@on_ranks()
def test_ranks_that_step_differently_are_named_on_all_ranks(rank, num_ranks, kind):
    is_odd = rank == num_ranks - 1
    for make_odd, skips, when, here, there in ODD_STEPS:
        model = three_layers(kind)
        optimizer = (make_odd if is_odd else adam)(model.parameters())
        found = train_until_refused(
            model,
            lambda step, o=optimizer, s=skips: [] if is_odd and step == s else [o],
        )
        if num_ranks == 1:
            assert found is None
            continue
        step, text = agreed(found)
        assert step == when
        left, right = text.split(" where rank 0 has ")
        assert f"rank {num_ranks - 1} has [" in left and here in left and there in right, text


# Stage (None: fully_shard), layout, and a loop with or without windows. In the first list the odd
# rank begins another collective than the others, so that their groups cannot be used afterwards.
IN_OTHER_CALLS = [(1, "rows", "plain"), (2, "flat", "plain"), (2, "matrices", "window")]
IN_ONE_CALL = [
    *((0, "rows", loop) for loop in ("plain", "window")),
    *((1, layout, "window") for layout in ("rows", "matrices")),
    *((3, layout, loop) for layout in ("rows", "flat") for loop in ("plain", "window")),
    (3, "matrices", "window"),
    (None, "rows", "plain"),
]


@pytest.mark.parametrize(("kind", "layout", "loop"), IN_OTHER_CALLS)
@on_ranks(3, fresh=True)
def test_a_micro_batch_more_on_one_rank_is_found_in_that_pass(rank, kind, layout, loop):
    take_one_more(rank, kind, layout, loop)


@on_ranks(2, fresh=True)
def test_a_micro_batch_more_is_found_in_a_pass_in_which_optimizers_are_compared(rank):
    """The odd rank's pass 16 compares optimizers before its reduction; the other's gathers."""
    model = three_layers(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        StateError, match=r"rank 1 has \[4 steps .* in backward pass 16\] where rank 0"
    ):
        for step in range(1, 7):
            for _ in range(4 if rank == 1 and step == 5 else 3):
                backward(model)
            optimizer.step()
            model.zero_grad()


@on_ranks(3)
def test_a_micro_batch_more_on_one_rank_is_found_if_its_gather_meets_a_gather(rank):
    for kind, layout, loop in IN_ONE_CALL:
        take_one_more(rank, kind, layout, loop)


def take_one_more(rank, kind, layout, loop):
    """The last rank takes one micro-batch more in step 5."""
    model = three_layers(kind, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_begun = 0
    with pytest.raises(StateError, match="have taken different steps") as error:
        for step in range(1, 10):
            num = 3 if rank == 2 and step == 5 else 2
            for number in range(num):
                num_begun += 1
                with (
                    accumulate(model, last=number == num - 1) if loop == "window" else nullcontext()
                ):
                    backward(model)
            optimizer.step()
            model.zero_grad()
    text = agreed(str(error.value))
    assert "rank 2 has [4 steps of optimizers so far, in backward pass 11] where rank 0 " in text
    # In pass 11 ranks 0 and 1 are in step 6 already. At stages 0 and 1 a window sends nothing
    # before its end, which is pass 10 for them.
    at_end = kind in (0, 1) and loop == "window"
    assert num_begun == (10 if at_end and rank != 2 else 11)
    with pytest.raises(StateError, match="not to be used: the ranks have taken different"):
        model(torch.ones(3, 6))


@on_ranks(4, fresh=True)
def test_a_micro_batch_more_on_one_rank_is_found_in_a_stage_of_a_pipeline(rank):
    """The meshes of two stages are apart: the ranks of the other stage see no difference."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    model = three_layers(1, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = r"rank 3 has \[1 steps .* where rank 2 has \[2 steps"
    with nullcontext() if rank < 2 else pytest.raises(StateError, match=wrong):
        for step in range(3):
            for _ in range(3 if rank == 3 and step == 1 else 2):
                backward(model)
            optimizer.step()
            model.zero_grad()


@pytest.mark.parametrize(("world_size", "kind"), [(2, 2), (3, None), (4, 0), (4, 3)])
@on_ranks()
def test_ranks_that_step_alike_are_compared_in_a_few_passes_and_never_refused(
    rank, world_size, kind
):
    """Train with a schedule, a scaler that skips a step, and a parameter that is thawed late."""
    mesh, which = None, 0
    if world_size == 4:  # two stages, which have groups of their own
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
        which = rank // 2
    model = three_layers(kind, mesh)
    exchanges, now = [], 0

    def noted(exchange, *args):
        exchanges.append(now)
        return exchange(*args)

    make = [torch.optim.Adam, torch.optim.SGD][which]
    optimizer = make([{"params": list(model.parameters()), "lr": 0.01 * (1 + which)}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    model[0].bias.requires_grad_(False)
    for step in range(9):
        if step == 1:  # only now are there the groups of fully_shard
            control = engine_of(model).comm.control
            control.exchange = partial(noted, control.exchange)
        now = step
        if step == 5:
            model[0].bias.requires_grad_(True)
        loss = model(torch.ones(3, 6)).square().sum()
        scaler.scale(loss * (float("inf") if step == 2 and rank % 2 == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        model.zero_grad()
    assert sorted(exchanges) == [1, 1, 3, 3, 5, 5, 7, 7]  # passes 2, 4, 8; thawed in pass 6
    assert engine_of(model).rank_checks.num_steps == 8  # one of nine was skipped


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(3)
def test_other_values_on_one_rank_are_loaded_on_none(rank, stage):
    model = three_layers(stage)
    alike = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    other = alike | {"2.bias": torch.full((6,), 1.0 + rank)}
    before = [param.to_local().clone() for param in model.parameters()]
    inside = copy.deepcopy(model)
    wrapped = nn.ModuleDict({"inner": model})
    for module, values, name in (
        (model, other, "2.bias"),
        (inside, other, "2.bias"),
        (model[2], {"weight": alike["2.weight"], "bias": other["2.bias"]}, "bias"),
        (wrapped, {f"inner.{name}": value for name, value in other.items()}, "inner.2.bias"),
    ):
        with pytest.raises(ConfigError) as error:
            module.load_state_dict(values)
        text = agreed(str(error.value))
        assert text.startswith(f"load_state_dict(): the ranks differ: rank 1 has ['{name}"), text
        assert "; rank 2 has [" in text and "Load the same file on every rank" in text
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    wrapped.load_state_dict({f"inner.{name}": value for name, value in alike.items()})
    with gathered(model, writeback=True, source=0):
        if rank == 0:  # what it loads is what all get
            model.load_state_dict(other)
    with gathered(model):
        assert all(value.eq(1).all() for value in model.state_dict().values())
        plain = copy.deepcopy(model)
    if rank == 0:
        plain.load_state_dict(other)  # it is no sharded model


def go_on_alone(rank, world_size, kind, what):
    """Let the last rank do something that the others do not, in processes that end with it."""
    debug.watch(4)
    model = three_layers(kind)
    is_odd = rank == world_size - 1
    backward(model)
    with pytest.raises(CollectiveError) as error:
        for step in range(1, 6):
            if is_odd and step == 4 and what == "freeze":  # no pass in which all compare
                model[2].weight.requires_grad_(False)
            if is_odd and step == 4 and what == "load":
                model.load_state_dict(dict(model.state_dict()))
            if what == "gather":
                (model[2] if is_odd else model[0]).weight.full_tensor()
            backward(model)
    return str(error.value)


# The kind of model, and where the odd rank and the other one are said to be.
ALONE = {
    "freeze": (3, "('2.weight' is frozen on this rank since the last pass)", "all_gather of unit"),
    "load": (None, "(load_state_dict())", "all_gather of unit"),
    "gather": (1, "whole tensor (like '2.weight',", "whole tensor (like '0.weight',"),
}


@pytest.fixture(scope="module")
def ended():
    return begin_all({what: (go_on_alone, 2, kind, what) for what, (kind, _, _) in ALONE.items()})


@pytest.mark.parametrize("what", ALONE)
def test_a_rank_that_goes_on_alone_ends_no_process_and_both_are_told_where_it_is(ended, what):
    _, odd, others = ALONE[what]
    for text in ended(what):
        first, second = text.rpartition(" s: rank 0 in ")[2].split("; rank 1 in ")
        assert odd in second and others in first, text
