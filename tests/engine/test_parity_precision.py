"""Low precision against a plain loop that says by hand what is cast, and what is summed how."""

import copy

import pytest
import torch
from torch import nn

import zero_from_scratch as zero
from models import OddModel
from oracle import assert_same_bits
from ranks import run_ranks
from shardwise import Precision, shard
from trainer import (
    HALVES,
    Trained,
    adamw,
    adamw_fused,
    assert_same_run,
    assert_same_state,
    full_parameters,
    full_state,
    make_steps,
    reduces_each_micro_batch,
    token_batch,
    train,
)


class FloatModel(nn.Module):
    """Takes floating-point inputs, whose dtype has to be cast on the way in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def float_loss(model, batch):
    dtype = next(p.dtype for p in model.parameters())
    casts = dtype != torch.float32 and not hasattr(model, "_shardwise_engine")
    return model(batch.to(dtype) if casts else batch).float().square().mean()


def train_by_hand(
    model, steps, loss_fn, rank, compute, reduce=torch.float32, reduce_each_micro_batch=False
):
    """fp32 masters, low-precision copies, gradients summed in `reduce` in rank order."""
    low = copy.deepcopy(model).to(compute)
    masters = dict(model.named_parameters())
    optimizer = adamw(list(masters.values()))
    losses, grads = [], []
    for micro_batches in steps:
        with torch.no_grad():
            for name, parameter in low.named_parameters():
                parameter.copy_(masters[name])
        losses.append(0.0)
        num_ranks = len(micro_batches[0])

        def local(who, batch):
            low.zero_grad()
            loss = loss_fn(low, batch) / len(micro_batches)  # noqa: B023 - used in this turn only
            loss.backward()
            losses[-1] += loss.item() if who == rank else 0.0
            return {n: None if p.grad is None else p.grad.to(reduce) for n, p in named(low)}

        windows = [[m] for m in micro_batches] if reduce_each_micro_batch else [micro_batches]
        for master in masters.values():
            master.grad = None
        for window in windows:
            by_rank = [
                add([local(who, by_rank[who]) for by_rank in window]) for who in range(num_ranks)
            ]
            for name, total in add(by_rank).items():
                if total is not None:
                    mean = (total / num_ranks).float()
                    before = masters[name].grad
                    masters[name].grad = mean if before is None else before + mean
        grads.append({n: None if p.grad is None else p.grad.clone() for n, p in masters.items()})
        optimizer.step()
    return Trained(losses, full_parameters(model), grads, full_state(model, optimizer))


def named(model):
    return list(model.named_parameters())


def add(addends):
    total = dict(addends[0])
    for addend in addends[1:]:
        for name, grad in addend.items():
            before = total[name]
            total[name] = grad if before is None else before if grad is None else before + grad
    return total


def compare_with_the_hand(
    rank, world_size, precision, compute, reduce=torch.float32, num_micro_batches=1
):
    failures = []
    cases = [(OddModel, zero.next_byte_loss, token_batch), (FloatModel, float_loss, None)]
    for (make_model, loss_fn, make_batch), half in zip(cases, HALVES, strict=True):
        options = {} if make_batch is None else {"make_batch": make_batch}
        steps = make_steps(world_size, 3, num_micro_batches, **options)
        truths = {}
        for each in (False, True):
            torch.manual_seed(0)
            truths[each] = train_by_hand(make_model(), steps, loss_fn, rank, compute, reduce, each)
        for settings in half:
            torch.manual_seed(0)
            trained = train(make_model(), steps, loss_fn, precision=precision, **settings)
            try:
                assert_same_run(trained, truths[reduces_each_micro_batch(settings)])
            except AssertionError as error:
                failures.append(f"{make_model.__name__} {settings}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world_size", [1, 3])
def test_bf16_computes_with_cast_masters_and_sums_gradients_in_fp32(world_size):
    run_ranks(compare_with_the_hand, world_size, "bf16", torch.bfloat16)


@pytest.mark.parametrize("world_size", [1, 3])
def test_accumulated_bf16_gradients_are_summed_in_fp32(world_size):
    run_ranks(compare_with_the_hand, world_size, "bf16", torch.bfloat16, num_micro_batches=3)


def test_gradients_are_summed_in_bf16_where_the_user_asks_for_it():
    precision = Precision(torch.bfloat16, torch.float32, torch.bfloat16)
    run_ranks(compare_with_the_hand, 3, precision, torch.bfloat16, torch.bfloat16)


class Poisoned(OddModel):
    """Makes one element of one gradient infinite when told to."""

    poison = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.poison:
            x.register_hook(put_infinity)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


def put_infinity(grad):
    grad = grad.clone()
    grad[0, 0, 0] = float("inf")
    return grad


def train_with_scaler(rank, steps, optimizer_factory, bad_step, **options):
    """Overflow in step 1, or leave that step out and halve the scale by hand."""
    torch.manual_seed(0)
    model = shard(Poisoned(), precision="fp16", **options)
    optimizer = optimizer_factory(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scales = []
    for number, (by_rank,) in enumerate(steps):
        if number == 1 and not bad_step:
            scaler.update(256.0)
        else:
            model.poison = number == 1 and rank == 1
            scaler.scale(zero.next_byte_loss(model, by_rank[rank]).float()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, full_parameters(model), full_state(model, optimizer)


def overflow_on_one_rank(rank, world_size, fused):
    steps = make_steps(world_size, 4, make_batch=token_batch)
    optimizer = adamw_fused if fused else adamw
    for options in HALVES[world_size % 2]:
        scales, parameters, state = train_with_scaler(rank, steps, optimizer, True, **options)
        assert scales == [512.0, 256.0, 256.0, 256.0], f"{options}: {scales}"
        _, without, state_without = train_with_scaler(rank, steps, optimizer, False, **options)
        assert_same_bits(parameters, without)
        assert_same_state(state, state_without)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(world_size):
    run_ranks(overflow_on_one_rank, world_size, False)


def test_an_overflow_skips_the_step_of_the_fused_optimizer_too():
    run_ranks(overflow_on_one_rank, 2, True)


def scales_under_overflows(rank, world_size):
    """Overflow in some steps, on different ranks; return the scales."""
    model = shard(Poisoned(), stage=3, precision="fp16")
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for number, (by_rank,) in enumerate(make_steps(world_size, 8, make_batch=token_batch)):
        model.poison = (number, rank) in {(0, 0), (1, 1), (5, 0), (5, 1)}
        scaler.scale(zero.next_byte_loss(model, by_rank[rank]).float()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert all(p.isfinite().all() for p in full_parameters(model).values())
    return scales


def test_the_loss_scale_follows_the_same_sequence_on_every_rank():
    expected = [32.0, 16.0, 16.0, 32.0, 32.0, 16.0, 16.0, 32.0]
    assert run_ranks(scales_under_overflows, 2) == [expected, expected]
