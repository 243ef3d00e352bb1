"""Modules of `shard()` are FSDPModules: what their methods do at every stage, or refuse."""

import copy
import logging
import pickle
from abc import ABC
from contextlib import nullcontext
from typing import Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

import shardwise
from models import Block, Experts, Stack
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import accumulate, gathered, shard
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, ShardError, StateError
from shardwise.tensor.shard_tensor import ShardTensor
from trainer import logged

STAGES = range(4)


class Named(Stack):
    """A model with a second way in."""

    def halved(self, x):
        return self.forward(x) / 2


class AbcFirst(ABC, nn.Linear):
    """Its first base that adds a ``__dict__`` is its own: `ABC` has none."""


class GenericFirst(Generic[TypeVar("T")], nn.Linear):
    pass


class Mixin(ABC):  # noqa: B024
    pass


class MixinFirst(Mixin, nn.Linear):
    pass


class Registered(Block):
    """A class that wants to know of its subclasses."""

    def __init_subclass__(cls, *, key):
        raise AssertionError(key)


class Registering(Stack):
    block_class = Registered


def sharded(stage, **options):
    torch.manual_seed(0)
    return shard(Named(), stage=stage, **options)


def plain():
    torch.manual_seed(0)
    return Named()


def batch(number, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(model, number, rank):
    return model(batch(number, rank)).square().mean()


def expected(world, numbers, divisor=None):
    """Return the gradients of one process, summed over micro-batches, the mean over ranks."""
    model = plain()
    for rank in range(world):
        for number in numbers:
            (loss_of(model, number, rank) / (divisor or world)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def same_gradients(model, wanted):
    roundings = of_gradient(*(8, 11) * 3, 8, over=4 * 9)
    for param, grad in zip(model.parameters(), wanted, strict=True):
        assert isinstance(param.grad, ShardTensor)
        assert_rounded_alike(param.grad.full_tensor(), grad, roundings)


def sent(model, kind):
    return shardwise.debug.stats(model).num_collectives.get(f"shard.{kind}", 0)


# -- what they are
@on_ranks(1, 2)
def test_every_module_with_a_unit_is_one_and_copies_and_new_ones_are_what_they_were(rank, world):
    for stage in (1, 3):
        model = sharded(stage)
        engine = engine_of(model)
        units = [model, *model.blocks]
        for module in units:
            state = fully_shard.state(module)
            assert isinstance(module, FSDPModule) and state is module._get_fsdp_state()
            assert state._state_ctx.all_states == engine.all_states and state in engine.all_states
            made = type(module)()
            assert type(made) is type(module).__mro__[type(module)._orig_cls_mro_index]
            assert type(made).__name__ == type(module).__name__ and made.training
        assert [s._is_root for s in engine.all_states] == [True, False, False, False]
        assert not isinstance(model.head, FSDPModule) and type(plain()) is Named
        with pytest.raises(StateError, match="pickling a sharded model"):
            pickle.dumps(model.blocks[0])
        other = copy.deepcopy(model)
        for mine, copied in zip(units, [other, *other.blocks], strict=True):
            assert type(copied) is type(mine)
            assert copied._get_fsdp_state().engine is engine_of(other) is not engine
        with gathered(model):
            ordinary = copy.deepcopy(model)
        assert not any(isinstance(m, FSDPModule) for m in ordinary.modules())
        assert type(ordinary) is Named and type(ordinary.blocks[0]) is Block
        assert fully_shard.state(ordinary) is None
        (block, *_) = shard(Registering(), stage=stage).blocks
        assert isinstance(block, FSDPModule) and isinstance(block, Registered)
        register_fsdp_forward_method(model, "halved")
        (2 * loss_of(model.halved, 0, rank)).backward()
        reference = plain()
        for each in range(world):
            (2 * loss_of(reference.halved, 0, each) / world).backward()
        same_gradients(model, [p.grad for p in reference.parameters()])


@on_ranks(1)
def test_passes_of_shard_are_told_in_the_log_of_torchs_own(rank):
    model = sharded(3)
    units = [unit.name for unit in engine_of(model).units]
    with logged("torch.distributed.fsdp.fully_shard", logging.DEBUG) as lines:
        loss_of(model, 0, rank).backward()
    found = [line.removeprefix("FSDP::") for line in lines]
    assert found[0] == "root_pre_forward" and "root_post_backward" in found
    for event in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
        told = sorted(line for line in found if line.split()[0] == event)
        assert told == sorted(f"{event} ({name})" if name else event for name in units)


# -- full parameters
class OwnNames(nn.Linear):
    """A layer with a method that FSDPModule has too."""

    def reshard(self, by):
        return by + 1

    def forward(self, x):
        return super().forward(x) * self.reshard(0)


@on_ranks(1, 3)
def test_what_stands_full_in_the_modules_is_sharded_again_when_a_pass_ends(rank):
    """Full parameters stand in the modules until a backward pass ends; nothing of them is lost."""
    for stage in STAGES:
        model = sharded(stage)
        model.unshard()
        found = model.named_parameters()
        weight = next(name for name, p in found if not isinstance(p, ShardTensor))
        dict(model.named_parameters())[weight].requires_grad_(False)
        loss_of(model, 0, rank).backward()
        params = dict(model.named_parameters())
        assert all(isinstance(param, ShardTensor) for param in params.values())
        assert not params[weight].requires_grad and params[weight].grad is None
        model.zero_grad()
        model.reshard()
        model.set_requires_gradient_sync(False)
        loss_of(model, 0, rank).backward()
        model.finalize_backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(isinstance(grad, ShardTensor) for grad in grads)
        model.unshard()
        with torch.no_grad():
            dict(model.named_parameters())[weight].zero_()
        model.state_dict()
        with pytest.raises(ShardError, match="was written while unshard"):
            model.reshard()
    layers = shard(nn.Sequential(OwnNames(4, 4)), units=[OwnNames])
    assert layers[0].reshard(1) == 2
    layers(torch.ones(2, 4)).sum().backward()


@on_ranks(1, 2, 3)
def test_unshard_holds_parameters_in_full_over_passes_until_reshard(rank, world, tmp_path):
    for stage in STAGES:
        model, reference = sharded(stage), plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for module in (model, *model.blocks):
            handle = module.unshard(async_op=True)
            handle.wait()
            assert module.unshard() is None  # a second time is no second pin
        for (name, param), like in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert not isinstance(param, ShardTensor) and torch.equal(param, like), name
        assert all(isinstance(v, ShardTensor) for v in model.state_dict().values())
        for module in (model, *model.blocks):  # as a step of a pipeline asks again
            module.unshard()
        before = sent(model, "all_gather")
        losses = [loss_of(model, number, rank) for number in range(3)]
        for number in (1, 0, 2):
            losses[number].backward()
        if stage:  # which gathers means, too
            assert sent(model, "all_gather") == before
        before = sent(model, "all_gather")
        optimizer.step()  # the next pass reads what it has written
        losses = [loss_of(model, 3, rank)]
        gathers = 0 if stage == 0 or world == 1 else 4
        assert sent(model, "all_gather") == before + gathers
        for module in (model, *model.blocks):
            module.reshard()
        same_gradients(model, expected(world, (0, 1, 2)))
        step = torch.optim.SGD(reference.parameters(), lr=0.1)
        for param, grad in zip(reference.parameters(), expected(world, (0, 1, 2)), strict=True):
            param.grad = grad
        step.step()
        assert_rounded_alike(
            losses[0].detach(), loss_of(reference, 3, rank).detach(), of_gradient(8, 11, over=36)
        )
        if stage == 3 and world > 1:
            assert not shardwise.debug.stats(model).param_full_bytes
        losses[0].backward()
        for saves in (True, False):
            optimizer.zero_grad()
            model.blocks[0].unshard()
            if saves:
                shardwise.save(f"{tmp_path}/{stage}", model)
            else:
                with gathered(model):
                    pass
            assert all(isinstance(p, ShardTensor) for p in model.parameters())
        model.blocks[0].unshard()
        with torch.no_grad():
            model.blocks[0].up.weight.add_(1)
        with pytest.raises(ShardError, match=r"'blocks\.0\.up\.weight' was written while unshard"):
            model.blocks[0].reshard()
        assert isinstance(model.blocks[0].up.weight, ShardTensor)


@on_ranks(2)
def test_full_parameters_are_freed_and_prefetched_as_the_setters_say(rank, world):
    """Gathers of a step of two micro-batches, by what is freed; stage 3."""
    # The root stays for its backward, and so does the last block.
    for settings, gathers in (
        ({}, [6, 6]),
        ({"set_reshard_after_forward": False}, [4, 4]),
        ({"set_reshard_after_forward": False, "set_reshard_after_backward": False}, [4, 0]),
        ({"set_modules_to_forward_prefetch": 1}, [6, 6]),
    ):
        model = sharded(3)
        for name, value in settings.items():
            if name == "set_modules_to_forward_prefetch":
                model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
                model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
            else:
                getattr(model, name)(value)
        found = []
        for number in range(2):
            before = sent(model, "all_gather")
            loss_of(model, number, rank).backward()
            found.append(sent(model, "all_gather") - before)
        assert found == gathers, settings
        same_gradients(model, expected(world, (0, 1)))
    for spares in (False, True):  # the first layer's backward needs no weight
        layers = [nn.Linear(8, 8) for _ in range(3)]
        model = shard(nn.Sequential(*layers), stage=3, units=nn.Linear)
        model[0].set_unshard_in_backward(not spares)
        model(batch(0, rank)).sum().backward()
        assert sent(model, "all_gather") == (4 if spares else 5)
        assert all(p.grad.full_tensor().any() for p in model.parameters())
    with pytest.raises(ConfigError, match=r"at stage 2: full parameters stay.*stage=3"):
        sharded(2).set_reshard_after_forward(True)
    for stage in (1, 2):
        model = sharded(stage)
        model.set_reshard_after_backward(True)  # as the stage does
        loss_of(model, 0, rank).backward()
        before = sent(model, "all_gather")
        loss_of(model, 0, rank).backward()
        assert sent(model, "all_gather") == before


# -- gradients
@on_ranks(1, 3)
def test_gradients_stay_on_their_ranks_until_synced_or_finalized(rank, world):
    for stage in STAGES:
        model = sharded(stage)
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            loss_of(model, number, rank).backward()
            if number < 2 and world > 1:
                assert sent(model, "reduce_scatter") == 0
        same_gradients(model, expected(world, (0, 1, 2)))
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        losses = [loss_of(model, number, rank) for number in range(3)]
        for number in (2, 0, 1):  # in flight at once, and in another order
            losses[number].backward()
        with pytest.raises(StateError, match="accumulation window"):
            shardwise.save("never", model)
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        same_gradients(model, expected(world, (0, 1, 2)))
        model.zero_grad()
        model.blocks[1].set_requires_gradient_sync(False, recurse=False)  # one unit alone waits
        loss_of(model, 0, rank).backward()
        assert model.blocks[0].up.weight.grad.full_tensor().abs().sum() > 0
        with pytest.raises(StateError, match="not reduced yet"):
            model.blocks[1].up.weight.grad + 1
        with accumulate(model, last=True):  # who says that a micro-batch is the last is heard
            loss_of(model, 1, rank).backward()
        same_gradients(model, expected(world, (0, 1)))


def skipped(rank, world):
    """Where ranks run different experts, what is finalized takes part on all of them."""
    for stage in (0, 2):
        torch.manual_seed(0)
        model = shard(Experts(), stage=stage, units=nn.Linear)
        torch.manual_seed(0)
        reference = Experts()
        model.set_requires_gradient_sync(False)
        for number in range(2):
            model(batch(number, rank), rank).square().mean().backward()
            for each in range(world):
                (reference(batch(number, each), each).square().mean() / world).backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        for param, like in zip(model.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (like.grad is None)
            if param.grad is not None:
                wanted = of_gradient(8, 8, over=16)
                assert_rounded_alike(param.grad.full_tensor(), like.grad, wanted)


@on_ranks(1, 2, 3)
def test_sums_take_a_divisor_and_zeros_for_what_had_no_gradient(rank, world):
    shape = (2, 1) if world == 2 else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for stage in STAGES:
        for options in ({}, {"mesh": mesh}):
            model = sharded(stage, **options)
            for module in (model, *model.blocks[:2]):
                module.set_gradient_divide_factor(1.0)  # the last block keeps its own
            model.set_force_sum_reduction_for_comms(True)
            loss_of(model, 0, rank).backward()
            wanted = expected(world, (0,), divisor=1.0)
            mean = [p / world for p in wanted]
            owners = [p._owner.unit.name for p in model.parameters()]
            choices = zip(owners, mean, wanted, strict=True)
            picked = [m if owner == "blocks.2" else w for owner, m, w in choices]
            same_gradients(model, picked)
        model = shard(Experts(), stage=stage)
        model.set_reduce_scatter_unused_params(True)
        model(batch(0, rank), 0).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert not model.blocks[0].experts[1].weight.grad.full_tensor().any()
    if world == 2:
        with pytest.raises(ConfigError, match=r"set_requires_all_reduce\(\).*accumulate\("):
            sharded(3, mesh=mesh).set_requires_all_reduce(False)
        skipped(rank, world)


# -- what is refused, and what means nothing
class Gather:
    """A user's own all-gather."""

    num_calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, **_):
        self.num_calls += 1
        dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group)


@on_ranks(2)
def test_what_cannot_hold_says_what_to_use_and_the_rest_is_accepted(rank, world):
    model = sharded(3)
    with pytest.raises(NotImplementedError, match="set_reshard_after_forward"):
        model.set_keep_unsharded_storage(True)
    sharded(2).set_keep_unsharded_storage(True)
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        model.set_modules_to_forward_prefetch([model.head])
    model.set_requires_all_reduce(False)  # there are no replicas
    model.set_is_last_backward(False)
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_manual_backward_finalization(True)
    model.set_post_optim_event(torch.Event("cpu"))
    share_comm_ctx([model, sharded(0)])
    for stage in (2, 3):
        own, gather = sharded(stage), Gather()
        own.blocks[1].set_custom_all_gather(gather)
        loss_of(own, 1, rank).backward()
        same_gradients(own, expected(world, (1,)))
        assert gather.num_calls == stage - 1
    loss = loss_of(model, 0, rank)
    model.set_requires_gradient_sync(False)
    loss.backward()
    with pytest.warns(RuntimeWarning, match="run the window again"):
        model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1, rank).backward()
    same_gradients(model, expected(world, (1,)))
    dist.barrier()


@on_ranks(2, 3)
def test_a_numpy_array_of_a_full_parameter_is_told_and_the_next_steps_are_right(rank):
    losses = {}
    for reads in (False, True):
        model, kept = sharded(3), []
        unit = next(module for module in model.modules() if isinstance(module, Block))
        if reads:
            unit.register_forward_pre_hook(
                lambda module, args, kept=kept: kept.append(
                    next(module.parameters()).detach().numpy()
                )
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[reads] = []
        with pytest.warns(UserWarning, match="NumPy array.*clone") if reads else nullcontext():
            for number in range(3):
                loss = model(batch(number, rank)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[reads].append(loss.item())
    assert losses[True] == losses[False]


@pytest.mark.parametrize("kind", [AbcFirst, GenericFirst, MixinFirst])
@on_ranks(2)
def test_modules_with_an_abstract_or_generic_first_base_are_sharded(rank, kind):
    torch.manual_seed(0)
    plain = nn.Sequential(kind(4, 4), nn.Tanh(), kind(4, 4))
    x = torch.ones(2, 4)
    plain(x).sum().backward()
    for name, function in {"shard": shard, "fully_shard": shardwise.fully_shard}.items():
        model = copy.deepcopy(plain)
        model.zero_grad()
        if name == "shard":
            shard(model, units=[kind])
        else:
            for each in (model[0], model[2], model):
                function(each)
        assert isinstance(model[0], kind) and isinstance(model[0], FSDPModule)
        assert type(type(model[0])(2, 2)) is kind
        model(x).sum().backward()
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), expected.grad), name
    copied = copy.deepcopy(shard(copy.deepcopy(plain), units=[kind]))
    assert torch.equal(copied(x), plain(x))
