"""Low precision against a plain loop that says by hand what is cast, and what is summed how."""

import copy

import pytest
import torch
from torch import nn

import zero_from_scratch as zero
from models import OddModel
from oracle import assert_same_bits, sums
from ranks import on_ranks
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
                sums([local(who, by_rank[who]) for by_rank in window])[0]
                for who in range(num_ranks)
            ]
            for name, total in sums(by_rank)[0].items():
                if total is not None:
                    mean = (total / num_ranks).float()
                    before = masters[name].grad
                    masters[name].grad = mean if before is None else before + mean
        grads.append({n: None if p.grad is None else p.grad.clone() for n, p in masters.items()})
        optimizer.step()
    return Trained(losses, full_parameters(model), grads, full_state(model, optimizer))


def named(model):
    return list(model.named_parameters())


BF16, FP32 = torch.bfloat16, torch.float32
SUMMED_IN_BF16 = Precision(BF16, FP32, BF16)


@pytest.mark.parametrize(
    ("world_size", "precision", "reduce", "num_micro_batches"),
    [
        *((size, "bf16", FP32, num) for size in (1, 3) for num in (1, 3)),
        (3, SUMMED_IN_BF16, BF16, 1),
    ],
)
@on_ranks()
def test_bf16_computes_with_cast_masters_and_sums_gradients_in_fp32_or_as_asked(
    rank, world_size, precision, reduce, num_micro_batches
):
    failures = []
    cases = [(OddModel, zero.next_byte_loss, token_batch), (FloatModel, float_loss, None)]
    for (make_model, loss_fn, make_batch), half in zip(cases, HALVES, strict=True):
        options = {} if make_batch is None else {"make_batch": make_batch}
        steps = make_steps(world_size, 2, num_micro_batches, **options)
        truths = {}
        for each in (False, True):
            torch.manual_seed(0)
            truths[each] = train_by_hand(make_model(), steps, loss_fn, rank, BF16, reduce, each)
        for settings in half:
            torch.manual_seed(0)
            trained = train(make_model(), steps, loss_fn, precision=precision, **settings)
            try:
                assert_same_run(trained, truths[reduces_each_micro_batch(settings)])
            except AssertionError as error:
                failures.append(f"{make_model.__name__} {settings}: {error}")
    assert not failures, "\n".join(failures)


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


@pytest.mark.parametrize(("world_size", "make"), [(2, adamw), (3, adamw), (2, adamw_fused)])
@on_ranks()
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(rank, world_size, make):
    steps = make_steps(world_size, 3, make_batch=token_batch)
    for options in HALVES[world_size % 2]:
        scales, parameters, state = train_with_scaler(rank, steps, make, True, **options)
        assert scales == [512.0, 256.0, 256.0], f"{options}: {scales}"
        _, without, state_without = train_with_scaler(rank, steps, make, False, **options)
        assert_same_bits(parameters, without)
        assert_same_state(state, state_without)
