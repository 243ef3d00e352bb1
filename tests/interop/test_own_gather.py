"""Tensors of classes that define their own gather: trained, saved and copied on both surfaces."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise
from oracle import assert_same_bits
from own_gather import KINDS, OnlyChunked, OwnNet, Pair
from ranks import on_ranks, run_sizes
from shardwise.errors import ConfigError, ReplicaError, StateError
from shardwise.tensor.inner import gather_whole, plain_parts
from shardwise.tensor.plain_state import owner_of
from trainer import full as whole
from trainer import sharded_by_block

STAGES = (1, 2, 3)
ROWS = {"half": 7, "sum": 6}  # a tensor of several is cut evenly, by FSDP2's contract


def make(kind):
    return OwnNet(kind, ROWS[kind])


def sharded(kind, how, **options):
    model = make(kind)
    if how != "calls":
        return shardwise.shard(model, stage=how, units=[nn.Linear], **options)
    return sharded_by_block(model, **options)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def step_losses(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.arange(2.0 * model.head.in_features).view(2, -1).add(step) / 7
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(tensors):
    """Return copies of plain tensors, those that others are made of with the attribute's name."""
    return {
        name + suffix: part.detach().clone()
        for name, tensor in tensors
        for suffix, part in plain_parts(tensor).items()
    }


def full(model):
    with shardwise.gathered(model):
        return values_of(iter(model.state_dict().items()))


def moments(model, optimizer):
    """Return all state of an optimizer, whole."""
    found = []
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            owner = owner_of(param)
            if owner is not None and key != "step":
                value = gather_whole(value._local_tensor, owner.cut)
            found.append((f"{name}, {key}", value))
    return values_of(iter(found))


class Rounded(torch.autograd.Function):
    """A weight as bf16 has it; its gradient as it comes."""

    @staticmethod
    def forward(ctx, weight):
        return weight.bfloat16().float()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Whole(nn.Linear):
    """What a weight of its own class means, with plain parameters."""

    def forward(self, x):
        weight = Rounded.apply(self.weight) if self.shift is None else self.weight + self.shift
        return nn.functional.linear(x, weight, self.bias)


def train_plainly(kind):
    """Train in one process, with plain parameters; return losses and values by our names."""
    model = make(kind)
    for block in model.blocks:
        parts = plain_parts(block.weight)
        block.__class__ = Whole
        block.weight = nn.Parameter(next(iter(parts.values())).clone())
        block.shift = nn.Parameter(parts[".shift"].clone()) if kind == "sum" else None
    losses = step_losses(model, adam(model), range(3))
    names = {"weight": "weight.wide", "shift": "weight.shift"} if kind == "sum" else {}
    found = {}
    for name, value in model.state_dict().items():
        path, _, attribute = name.rpartition(".")
        in_block = path.startswith("blocks")
        found[f"{path}.{names.get(attribute, attribute) if in_block else attribute}"] = value
    return losses, found


def train_alike(rank, world_size, folder):
    """Both surfaces and every stage; each saves, and goes on from what another has saved."""
    ends = {}
    for kind in KINDS:
        losses, values = train_plainly(kind)
        states = {}
        ways = ("calls", {1: 2, 2: 1, 3: 3}[world_size])
        for how in ways:
            model = sharded(kind, how, **({"layout": "flat"} if how == 3 else {}))
            local = model.blocks[0].weight._local_tensor
            assert type(local) is type(make(kind).blocks[0].weight)
            optimizer = adam(model)
            assert step_losses(model, optimizer, range(3)) == losses or world_size == 3
            states[how] = full(model), moments(model, optimizer)
            assert_same_bits(states[how][0], states["calls"][0])
            assert_same_bits(states[how][1], states["calls"][1])
            if world_size < 3:  # a mean of three has a rounding
                assert_same_bits(states[how][0], values)
            shardwise.save(folder / f"{kind} {how} on {world_size}", model, optimizer)
        for how, saved in zip((*ways, 3), (*ways[::-1], "calls"), strict=True):
            model = sharded(kind, how)
            optimizer = adam(model)
            if how != 3:  # into state that is there already
                step_losses(model, optimizer, range(5))
            shardwise.load(folder / f"{kind} {saved} on {world_size}", model, optimizer)
            assert_same_bits(full(model), states["calls"][0])
            assert_same_bits(moments(model, optimizer), states["calls"][1])
            rest = step_losses(model, optimizer, range(3, 5))
            assert rest == ends.setdefault(kind, rest)


def load_elsewhere(rank, world_size, folder, saved_on):
    """From any number of ranks to any other, and to a process that has the model whole."""
    for kind in KINDS:
        for saved in ("calls", 3 if saved_on == 3 else 1):
            path = folder / f"{kind} {saved} on {saved_on}"
            plain = make(kind)
            optimizer = adam(plain)
            shardwise.load(path, plain, optimizer)
            values = values_of(iter(plain.state_dict().items()))
            states = moments(plain, optimizer)
            assert any(name.endswith("exp_avg.shift") for name in states) == (kind == "sum")
            for how in ("calls",) if saved != "calls" else (2,):
                model = sharded(kind, how)
                ours = adam(model)
                shardwise.load(path, model, ours)
                assert_same_bits(full(model), values)
                assert_same_bits(moments(model, ours), states)
            if kind == "half":  # one tensor, under the name of the parameter itself
                other = nn.Module()
                other.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
                other.head = nn.Linear(7, 3)
                shardwise.load(path, other)
                assert_same_bits(dict(other.state_dict()), values)


def test_tensors_with_a_gather_of_their_own_train_as_in_one_process_and_load_anywhere(tmp_path):
    run_sizes(train_alike, {1: (tmp_path,), 2: (tmp_path,), 3: (tmp_path,)})
    run_sizes(load_elsewhere, {1: (tmp_path, 3), 3: (tmp_path, 2)})


@on_ranks(2)
def test_windows_contexts_and_copies_know_tensors_with_a_gather_of_their_own(rank):
    for kind in KINDS:
        totals = []
        for how in ("calls", *STAGES):
            model = sharded(kind, how)
            for last in (False, True):
                with shardwise.accumulate(model, last=last):
                    model(torch.ones(2, ROWS[kind]) + last).square().mean().backward()
                    if how == 1 and not last:
                        with pytest.raises(StateError, match="not reduced yet"):
                            model.blocks[0].weight.grad.full_tensor()
            totals.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
            assert_same_bits(totals[-1], totals[0])
        for how in ("calls", 3):
            model, before = sharded(kind, how), values_of(iter(make(kind).state_dict().items()))
            assert_same_bits(full(model), before)
            with shardwise.gathered(model, writeback=True), torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
            assert_same_bits(full(model), {name: value * 2 for name, value in before.items()})
            weight = model.blocks[0].weight
            with shardwise.gathered(weight) as (whole,):
                assert type(whole) is type(weight._local_tensor)
            inside = pytest.raises(StateError, match="changed inside the context")
            with inside, shardwise.gathered(model), torch.no_grad():
                model.blocks[1].weight.add_(rank == 0)
            weight.requires_grad_(False)
            step_losses(model, adam(model), range(1))
            name = next(n for n in before if n.startswith("blocks.0.weight"))
            assert torch.equal(full(model)[name], before[name] * 2)
            numel = sum(param.numel() for param in model.parameters())
            assert sum(unit.numel for unit in shardwise.describe(model).units) == numel
        copied, before = copy.deepcopy(model), full(model)
        losses = step_losses(model, adam(model), range(1, 3))
        assert_same_bits(full(copied), before)
        assert step_losses(copied, adam(copied), range(1, 3)) == losses
        assert_same_bits(full(copied), full(model))


@on_ranks(2)
def test_both_surfaces_take_the_same_clipped_steps_in_bf16_and_with_lists_of_tensors():
    """In bf16 a gathered weight may be what was sent."""
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for kind in KINDS:
        for of_shard, of_calls, foreach in (
            ({"precision": "bf16"}, {"mp_policy": half}, False),
            ({}, {}, True),
        ):
            found = {}
            for how in ("calls", 1, 3):
                model = sharded(kind, how, **(of_calls if how == "calls" else of_shard))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
                found[how] = []
                for step in range(3):
                    x = torch.arange(2.0 * ROWS[kind]).view(2, -1).add(step) / 7
                    loss = model(x).float().square().mean()
                    loss.backward()
                    norm = shardwise.parallel.clip_grad_norm_(model.parameters(), 0.1)
                    found[how].append((loss.item(), norm.item()))
                    optimizer.step()
                    optimizer.zero_grad()
            assert found[1] == found[3] == found["calls"]
            assert len(set(found[1])) == 3
    early = make("half")
    optimizer = adam(early)
    shardwise.shard(early, stage=2, units=[nn.Linear], optimizer=optimizer)
    late = sharded("half", 3)
    assert step_losses(early, optimizer, range(2)) == step_losses(late, adam(late), range(2))


@on_ranks(2)
def test_replicas_of_tensors_with_a_gather_of_their_own_are_compared(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for kind in KINDS:
        for how in ("calls", 2):
            model = sharded(kind, how, mesh=mesh)
            optimizer = adam(model)
            step_losses(model, optimizer, range(1))
            shardwise.check.replicas(model, optimizer)
            *_, last = plain_parts(model.blocks[1].weight._local_tensor).values()
            last[0, 0] += rank
            with pytest.raises(ReplicaError, match=r"'blocks\.1\.weight', value"):
                shardwise.check.replicas(model, optimizer)


@on_ranks(2)
def test_what_tensors_with_a_gather_of_their_own_cannot_do_is_refused(rank):
    with pytest.raises(ConfigError, match=r"blocks\.0\.weight' is a HalfSent.*use stage 1, 2 or 3"):
        sharded("half", 0)
    with pytest.raises(ConfigError, match="offload= takes plain parameters"):
        sharded("half", 3, offload="cpu")
    uneven = shardwise.shard(OwnNet("unpadded", 7), stage=3, units=[nn.Linear])
    if rank == 1:
        with pytest.raises(AssertionError, match=r"padded sharded size .*\[4, 7\].*\[3, 7\]"):
            uneven.blocks[0].unshard()
    scaled = shardwise.shard(OwnNet("scaled", 6), stage=3, units=[nn.Linear])
    with pytest.raises(
        ConfigError, match=r"blocks\.0\.weight' is a Scaled, whose 'scale' has shape"
    ):
        shardwise.save("nowhere", scaled)


@on_ranks(2)
def test_a_class_that_is_only_cut_by_chunks_is_sharded(rank):
    """Let it refuse slices, as torchao's NF4 does."""
    values = torch.arange(24.0).view(6, 4)
    for to_shards in (shardwise.shard, shardwise.fully_shard):
        layer = nn.Linear(4, 6, bias=False)
        layer.weight = nn.Parameter(OnlyChunked(values.clone()), requires_grad=False)
        model = to_shards(nn.Sequential(layer, nn.Linear(6, 2)))
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(whole(model[1].weight.grad), values.sum(1).expand(2, 6))


@on_ranks(2)
def test_gradient_of_the_full_forms_class_is_reduced_once(rank):
    """Each tensor that it is made of was sent, and the second step matched an old message."""
    values = torch.arange(24.0).view(6, 4)
    for to_shards in (shardwise.shard, shardwise.fully_shard):
        layer = nn.Linear(4, 6, bias=False)
        layer.weight = nn.Parameter(Pair(values, values.clone()))
        model = to_shards(layer)
        for step in range(1, 4):
            model(torch.full((1, 4), float(step))).sum().backward()
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((6, 4), float(step)))
            model.zero_grad()
