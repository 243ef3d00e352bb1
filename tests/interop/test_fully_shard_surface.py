"""What users of torch's `fully_shard` call besides training: methods, state, errors."""

import copy
import io
import logging
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from models import Block, Stack, stack_roundings
from ranks import on_ranks
from roundings import SMOOTH_EPS, assert_rounded_alike
from shardwise import fully_shard
from trainer import logged, sharded_by_block


def sharded(**options):
    torch.manual_seed(0)
    model = Stack()
    return sharded_by_block(model, **options)


def batch(seed=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def are_sharded(module):
    return {isinstance(p, DTensor) for p in module.parameters()}


def lifetimes(rank, world):
    """Modules hold full parameters from the gather until they are resharded."""
    model = sharded()
    reference = [p.full_tensor() for p in model.blocks[0].parameters()]
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    assert are_sharded(model.blocks[0]) == {False}
    full = list(model.blocks[0].parameters())
    assert all(torch.equal(a, b) for a, b in zip(full, reference, strict=True))
    model.state_dict()  # asks for shards, whatever stands there
    assert are_sharded(model.blocks[0]) == {True}
    model(batch())
    assert are_sharded(model.head) == {False}  # the root stays for its backward
    assert are_sharded(model.blocks[0]) == {True}
    model.reshard()
    assert are_sharded(model) == {True}
    model.set_reshard_after_forward(False)
    loss = model(batch()).sum()
    assert are_sharded(model) == {False}
    model.set_reshard_after_backward(False)
    loss.backward()
    assert are_sharded(model) == {False}
    model.set_reshard_after_backward(True)
    model(batch()).sum().backward()
    assert are_sharded(model) == {True}


def settings(rank, world):
    """Divide factors, prefetch lists, zero fill, the hook and the caller's own collectives."""
    plain = sharded()
    plain(batch(rank)).sum().backward()
    grads = [p.grad.full_tensor() for p in plain.parameters()]

    def check(model, factor=1.0):
        model(batch(rank)).sum().backward()
        for param, grad in zip(model.parameters(), grads, strict=True):
            # A mean of 1 to 3 gradients in another order; 2, since they are of either sign.
            assert_rounded_alike(param.grad.full_tensor(), grad * factor, 2 * (world + 1))

    divided = sharded()
    for module in (*divided.blocks, divided):
        module.set_gradient_divide_factor(2.0 * world)
    check(divided, 0.5)
    half = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    half(batch(rank)).sum().backward()  # divides before and after the sum
    for param, grad in zip(half.parameters(), grads, strict=True):
        # Cast, divided, summed and divided, each in fp16.
        assert_rounded_alike(param.grad.full_tensor().half(), grad.half(), 2 * (world + 3))
    ahead = sharded()
    ahead.set_modules_to_forward_prefetch(list(ahead.blocks))
    ahead.blocks[2].set_modules_to_backward_prefetch([ahead.blocks[1], ahead.blocks[0]])
    check(ahead)
    hooked, seen = sharded(), Seen()
    stream, current = torch.cpu.Stream(), torch.cpu.current_stream()
    hooked.set_all_reduce_hook(seen, stream=stream)
    check(hooked)
    assert seen == [stream] and torch.cpu.current_stream() is current
    custom = sharded()
    calls = []
    custom.set_custom_all_gather(Gather(calls))
    custom.set_custom_reduce_scatter(Scatter(calls))
    check(custom)
    assert calls == (["gather", "scatter"] if world > 1 else [])
    accepted = sharded()
    accepted.set_force_sum_reduction_for_comms(True)
    accepted.set_separate_reduce_scatter_group()
    accepted.set_post_optim_event(torch.Event("cpu"))
    accepted.set_reduce_scatter_max_input_buffers(2)
    share_comm_ctx([accepted, sharded()])
    check(accepted)


class Seen(list[torch.Stream]):
    """A hook that has no hash, and notes the stream that it runs on."""

    def __call__(self, reduced):
        self.append(torch.cpu.current_stream())


class Gather:
    def __init__(self, calls):
        self._calls = calls

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, **_):
        self._calls.append("gather")
        dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group)


class Scatter(Gather):
    def __call__(self, output_tensor, input_tensor, group, op):
        self._calls.append("scatter")
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def unused(rank, world):
    """Where ranks use other parameters, zeros stand in, if that is asked for."""
    block = fully_shard(Block())
    block.set_reduce_scatter_unused_params(True)
    out = block(batch())
    (out if rank == 0 else out.detach() + block.down.bias).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert torch.equal(block.down.bias.grad.full_tensor(), torch.full((8,), 4.0))


def states(rank, world):
    """Meta, casts, loads and state dicts; what optimizers and clipping do with the DTensors."""
    torch.manual_seed(0)
    whole = Stack().state_dict()
    with torch.device("meta"):
        model = Stack()
    sharded_by_block(model)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        model(batch())
    model.to_empty(device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # DTensor's, about draws on the CPU
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    for name, tensor in get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    ).items():
        assert torch.equal(tensor, whole[name])
    for name, tensor in model.state_dict().items():
        assert (
            tensor.to_local().data_ptr()
            == dict(model.named_parameters())[name]._local_tensor.data_ptr()
        )
    expected = sharded()(batch())
    assert torch.equal(model(batch()), expected)
    for name, tensor in copy.deepcopy(model.state_dict()).items():  # as pickling does
        assert torch.equal(tensor.full_tensor(), whole[name])
    file = io.BytesIO()
    torch.save({name: tensor.to_local() for name, tensor in model.state_dict().items()}, file)
    rows = sum(t.to_local().nbytes for t in model.state_dict().values())
    assert file.getbuffer().nbytes < rows + 2048 * len(whole)  # each its own bytes, not the unit's
    pieces = {
        name: distribute_tensor(whole[name] * 2, p.device_mesh, p.placements)
        for name, p in model.state_dict().items()
    }
    model.load_state_dict(pieces, assign=True)
    assert torch.equal(model.head.weight.full_tensor(), whole["head.weight"] * 2)
    doubled = copy.deepcopy(whole)
    reference = Stack()
    reference.load_state_dict({k: v * 2 for k, v in doubled.items()})
    assert torch.equal(model(batch()), reference(batch()))
    model.to(torch.float64)
    reference.to(torch.float64)
    assert torch.equal(model(batch().double()), reference(batch().double()))
    model.reshard()  # there was no backward pass, so the root is full
    smooth = {"eps": SMOOTH_EPS}  # Note [Losses after steps of Adam] in roundings.py
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1, fused=True, **smooth) for m in (model, reference)
    ]
    for _ in range(3):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(batch().double()).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            norms = norm.full_tensor() if isinstance(norm, DTensor) else norm
    assert norms > 0
    assert set(get_optimizer_state_dict(model, optimizers[0])["state"]) == set(whole)
    # Of three steps in fp64, whose rate over eps makes ten of each; clipping sums 300 squares.
    roundings = 3 * 10 * (stack_roundings(rows=2 * 4) + 300)
    assert_rounded_alike(model(batch().double()), reference(batch().double()), roundings)


def compositions(rank, world):
    """Tied, frozen and ignored parameters, lists, checkpointing, other forward methods, errors."""
    torch.manual_seed(0)
    plain = Wide()
    model = copy.deepcopy(plain)
    model.body.up.weight.requires_grad_(False)
    ignored = {model.body.down.bias}
    fully_shard([model.embed, model.head], mp_policy=MixedPrecisionPolicy())
    fully_shard(model.body, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    register_fsdp_forward_method(model, "score")
    assert not isinstance(model.body.down.bias, DTensor)
    ids = torch.arange(5)
    for run in (lambda m: m(ids), lambda m: m.score(ids)):
        for each in (plain, model):
            each.zero_grad()
            run(each).square().sum().backward()
        # A mean of equal gradients: two sums and a quotient for three ranks.
        assert_rounded_alike(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad, 3)
        assert model.embed.weight is model.head.weight
        assert model.body.up.weight.grad is None
        assert torch.equal(model.body.down.bias.grad, plain.body.down.bias.grad)
    with torch.inference_mode():
        model(ids)
    model.body.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(ids)
    model.body.fails = False
    model.reset_iter_state()
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    for made in (copy.deepcopy(optimizer), copy.deepcopy(dict(model.named_parameters()))):
        assert made is not None  # on every rank; a DTensor of a view could not be copied
    torch.save(list(model.parameters()), io.BytesIO())
    model(ids).square().sum().backward()
    plain.zero_grad()
    plain(ids).square().sum().backward()
    assert_rounded_alike(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad, 3)


@dataclass
class Output:
    """What many models return."""

    logits: Tensor


class Returning(nn.Linear):
    """A model that returns a dataclass and takes one."""

    def forward(self, output):
        assert output.logits.dtype is torch.bfloat16
        return Output(super().forward(output.logits))


class Wide(nn.Module):
    """A tied head, a checkpointed body, and a second forward method."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.body = Fallible()
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(checkpoint(self.body, self.embed(ids), use_reentrant=False))

    def score(self, ids):
        return self.head(self.body(self.embed(ids)))


class Int8(Gather):
    """Sends int8 with one scale for each rank's chunk, as compressors of gradients do."""

    def __init__(self):
        super().__init__([])
        self.numels = []

    def __call__(self, output_tensor, input_tensor, group, op):
        self.numels.append(output_tensor.numel())
        chunks = input_tensor.view(group.size(), -1)
        scales = chunks.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
        sent = (chunks / scales).round() * scales
        dist.all_reduce(sent, op, group)
        output_tensor.copy_(sent[group.rank()])


def compressed(rank, world):
    """The caller's own reduce-scatter gets the gradients and nothing beside them."""
    torch.manual_seed(0)
    alone, model, scatter = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), Int8()
    model.load_state_dict(alone.state_dict())
    fully_shard(model)
    model.set_custom_reduce_scatter(scatter)
    for module in (alone, model):
        (module(batch(rank)) * 1e-3).sum().backward()  # far smaller than any count
    mean, largest = alone.weight.grad, alone.weight.grad.abs().max()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    error = (model.weight.grad.full_tensor() - mean).abs().max()
    assert error <= largest / 127 < mean.abs().max() / 4
    assert scatter.numels == ([-(-8 // world) * 8] if world > 1 else [])
    partly = Block()
    partly.idle = nn.Parameter(torch.ones(4))
    fully_shard(partly)
    partly.set_custom_reduce_scatter(Int8())
    out = partly(batch())
    (out if rank == 0 else out.detach() + partly.down.bias).sum().backward()
    assert [name for name, p in partly.named_parameters() if p.grad is None] == ["idle"]


class Fallible(Block):
    fails = False

    def forward(self, x):
        if self.fails:
            raise RuntimeError("on purpose")
        return super().forward(x)


def casts(rank, world):
    """Inputs and outputs are cast inside dataclasses too."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = fully_shard(Returning(4, 4), mp_policy=policy)
    assert model(Output(torch.ones(2, 4))).logits.dtype is torch.float32


def what_is_told(shard_with):
    """Train one step; return what was logged, and what private names say of the root."""
    torch.manual_seed(0)
    model = Stack()
    groups = [*model.blocks, model]
    for module in groups:
        shard_with(module)
    states = [shard_with.state(module) for module in groups]
    said = [[state._is_root for state in states]]
    states[-1]._lazy_init()
    said.append([state._is_root for state in states])
    said.append([states.index(state) for state in states[-1]._state_ctx.all_states])
    with logged("torch.distributed.fsdp.fully_shard", logging.DEBUG) as lines:
        model(batch()).sum().backward()
    return lines, said


def as_torch_tells(rank, world):
    """Private names that tools read, and the lines of TORCH_LOGS=+fsdp, are those of torch."""
    lines, said = what_is_told(fully_shard)
    expected_lines, expected = what_is_told(torch_fully_shard)
    assert said == expected
    assert lines[:-2] == expected_lines[:-2] and lines[-3] == "FSDP::root_post_backward"
    # The input needs no gradient, so the ends of the first block and of the root are told at the
    # end of the pass: ours from the last group to the first, torch's the other way round.
    assert lines[-2:] == expected_lines[:-3:-1]


@on_ranks(1, pytest.param(2, marks=pytest.mark.kernels), 3)
def test_methods_state_and_compositions_mean_what_torchs_do(rank, world):
    lifetimes(rank, world)
    settings(rank, world)
    states(rank, world)
    compositions(rank, world)
    casts(rank, world)
    as_torch_tells(rank, world)
    compressed(rank, world)
    if world > 1:
        unused(rank, world)


@on_ranks(2)
def test_what_torch_refuses_is_refused_with_its_errors():
    model = sharded()
    assert isinstance(model, FSDPModule) and type(model).__name__ == "FSDPStack"
    assert isinstance(model, Stack) and fully_shard.state(model) is not None
    with pytest.raises(AssertionError, match="applied to a module once"):
        fully_shard(model)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        fully_shard(nn.ModuleList([Block()]))
    scalar = Block()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Change scale to a 1D tensor"):
        fully_shard(scalar)
    uneven = nn.Linear(5, 4)
    with pytest.raises(NotImplementedError, match=r"uneven sharding on dim 1.*weight"):
        fully_shard(uneven, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert type(uneven) is nn.Linear and type(uneven.weight) is nn.Parameter
    strided = nn.Linear(4, 6)
    strided.weight = nn.Parameter(torch.randn(4, 6).t())
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        fully_shard(strided)
    with pytest.raises(ValueError, match="factor of 2, not 3"):
        fully_shard(Block(), reshard_after_forward=3)
    tied = Wide()
    fully_shard(tied.embed), fully_shard(tied.head), fully_shard(tied)
    with pytest.raises(ValueError, match=r"'head.weight' is shared .* use fully_shard\(\["):
        tied(torch.arange(3))
    inner = sharded()
    inner.blocks[0](batch())
    with pytest.raises(RuntimeError, match=r"already been lazily initialized for blocks\.0"):
        inner(batch())
    for call in (
        lambda: model.set_reshard_after_forward(1),
        lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
        lambda: model.set_reduce_scatter_max_input_buffers(0),
    ):
        with pytest.raises(ValueError):
            call()
    offloaded = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert {p.device.type for p in offloaded.parameters()} == {"cpu"}


@on_ranks(4)
def test_what_is_loaded_counts_where_parts_of_other_values_are_left():
    """Load other parameters while parts of the old ones are left from a forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    x = torch.ones(2, 4)
    model(x)  # with gradients, so parts are kept for a backward pass that never comes
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(x), torch.full((2, 4), 21.0))  # 5 in each of four, and one
