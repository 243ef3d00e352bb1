"""Ranks that do not run the same layers: layerdrop, stochastic depth, a head per task, experts."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import agreed, on_ranks
from roundings import assert_rounded_alike, of_gradient
from scenarios import (
    ON_MESHES,
    Dropped,
    Inner,
    NestedDropped,
    OnMeshes,
    dropped_batch,
    dropped_loss,
    on_meshes,
)
from shardwise import accumulate, shard
from shardwise.config import Schedule, Units
from shardwise.engine.api import engine_of
from trainer import adamw, compare, events_of, full_grads, sgd


class SummedGradient(torch.autograd.Function):
    """Sums the gradient over all ranks, which wait for each other."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Meeting(nn.Module):
    """Its first layer has a collective of its own in backward; the last one may be skipped."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, skips):
        x = self.layers[1](self.layers[0](SummedGradient.apply(x)))
        return x if skips else self.layers[2](x)


@on_ranks(2)
def test_ranks_that_skip_layers_are_compared_before_they_meet_in_the_layers_own_collectives(rank):
    for stage in (0, 2):
        model = shard(Meeting(), stage=stage, units=[nn.Linear])
        for step in range(4):  # in passes 2 and 4 ranks are compared
            x = torch.ones(2, 4, requires_grad=True)
            model(x, skips=rank == 1 and step > 0).sum().backward()


class Factor(nn.Module):
    """Its gradient is what it is given, to the bit: numbers that bfloat16 has."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.weight * x


class Factors(nn.Module):
    """One that always runs, and two that a batch may leave out."""

    def __init__(self, shape):
        super().__init__()
        self.each = nn.ModuleList(Factor(shape) for _ in range(3))

    def forward(self, given, run):
        return sum(factor(given).sum() for factor in self.each[: 3 if run else 1])


@on_ranks(1, 3)
def test_a_unit_that_some_ranks_skip_until_the_last_micro_batch_is_summed_in_the_reduce_dtype(
    rank, world_size
):
    """Let all ranks but the first run the units in their last micro-batch alone."""
    for stage, layout, shape in itertools.product((0, 1, 2), ("rows", "flat"), ((1, 3), (7,))):
        model = Factors(shape)
        shard(
            model,
            stage=stage,
            layout=layout,
            units=[Factor],
            precision="bf16",
            schedule=Schedule(reduce_every="step"),
        )
        for zeroes in (False, True):  # a window that somebody ends half-way, and another one
            for last, given in ((False, 256.0), (True, 1.0)):
                with accumulate(model, last=last):
                    x = torch.full(shape, given, dtype=torch.bfloat16)
                    model(x, run=last or rank == 0).backward()
                if zeroes and not last:
                    model.zero_grad()
            for name, grad in full_grads(model).items():
                first = 256 * world_size if name == "each.0.weight" else 256
                total = world_size if zeroes else first + world_size  # bfloat16 has no 257
                mean = torch.full(shape, total / world_size)
                assert torch.equal(grad, mean), f"{stage}, {layout}, {zeroes}: {name}"
            model.zero_grad()


def run_steps(model, random, num):
    """Take steps of two micro-batches, look at the loss after each, and once run no layer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num):
        for last in (False, True):
            with accumulate(model, last=last):
                dropped_loss(model, dropped_batch(random)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            dropped_loss(model, dropped_batch(random))
        if step == 1:  # nothing but what always runs
            x, _, task, targets = dropped_batch(random)
            skipped = [False] * Dropped.num_layers
            dropped_loss(model, (x, skipped, task, targets)).backward()


@pytest.mark.parametrize("checkpoints", [False, True])
@on_ranks(3)
def test_all_ranks_start_the_same_collectives_in_the_same_order_whatever_they_skip(
    rank, checkpoints
):
    """Train a few steps in each setting, with other layers on every rank."""
    random = torch.Generator().manual_seed(rank)
    for stage in range(4):
        torch.manual_seed(0)
        units = Units([Inner, nn.Linear], optional=[Inner, nn.Linear])
        model = shard(NestedDropped(checkpoints), stage=stage, units=units)
        events = events_of(model)
        run_steps(model, random, 4)
        assert len(agreed([(kind, unit) for kind, unit, _ in events])) > 20


class _Numbered(list):
    """Hands events on with the number of their mesh."""

    def __init__(self, events, number):
        super().__init__()
        self._events, self._number = events, number

    def append(self, event):
        self._events.append((self._number, *event[:2]))


@pytest.mark.parametrize("checkpoints", [False, True])
@on_ranks(3)
def test_units_of_one_module_on_several_meshes_are_skipped_in_one_order(
    rank, world_size, checkpoints
):
    random = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    units = ON_MESHES[checkpoints]
    schedule = Schedule(None if checkpoints else 0)  # with nothing gathered ahead, too
    placed = Units(units, optional=units, placements=on_meshes(world_size))
    model = shard(OnMeshes(checkpoints), schedule=schedule, units=placed)
    events = []
    for number, comm in enumerate(engine_of(model).comms):
        comm.traffic.events = _Numbered(events, number)
    run_steps(model, random, 5)
    assert len(agreed(events)) > 100 and {number for number, *_ in events} == {0, 1}


def tiny_wav2vec2():
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
        conv_dim=(8,), conv_kernel=(4,), conv_stride=(4,), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=12, layerdrop=0.5, apply_spec_augment=False,
        hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0,
        final_dropout=0.0, ctc_loss_reduction="mean",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Wav2Vec2ForCTC(config)


def train_wav2vec2(rank, shards):
    """Train with layers dropped per rank; return this rank's losses and how many layers ran."""
    model = shards(tiny_wav2vec2())
    ran = []
    for layer in getattr(model, "module", model).wav2vec2.encoder.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))
    optimizer = adamw(model.parameters())
    random = torch.Generator().manual_seed(5 + rank)
    torch.manual_seed(rank)  # of layerdrop
    losses = []
    for _ in range(4):
        sound = torch.randn(2, 64, generator=random)
        labels = torch.randint(1, 12, (2, 3), generator=random)
        loss = model(sound, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, len(ran)


@on_ranks(2)
def test_layerdrop_of_transformers_has_the_losses_of_ddp_that_finds_unused_parameters(rank):
    ddp = partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
    truth = train_wav2vec2(rank, ddp)
    counts = [None, None]
    dist.all_gather_object(counts, truth[1])
    assert counts[0] != counts[1] and max(counts) < 16
    optional = Units(optional=["Wav2Vec2EncoderLayer"])
    for options in ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "units": optional}):
        assert train_wav2vec2(rank, partial(shard, **options)) == truth, options
    # All run by transformers' own switch.
    assert train_wav2vec2(rank, partial(shard, stage=3))[1] == 16


class Reentrant(Dropped):
    """Layers under reentrant checkpoints: forward has no graph, and gradients come late."""

    def run(self, layer, x):
        return torch.tanh(checkpoint(layer, x, use_reentrant=True))


@pytest.mark.parametrize("skips", [False, True])
@on_ranks(1, pytest.param(3, marks=pytest.mark.kernels))
def test_gradients_that_come_late_are_reduced_once_and_right(rank, world_size, skips):
    batches = [dropped_batch(torch.Generator().manual_seed(r + 3)) for r in range(world_size)]
    if not skips:
        batches = [(x, [True] * Dropped.num_layers, 0, targets) for x, _, _, targets in batches]

    def run(model, batch, twice):
        loss = dropped_loss(model, batch)
        loss.backward(retain_graph=twice)
        if twice:
            (2 * loss).backward()  # over a graph that has been run

    # The first layer, four layers, the norm's two sums, the head, the softmax; passes and ranks.
    roundings = of_gradient(5, *[8] * 4, 8, 8, 8, 3, over=2 * world_size * 4)
    for kind, twice in ((Reentrant, False), (Dropped, True)):
        torch.manual_seed(0)
        truth = kind().double()
        for batch in batches:
            run(truth, (batch[0].double(), *batch[1:]), twice)
        for stage, bucket_bytes in ((0, 1 << 20), (1, 1), (2, 1), (2, 1 << 20)):
            torch.manual_seed(0)
            model = shard(
                kind().double(),
                stage=stage,
                schedule=Schedule(bucket_bytes=bucket_bytes),
                units=[nn.Linear],
            )
            for _ in range(2):
                model.zero_grad()
                run(model, (batches[rank][0].double(), *batches[rank][1:]), twice)
                for (name, grad), expected in zip(
                    full_grads(model).items(), truth.parameters(), strict=True
                ):
                    where = f"{kind.__name__}, stage {stage}, {bucket_bytes}: {name}"
                    assert (grad is None) == (expected.grad is None), where
                    if grad is not None:
                        mean = expected.grad / world_size
                        assert_rounded_alike(grad, mean, roundings, where)


class Half(nn.Module):
    """A layer of its own behind one that it shares, which a batch may skip."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(8, 8)

    def forward(self, x, run):
        return self.own(self.shared(x) if run else x)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.first, self.second = Half(shared), Half(shared)

    def forward(self, x, run):
        return self.second(self.first(x, run), True)


@on_ranks(1, 2)
def test_a_layer_that_two_units_share_may_be_skipped_in_one_of_them(rank, world_size):
    torch.manual_seed(0)
    truth = Shared().double()
    xs = [torch.randn(3, 8, dtype=torch.float64) for _ in range(world_size)]
    for number, x in enumerate(xs):
        (truth(x, number == 0).square().mean() / world_size).backward()
    torch.manual_seed(0)
    model = Shared().double()
    layer = model.first.shared
    model = shard(
        model,
        units=Units([Half, layer], optional=[layer]),
        stage=3,
        schedule=Schedule(bucket_bytes=0),
    )
    # Four layers, a square and a mean; passes and ranks.
    roundings = of_gradient(8, 8, 8, 8, 1, 24, over=2 * world_size)
    for _ in range(2):
        model.zero_grad()
        model(xs[rank], rank == 0).square().mean().backward()
        for (name, grad), expected in zip(
            full_grads(model).items(), truth.parameters(), strict=True
        ):
            assert_rounded_alike(grad, expected.grad, roundings, name)


class Layer(nn.Linear):
    """A unit."""


class Projection(nn.Linear):
    """A unit that is skipped with the tower."""


class Tower(nn.Module):
    """Two blocks with units inside."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        if how == "frozen":
            self.requires_grad_(False)

    def forward(self, image):
        if self.how == "reentrant":
            for block in self.blocks:
                image = checkpoint(block, image.requires_grad_(), use_reentrant=True)
            return self.scale * image
        first = self.blocks[0](image)
        second = self.blocks[1](first)
        return self.scale * first + (second.detach() if self.how == "detached inside" else second)


class Seeing(nn.Module):
    """Layers for text, and a tower for batches with an image."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.tower = Tower(how)
        self.projection = Projection(8, 8)
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x, image):
        if image is not None:
            with torch.set_grad_enabled(self.how != "no_grad"):
                seen = self.tower(image)
            x = x + self.projection(seen.detach() if self.how == "detached" else seen)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def seeing_batch(random):
    x, image = torch.randn(2, 4, 8, generator=random)
    has_image = bool(torch.rand((), generator=random) > 0.5)
    return x, image if has_image else None, torch.randint(3, (4,), generator=random)


def seeing_loss(model, batch):
    x, image, targets = batch
    return F.cross_entropy(model(x, image), targets)


@pytest.mark.parametrize(
    "how", ["trained", "frozen", "no_grad", "detached", "detached inside", "reentrant"]
)
@on_ranks(2, 3)
def test_ranks_may_skip_an_optional_unit_that_needs_no_backward(rank, world_size, how):
    optional = [Tower, Projection]
    settings = [
        {
            "stage": 3,
            "units": Units([Layer, *inside], optional=optional),
            "schedule": Schedule(prefetch_bytes, bucket_bytes=bucket_bytes),
        }
        for inside, prefetch_bytes, bucket_bytes in (
            ([], None, 1 << 20),
            ([Inner], 0, 0),
            ([Inner, nn.Linear], None, 0),
        )
    ]
    made = partial(Seeing, how)
    compare(rank, world_size, made, settings, seeing_loss, sgd, seeing_batch, 5, 2)
