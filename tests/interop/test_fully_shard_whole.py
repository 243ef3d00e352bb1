"""What works for shard() works for fully_shard: checkpoints, contexts, what is told of a model."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike
from shardwise.errors import ConfigError, StateError
from shardwise.interop.fsdp2 import fully_shard
from trainer import full_parameters, full_state, sharded_by_block

WIDTH = 6


class Net(nn.Module):
    """Blocks of uneven shapes, a tied head, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def sharded(how, mesh=None):
    torch.manual_seed(3)
    model = Net()
    if how.startswith("stage"):
        return shardwise.shard(model, stage=int(how[-1]), mesh=mesh)
    return sharded_by_block(model, mesh=mesh)


def step_of(model, number):
    tokens = torch.arange(8).add(number) % 7
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
    loss.backward()
    return loss.item()


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        losses.append(step_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def whole(model, optimizer):
    """Return parameters and moments, full, by name."""
    state = full_state(model, optimizer)
    moments = {f"{name}.{key}": value for name in state for key, value in state[name].items()}
    return full_parameters(model) | moments


def save_after_two(rank, world_size, how, folder):
    model = sharded(how)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    state = whole(model, optimizer)
    if how == "fully_shard":  # written behind a step that follows
        with shardwise.Checkpoints(folder, model, optimizer) as checkpoints:
            checkpoints.save(2)
            train(model, optimizer, range(2, 3))
    else:
        shardwise.save(folder, model, optimizer, step=2)
    return state


def load_into(rank, world_size, how, folder):
    """Load into a model that has trained already; return its state, and what `gathered` shows."""
    model = sharded(how)
    optimizer = adam(model)
    train(model, optimizer, range(4, 7))
    model(torch.arange(8) % 7)  # the root's parameters are full now
    loaded = shardwise.load(folder, model, optimizer)
    assert loaded.step == 2
    state = whole(model, optimizer)
    with shardwise.gathered(model):
        inside = {name: param.detach().clone() for name, param in model.named_parameters()}
    return state, inside


@pytest.mark.parametrize(
    ("source", "num_source", "target", "num_target"),
    [
        ("fully_shard", 3, "stage3", 1),
        ("fully_shard", 1, "stage0", 2),
        ("stage1", 2, "fully_shard", 3),
        ("stage3", 3, "fully_shard", 1),
    ],
)
def test_a_checkpoint_of_one_surface_loads_into_the_other_to_the_bit(
    tmp_path, source, num_source, target, num_target
):
    saved = run_ranks(save_after_two, num_source, source, str(tmp_path))[0]
    results = run_ranks(load_into, num_target, target, str(tmp_path))
    for state, inside in results:
        assert state.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(value, state[name]), name
        for name, value in inside.items():
            assert torch.equal(value, saved[name]), name


@on_ranks(1, 2, 3)
def test_what_is_told_of_both_surfaces_is_the_same(world_size):
    model, other = sharded("fully_shard"), sharded("stage3")
    optimizers = adam(model), adam(other)
    for each, optimizer in zip((model, other), optimizers, strict=True):
        train(each, optimizer, range(1))
    mine, theirs = shardwise.describe(model), shardwise.describe(other)
    assert (mine.stage, mine.num_shards) == (theirs.stage, theirs.num_shards)
    assert (mine.full_bytes, mine.rank_bytes) == (theirs.full_bytes, theirs.rank_bytes)
    assert {u.name for u in mine.units} == {"", "blocks.0", "blocks.1"}
    told = shardwise.debug.stats(model)
    assert told.param_shard_bytes == shardwise.debug.stats(other).param_shard_bytes
    assert told.param_full_peak_bytes >= told.param_full_bytes
    if world_size > 1:
        assert sum(told.sent_bytes.values()) > 0
    shardwise.check.replicas(model, optimizers[0])

    with shardwise.accumulate(model, last=False):
        step_of(model, 0)
    with shardwise.accumulate(other, last=False):
        step_of(other, 0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())


@on_ranks(1, 2)
def test_full_parameters_may_be_read_changed_and_differentiated(rank):
    model = sharded("fully_shard")
    train(model, adam(model), range(1))
    with shardwise.gathered(model, writeback=True):
        for param in model.parameters():
            assert type(param) is nn.Parameter
            param.data.mul_(2)
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
        inside = model.eval()(torch.arange(4))
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name])
    assert torch.equal(model(torch.arange(4)), inside)
    with shardwise.gathered(model, writeback=True):  # a state dict of whole tensors, too
        model.load_state_dict({name: value / 2 for name, value in expected.items()}, strict=False)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name] / 2)
    with pytest.raises(StateError, match="changed inside the context"), shardwise.gathered(model):
        next(model.parameters()).data.add_(rank == 0)
    with shardwise.gathered(model):
        penalty = sum(p.square().sum() for p in model.parameters())
        penalty.backward()
        fulls = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.full_tensor(), 2 * fulls[name])


@on_ranks(2)
def test_what_cannot_be_saved_says_why_and_what_to_use(tmp_path):
    model = Net()
    fully_shard(model.blocks[0])
    with pytest.raises(ConfigError, match="must be called last on the model itself"):
        shardwise.save(tmp_path, model)


@on_ranks(1, 2)
def test_moments_that_would_be_wrong_are_refused(rank, world_size):
    """A context inside a forward pass is refused; gradients of one rank alone have one dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)

    def inside(*_):
        with shardwise.gathered(model):
            pass

    handle = model[1].register_forward_pre_hook(inside)
    with pytest.raises(StateError, match="inside a forward or backward pass"):
        model(torch.ones(2, 4))
    handle.remove()
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    with shardwise.gathered(model):
        used = model[0].weight if rank == 0 else model[0].bias
        used.square().sum().backward()
        expected = [(p.detach().clone(), i == 0) for i, p in enumerate(model[0].parameters())]
    for param, (full, of_first) in zip(model[0].parameters(), expected, strict=True):
        users = 1 if of_first or world_size > 1 else 0
        assert (param.grad is not None) == bool(users)
        if param.grad is not None:
            assert torch.equal(param.grad.full_tensor(), 2 * full / world_size)


@on_ranks(2)
def test_windows_of_torchs_switches_are_closed_by_ours_and_cannot_be_saved(tmp_path):
    """A window under torch's own switches, ended by ours; nothing in it can be saved."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for switch in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model, plain = sharded("fully_shard", mesh), sharded("fully_shard", mesh)
        getattr(model, switch)(False)
        step_of(model, 0)
        with pytest.raises(StateError, match="accumulation window"):
            shardwise.save(tmp_path, model)
        with shardwise.accumulate(model, last=True):
            step_of(model, 1)
        step_of(plain, 0)
        step_of(plain, 1)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            grads = [p.grad.full_tensor() for p in (mine, theirs)]
            assert_rounded_alike(*grads, 8, switch)  # one reduction of a sum, or a sum of two


@on_ranks(4)
def test_parts_that_are_kept_from_a_forward_pass_go_stale():
    """What a rank keeps of a forward pass is dropped when the parameters change."""
    torch.manual_seed(3)
    model, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(model.state_dict())
    fully_shard(model, reshard_after_forward=2)
    x = torch.ones(1, 8)
    for _ in range(2):
        model.unshard()
        model.reshard()
        output = model(x)
        assert torch.equal(output, plain(x))
        with shardwise.gathered(model, writeback=True):
            model.weight.data.mul_(2)
        with torch.no_grad():
            plain.weight.mul_(2)
            for each in (model, plain):
                each.bias.add_(1)
        model.reshard()
        assert torch.equal(model(x), plain(x))
