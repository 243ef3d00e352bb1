"""The table of scenarios: models and loops that take the oracle's steps in every setting.

A row is trained by the oracle and by each of its settings, and losses, gradients, parameters and
optimizer state must have the same bits (`trainer.compare`). The suite runs each row at its world
sizes with the settings of its row; `make soak CAMPAIGN=matrices` runs those of families with all.
"""

import importlib.util
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zero_from_scratch as zero
from models import Block, Checkpointed, Experts, OddModel, Stack, routed_loss
from shardwise.config import Schedule, Units
from trainer import (
    ENDS,
    HALVES,
    LAYOUTS,
    SPREAD,
    STAGES,
    Steps,
    adamw,
    adamw_fused,
    adamw_loop,
    compare,
    float_batch,
    make_steps,
    mean_square,
    sample,
    sgd,
    token_batch,
)

Settings = list[dict[str, Any]]


def spread(world_size):
    """Return every stage, and both layouts where full parameters are freed; fewer on one rank."""
    return SPREAD if world_size > 1 else ENDS


@dataclass(frozen=True)
class Scenario:
    """One row: what is trained, on how many ranks, and in which settings of `shard`."""

    model: Callable[[], nn.Module]
    sizes: tuple[int, ...]
    settings: Settings | Callable[[int], Settings] = spread
    loss: Callable[[nn.Module, Any], Tensor] = mean_square
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    batch: Callable[[torch.Generator], Any] = float_batch
    steps: int = 2
    micro_batches: int = 1
    replicas: int = 1
    drawn: Callable[[int, int], Steps] | None = None  # of world size and micro-batches
    marks: tuple[Any, ...] = ()


OF_A_RUN = ("loss", "optimizer", "batch", "steps", "micro_batches", "replicas", "drawn")


def check(rank, world_size, name, settings=None, **changes):
    """Compare a row with the oracle, in its settings or in others."""
    row = replace(SCENARIOS[name], **changes)
    if settings is None:
        settings = row.settings(world_size) if callable(row.settings) else row.settings
    how = {field: getattr(row, field) for field in OF_A_RUN}
    compare(rank, world_size, row.model, settings, **how)


# Models: a `Stack` with another pass over its blocks, other blocks, or changed parameters.


class Made(Stack):
    """A `Stack` whose blocks are of a class, changed by ``change`` and run by ``run``."""

    def __init__(self, run=None, block=Block, change=None):
        self.block_class = block
        super().__init__()
        self.run = run or in_turn
        if change is not None:
            change(self)

    def forward(self, x):
        return self.head(self.run(self.blocks, x))


def made(*args, **kwargs):
    return partial(Made, *args, **kwargs)


def in_turn(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Then(Block):
    """A block with something done to its output."""

    def __init__(self, then):
        super().__init__()
        self.then = then

    def forward(self, x):
        return self.then(super().forward(x))


def compile_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compile_wrapped(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")


# Ways to call a unit: twice, nested, evaluated, with inputs and outputs of every shape.


def each_twice(blocks, x):
    return in_turn([block for each in blocks for block in (each, each)] + [blocks[0]], x)


def siamese(blocks, x):
    """Show a block two inputs that do not depend on each other, one without gradient."""
    first, second = blocks[0](x), blocks[0](x.flip(0))
    return blocks[1](first) * blocks[1](second.detach())


class Outer(nn.Module):
    """A unit with parameters of its own around a unit."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = Block()

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Any]
    nothing: Tensor | None = None


class Plain:
    def __init__(self, hidden):
        self.hidden = hidden
        self.nothing = None


WRAPS = {
    "dict": (lambda x: {"hidden": x, "none": None, "n": 3}, lambda o: o["hidden"]),
    "list": (lambda x: [None, x, 2.5], lambda o: o[1]),
    "namedtuple": (lambda x: Pair([x], (x.detach(), None)), lambda o: o.first[0]),
    "dataclass": (lambda x: Output(x, {"k": [x * 2]}), lambda o: o.hidden + o.extra["k"][0]),
    "object": (Plain, lambda o: o.hidden),
}


class Wrapping(Stack):
    """Units and model return their outputs inside something else."""

    def __init__(self, kind):
        self.wrap, self.unwrap = WRAPS[kind]
        self.block_class = partial(Then, self.wrap)
        super().__init__()

    def forward(self, x):
        for block in self.blocks:
            x = self.unwrap(block(x))
        return self.wrap(self.head(x))


def wrapped_loss(model, batch):
    return model.unwrap(model(batch)).square().mean()


class KeywordBlock(Block):
    def forward(self, *, hidden, scale):
        return {"x": super().forward(hidden["x"]) * scale}


def by_keyword(blocks, x):
    hidden = {"x": x}
    for block in blocks:
        hidden = block(hidden=hidden, scale=0.5)
    return hidden["x"]


def in_place(blocks, x):
    """Change the units' outputs, and views of them, in place."""
    x = blocks[0](x)
    x += 1
    x = blocks[1](x.relu_())
    x[:, :3].mul_(2)
    x = blocks[2](x)
    x.view(-1)[::2].add_(0.5)
    return x


def chunks_in_place(blocks, x):
    """Change outputs that are two views of one tensor."""
    for block in blocks:
        first, second = block(x)
        x = torch.cat([first.mul_(2), second.add_(1)], dim=1)
    return x


def two_forwards_loss(model, batch):
    first, second = model(batch), model(batch * 0.5)
    return (first * second).mean()


def dropped_forward_loss(model, batch):
    """Run a forward whose graph is dropped, and one that is kept a while but not used."""
    model(batch * 2)
    kept = model(batch * 3)
    loss = mean_square(model, batch)
    del kept
    return loss


def evaluating_loss(model, batch):
    """Evaluate before and after the training forward, whose backward is still to come."""
    model.eval()
    with torch.no_grad():
        before = model(batch)
    with torch.inference_mode():
        model(batch * 2)
    model.train()
    during = model(batch)
    with torch.no_grad():
        after = model(batch)
    assert torch.equal(before, during) and torch.equal(before, after)
    return during.square().mean()


# Parameters of every kind: tied, frozen, unused, scalar, empty, mixed dtypes, used elsewhere.


class TiedTwiceBlock(Block):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(8, 11)
        self.again.weight = self.up.weight

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * torch.sigmoid(self.again(x)))


class TiedAcrossUnits(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.embed, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(super().forward(self.embed(x)) @ torch.ones(5, 8))


def freeze(*names):
    """Return a function that freezes parts of a model."""

    def change(model):
        for name in names:
            model.get_submodule(name).requires_grad_(False)

    return change


class AdapterBlock(Block):
    """As LoRA: the first layer is frozen, a small trainable one comes after it."""

    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(11, 2, bias=False), nn.Linear(2, 8, bias=False))
        self.down.weight.requires_grad_(False)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return x + self.down(h) + self.adapter(h)


def toggling_loss(model, batch):
    """Freeze by the sign of the batch's first number."""
    trains = bool(batch[0, 0] > 0)
    model.blocks[0].requires_grad_(trains)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad = trains
    return mean_square(model, batch)


class Branches(nn.Module):
    """Two branches in one unit and two that are units; the batch says which one runs."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Block()})
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, which):
        x = self.inside["ab"[which]](x)
        return self.blocks[2](self.blocks[which](x))


ROUTES = [0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1]


def routed_steps(world_size, num_micro_batches, per_rank):
    """Give every batch a branch: one for all ranks of a micro-batch, or one per rank."""
    numbers = count()

    def routed(batch, of_all):
        number = next(numbers)
        return batch, ROUTES[(number if per_rank else of_all) % len(ROUTES)]

    return [
        [[routed(batch, s + m) for batch in by_rank] for m, by_rank in enumerate(micro_batches)]
        for s, micro_batches in enumerate(make_steps(world_size, 4, num_micro_batches))
    ]


class CocktailBlock(nn.Module):
    """One unit with parameters of four dtypes."""

    def __init__(self):
        super().__init__()
        self.fp32 = nn.Linear(8, 5)
        self.fp64 = nn.Linear(5, 7).double()
        self.bf16 = nn.Linear(7, 8).bfloat16()
        self.offsets = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x):
        x = self.fp64(self.fp32(x).double())
        return self.bf16(x.bfloat16()).float() + self.offsets


class OddShapesBlock(nn.Module):
    """Scalars, empty parameters, fewer elements than ranks, three dimensions."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0))
        self.no_columns = nn.Parameter(torch.zeros(4, 0))
        self.pair = nn.Parameter(torch.ones(2, 1))
        self.cube = nn.Parameter(torch.randn(2, 8, 3))
        self.unused_scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        x = x * self.scalar + self.single * self.pair.sum()
        x = x + self.empty.sum() + self.no_columns.sum()
        return x + (x @ self.cube).sum((0, 2))[:, None]


class OnlyEmptyOnSomeRanks(nn.Module):
    """Fewer elements than ranks in the whole model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.scale


def used_by_the_root(blocks, x, before=True, after=True):
    """Let the root read weights of blocks, before and after they run."""
    x = in_turn(blocks, F.linear(x, blocks[1].up.weight[:8]) if before else x)
    return x + F.linear(x, blocks[0].up.weight)[:, :8] * blocks[2].down.bias if after else x


def decayed_loss(model, batch):
    decay = sum(p.square().sum() for p in model.parameters())
    return mean_square(model, batch) + 0.01 * decay


def decayed_first_loss(model, batch):
    decay = sum((p**2).sum() for p in model.parameters() if p.ndim > 1)
    norm = model.blocks[1].up.weight.norm()
    return 0.01 * decay + 0.1 * norm + mean_square(model, batch)


def decay_only_loss(model, batch):
    return sum(p.square().sum() for p in model.blocks.parameters()) * batch.mean()


def two_groups(parameters):
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "lr": 3e-3}, {"params": vectors, "weight_decay": 0.0}]
    return adamw(groups)


# Activation checkpointing of both kinds, nested, around and inside units, with frozen layers.


def recomputed(run, x, reentrant=False):
    """Run under a checkpoint; a reentrant one needs an input with a gradient."""
    return checkpoint(run, x.requires_grad_() if reentrant else x, use_reentrant=reentrant)


def each_recomputed(blocks, x, reentrant=False):
    return in_turn([partial(recomputed, block, reentrant=reentrant) for block in blocks], x)


def recomputed_twice(blocks, x, outer=False, inner=False):
    """Run under a checkpoint around all blocks, and one around each of them."""

    def run(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=inner)
        return x

    return checkpoint(run, x.detach().requires_grad_(), use_reentrant=outer)


def recomputed_to_the_end(blocks, x):
    """Recompute whole blocks, where early stop would have ended."""
    with set_checkpoint_early_stop(False):
        return each_recomputed(blocks, x)


class CheckpointedInside(Stack):
    """Checkpoints inside the unit rather than around it."""

    class Inner(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    block_class = Inner


# The first block is frozen whole, one layer of the second; the last has early stop's case.
FROZEN_PARTS = freeze("blocks.0", "blocks.1.up", "blocks.2.down")


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class UsedBeforeItIsClosed(nn.Module):
    """A unit without an input hook, whose weight a region that is recomputed uses too."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.products = nn.ModuleList([Product()])
        self.blocks = nn.ModuleList([Block()])
        self.reentrant = reentrant

    def region(self, x):
        return self.blocks[0](x @ self.products[0].weight)

    def forward(self, x):
        recomputed = checkpoint(self.region, self.first(x), use_reentrant=self.reentrant)
        return recomputed + self.products[0](x)


class CallsAUnitElsewhere(nn.Module):
    """A unit with a checkpoint inside that calls another unit."""

    class Caller(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.other = [other]

        def region(self, x):
            return torch.tanh(self.other[0](torch.tanh(self.up(x))))

        def forward(self, x):
            return checkpoint(self.region, x, use_reentrant=True)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.callers = nn.ModuleList([self.Caller(self.blocks[0])])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.callers[0](x.detach().requires_grad_()))


# Units that hand on what they got, or that a batch skips.


class Skipped(Block):
    """A block that is left out in this step: it has parameters and hands its input on."""

    def forward(self, x):
        return x


class Skipping(Stack):
    """The second of three blocks is left out; the first one's input needs no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Skipped(), Block()])


class Wrapped(nn.Module):
    """The usual wrapper: it returns what the model inside it returns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.model = Skipping()

    def forward(self, x):
        return self.model(x)


class Dropped(nn.Module):
    """Blocks of which a batch names those to run, between layers that always run."""

    num_layers = 4

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(self.num_layers))
        self.norm = nn.LayerNorm(8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def run(self, layer, x):
        return torch.tanh(layer(x))

    def forward(self, x, runs, task):
        x = self.first(x)
        for layer, runs_here in zip(self.layers, runs, strict=True):
            if runs_here:
                x = x + self.run(layer, x)
        return self.heads[task](self.norm(x))


def dropped_loss(model, batch):
    x, runs, task, targets = batch
    return F.cross_entropy(model(x, runs, task), targets)


def dropped_batch(random):
    x = torch.randn(4, 5, generator=random)
    runs = (torch.rand(Dropped.num_layers, generator=random) > 0.4).tolist()
    task = int(torch.randint(2, (), generator=random))
    return x, runs, task, torch.randint(3, (4,), generator=random)


class Inner(nn.Module):
    """A block with two units inside it, which are skipped with it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.scale * self.down(torch.tanh(self.up(x)))


class NestedDropped(Dropped):
    """Blocks with units inside, of which some run under a checkpoint."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(self.num_layers))
        self.checkpoints = checkpoints

    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)


class TwoScales(Inner):
    """A block with parameters of its own on two meshes, around units on two meshes each."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        return self.bias + super().forward(x)


class Head(nn.Linear):
    """A unit by a name of its own."""


class OnMeshes(NestedDropped):
    """Nested, with blocks that end in a unit of theirs, whose output is theirs."""

    def __init__(self, checkpoints=False):
        super().__init__(checkpoints)
        self.heads = nn.ModuleList(Head(8, 3) for _ in range(2))
        self.layers = nn.ModuleList(
            TwoScales() if number % 2 else nn.Sequential(nn.GELU(), nn.Linear(8, 8))
            for number in range(self.num_layers)
        )


ON_MESHES = {False: [nn.Sequential, Inner, nn.Linear], True: [nn.Sequential, Inner, Head]}


def on_meshes(world_size):
    """Put all biases on a mesh of their own: of the same ranks, with groups of its own."""
    other = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    return lambda name, _: other if name.endswith("bias") else None


# Steps that raise, and steps that take another path.


class Boom(Exception):
    """What the model raises."""


class Explode(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom


class Fragile(Stack):
    """Raises where it is told to; of a block that is computed again, when that begins."""

    fails = ""
    checkpoints = False
    num_runs = 0

    def run(self, number, x):
        self.num_runs += 1
        if self.fails in (f"forward {number}", f"run {self.num_runs}"):
            raise Boom
        x = self.blocks[number](x)
        return Explode.apply(x) if self.fails == f"backward {number}" else x

    def forward(self, x):
        self.num_runs = 0
        for number in range(3):
            if self.checkpoints:
                x = checkpoint(self.run, number, x, use_reentrant=False)
            else:
                x = self.run(number, x)
        return self.head(x)


class FragileInside(Fragile):
    """Raises inside the forward of a unit."""

    class Inner(Block):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise Boom
            return x

    block_class = Inner

    def run(self, number, x):
        block = self.blocks[number]
        block.fails = self.fails == f"forward {number}"
        return block(x) if block.fails else super().run(number, x)


class FragileCheckpointed(Fragile):
    checkpoints = True


WHERE = ["forward 0", "forward 1", "forward 2", "backward 0", "backward 1", "backward 2"]


def shaken_loss(model, batch, where=WHERE):
    """Fail once at every place before the good forward."""
    for place in where:
        model.fails = place
        with pytest.raises(Boom):
            mean_square(model, batch * 3).backward()
        model.fails = ""
        if not hasattr(model, "_shardwise_engine"):
            model.zero_grad()  # a plain model keeps the gradients of half a backward pass
    return mean_square(model, batch)


class Detours(Stack):
    """Takes its blocks in an order that changes from call to call."""

    ORDERS = ((0, 1, 2), (2, 0, 1), (1,), (0, 2), (0, 1, 2), (0, 1, 2))
    num_calls = 0

    def forward(self, x):
        blocks = [self.blocks[number] for number in self.ORDERS[self.num_calls % 6]]
        return self.head(in_turn(blocks, x))


class DetoursByStep(Detours):
    """Goes on to the next order with each batch of the rank's own, also in the oracle."""

    def forward(self, x):
        self.num_calls = int(x[0, 0])
        return super().forward(x)


class EvenModel(zero.TinyModel):
    """Every slice of it is a multiple of 64 elements, at any of the tested world sizes."""

    def __init__(self):
        super().__init__(width=128, num_blocks=2)


def make_bf16_model():
    return OddModel().to(torch.bfloat16)


NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the test extra has transformers"
)

# Batches and settings that several rows have.


def first_number(steps, numbers):
    """Give every batch of a step the step's number as its first element."""
    for number, micro_batches in zip(numbers, steps, strict=True):
        for by_rank in micro_batches:
            for batch in by_rank:
                batch[0, 0] = number
    return steps


def toggled_steps(world_size, micro_batches):
    return first_number(make_steps(world_size, 5), (1.0, -1.0, 1.0, 1.0, -1.0))


def detour_steps(world_size, micro_batches):
    return first_number(make_steps(world_size, 6), range(6))


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def over_a_mesh(settings, *shape):
    return lambda world_size: [{**options, "mesh": mesh_of(*shape)} for options in settings]


def turns(number):
    """Return settings of a family's member, which together take every one."""
    return lambda world_size: sample(2 * number + world_size // 2)


def with_units(units, settings=None):
    return [{**options, "units": units} for options in settings or SPREAD]


ACCUMULATION = [  # every stage as it does by default, and in the other way
    {"stage": stage, "layout": ("rows", "flat")[(stage + number) % 2], **override}
    for stage in range(4)
    for number, override in enumerate(
        ({}, {"schedule": Schedule(reduce_every="micro_batch" if stage < 2 else "step")})
    )
]
BUDGETS = cycle((None, 0, 0, None))  # both with each layout
# Of one micro-batch and of two: each stage with the other layout.
STAYS_FULL = [
    [
        {**options, "units": [nn.Linear], "schedule": Schedule(prefetch_bytes=next(BUDGETS))}
        for options in half
        if options["stage"] < 3
    ]
    for half in HALVES
]
OPTIONAL = [
    [
        {
            **{"stage": 3, "layout": layout, "schedule": Schedule(budget)},
            "units": Units(optional=[nn.Linear, nn.LayerNorm]),
        }
        for layout, budget in half
    ]
    for half in ((("rows", None), ("flat", 0)), (("rows", 0), ("flat", 1 << 20)))
]


def settings_on_meshes(units, world_size):
    placed = Units(units, placements=on_meshes(world_size))
    return [{"stage": 3, "units": replace(placed, optional=units)}, {"stage": 1, "units": placed}]


def windows(name, row, halves=HALVES):
    """Return a row with one micro-batch a step, and with two: each stage with the other layout."""
    settings = halves if row.settings is spread else [row.settings] * 2
    return {
        f"{name}, {n} micro-batches": replace(row, micro_batches=n, settings=half)
        for n, half in zip((1, 2), settings, strict=True)
    }


odd = partial(Scenario, OddModel, loss=zero.next_byte_loss, batch=token_batch)
stack = partial(Scenario, Stack)
routed = partial(Scenario, loss=routed_loss)
dropped = partial(Scenario, loss=dropped_loss, batch=dropped_batch, steps=4)
BOTH = [Inner, nn.Linear]
NESTED_REENTRANT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
KERNELS = (pytest.mark.kernels,)
# torch's compiler warns about itself: parts of it are deprecated or experimental.
OF_THE_COMPILER = [
    pytest.mark.filterwarnings(f"ignore::{what}") for what in (":torch", "DeprecationWarning")
]

# Models that are trained in some settings each, and in all of them by the campaign.
FAMILIES = {
    "blocks run twice": Scenario(made(each_twice), (1, 3), turns(0)),
    "blocks run in turn, and again": Scenario(
        made(lambda blocks, x: in_turn(blocks, in_turn(blocks, x))), (1, 3), turns(1)
    ),
    "a block sees two inputs": Scenario(made(siamese), (1, 3), turns(2)),
    "outputs change in place": Scenario(made(in_place), (2,), sample(0)),
    "outputs that are views change in place": Scenario(
        made(in_place, partial(Then, lambda y: y.view(-1).view(y.shape))), (2,), sample(2)
    ),
    "outputs that are chunks change in place": Scenario(
        made(chunks_in_place, partial(Then, lambda y: y.unsafe_chunk(2, dim=1))), (2,), sample(4)
    ),
    "weights are tied in each unit": Scenario(made(block=TiedTwiceBlock), (1, 3), turns(0)),
    "weights are tied across units": Scenario(TiedAcrossUnits, (1, 3), turns(1)),
    "a unit is frozen": Scenario(made(change=freeze("blocks.0")), (1, 3), turns(0)),
    "all but the head is frozen": Scenario(made(change=freeze("blocks")), (1, 3), turns(1)),
    "adapters": Scenario(made(block=AdapterBlock), (1, 3), turns(2)),
    "the root reads weights before blocks run": Scenario(
        made(partial(used_by_the_root, after=False)), (1, 3), turns(0)
    ),
    "the root reads weights after blocks run": Scenario(
        made(partial(used_by_the_root, before=False)), (1, 3), turns(1)
    ),
    "the root reads weights before and after": Scenario(made(used_by_the_root), (1, 3), turns(2)),
    **{
        f"checkpointing: {kind}": Scenario(model, (3,), sample(number), marks=(NESTED_REENTRANT,))
        for number, (kind, model) in enumerate(
            {
                "each block": Checkpointed,
                "each block, reentrant": made(partial(each_recomputed, reentrant=True)),
                "inside each block": CheckpointedInside,
                "nested": made(recomputed_twice),
                "nested, reentrant": made(partial(recomputed_twice, outer=True, inner=True)),
                "nested, the inner reentrant": made(partial(recomputed_twice, inner=True)),
                "two blocks of three": made(
                    lambda blocks, x: blocks[2](recomputed(lambda x: in_turn(blocks[:2], x), x))
                ),
                "frozen": made(each_recomputed, change=FROZEN_PARTS),
                "frozen, reentrant": made(
                    partial(each_recomputed, reentrant=True), change=FROZEN_PARTS
                ),
                "to the end": made(recomputed_to_the_end),
            }.items()
        )
    },
}

SCENARIOS = {
    **FAMILIES,
    # Sizes, optimizers, windows, meshes.
    "every stage and layout": odd((1, 2, 3), LAYOUTS, marks=KERNELS),
    "four ranks": odd((4,), HALVES[1], marks=(pytest.mark.slow,)),
    "an optimizer over a loop of parameters": odd(
        (3,), [{"stage": 1, "layout": "flat"}, {"stage": 3}], optimizer=adamw_loop
    ),
    "the fused optimizer, where slices are whole vectors": Scenario(
        EvenModel,
        (1, 2),
        lambda world_size: HALVES[world_size % 2],
        zero.next_byte_loss,
        adamw_fused,
        token_batch,
    ),
    "budgets of prefetching": odd(
        (1, 3),
        [{"stage": s, "schedule": Schedule(budget)} for s in (1, 3) for budget in (0, 1 << 30)],
        micro_batches=2,
    ),
    "accumulation": odd((1, 3), ACCUMULATION, micro_batches=3),
    "replicas": odd((4,), over_a_mesh(HALVES[0], 2, 2), replicas=2),
    "replicas, accumulation": odd((4,), over_a_mesh(HALVES[1], 2, 2), replicas=2, micro_batches=2),
    "one replica": odd((3,), over_a_mesh([STAGES[n] for n in (0, 1, 3)], 1, 3)),
    "one shard": odd((3,), over_a_mesh([STAGES[n] for n in (0, 1, 3)], 3, 1), replicas=3),
    "a model that is bf16 itself": Scenario(
        make_bf16_model, (3,), loss=zero.next_byte_loss, batch=token_batch, micro_batches=2
    ),
    **{
        f"blocks are compiled {how}": Scenario(
            made(change=change), (1, 2), ENDS[:2], marks=(pytest.mark.slow, *OF_THE_COMPILER)
        )
        for how, change in (("in place", compile_in_place), ("and wrapped", compile_wrapped))
    },
    # Calls.
    "nested units": Scenario(made(block=Outer), (1, 3), with_units(["Outer", "Block"])),
    "the whole model is one unit": stack((3,), with_units([])),
    **{
        f"outputs come in a {kind}": Scenario(
            partial(Wrapping, kind), (2,), SPREAD[1::2], wrapped_loss
        )
        for kind in sorted(WRAPS)
    },
    "inputs by keyword and in dicts": Scenario(made(by_keyword, KeywordBlock), (3,)),
    **windows("two forwards before one backward", stack((2,), loss=two_forwards_loss)),
    **windows("a forward is dropped, and one not used", stack((2,), loss=dropped_forward_loss)),
    "evaluation between and inside steps": stack((1, 3), loss=evaluating_loss),
    # Parameters.
    "frozen parameters in an accumulation window": Scenario(
        made(block=AdapterBlock), (2,), STAGES, micro_batches=2
    ),
    "requires_grad is toggled between steps": stack(
        (1, 3), loss=toggling_loss, drawn=toggled_steps
    ),
    **windows(
        "a parameter that a step does not use",
        routed(Branches, (1, 3), drawn=partial(routed_steps, per_rank=False)),
    ),
    **windows(
        "a parameter that one rank uses",
        routed(Experts, (2, 3), optimizer=sgd, drawn=partial(routed_steps, per_rank=True)),
    ),
    "several dtypes in a unit": Scenario(made(block=CocktailBlock), (1, 3)),
    "scalar, empty and tiny parameters": Scenario(
        made(block=OddShapesBlock),
        (1, 3, 4),
        lambda world_size: SPREAD if world_size == 3 else ENDS,
    ),
    "fewer elements than ranks": Scenario(OnlyEmptyOnSomeRanks, (3,)),
    **windows("weight decay is the loss's last term", stack((3,), sample(4), decayed_loss)),
    **windows("weight decay is its first", stack((3,), sample(1), decayed_first_loss)),
    "a loss of parameters alone": stack((2,), loss=decay_only_loss),
    "parameter groups by ndim": stack((3,), ENDS, optimizer=two_groups),
    # Checkpointing.
    **{
        f"a unit is recomputed from outside: {kind}": Scenario(
            model, (3,), with_units([caller, "Block"], STAGES[2:])
        )
        for kind, model, caller in (
            ("reentrant", partial(UsedBeforeItIsClosed, reentrant=True), "Product"),
            ("not reentrant", UsedBeforeItIsClosed, "Product"),
            ("by another unit", CallsAUnitElsewhere, "Caller"),
        )
    },
    **{
        f"checkpointing, {kind}, {n} micro-batches": Scenario(model, (n,), STAGES, micro_batches=n)
        for kind, model in (
            ("not reentrant", Checkpointed),
            ("reentrant", made(partial(each_recomputed, reentrant=True))),
        )
        for n in (1, 2)
    },
    # Units that are handed on or skipped.
    "a unit hands its input on": Scenario(Skipping, (1, 3), with_units(["Block", "Skipped"])),
    "a wrapper hands its model's output on": Scenario(
        Wrapped, (1, 3), with_units(["Block", "Skipped", "Skipping"])
    ),
    **windows(
        "ranks skip different layers at stages 0 to 2",
        dropped(Dropped, (1, 3), optimizer=sgd),
        STAYS_FULL,
    ),
    **windows(
        "ranks skip different optional layers at stage 3",
        dropped(Dropped, (1, 3)),
        OPTIONAL,
    ),
    **{
        f"what is inside a skipped layer is skipped{', checkpointing' * checkpoints}": dropped(
            partial(NestedDropped, checkpoints),
            (1, 3),
            [{"stage": stage, "units": Units(BOTH, optional=BOTH)} for stage in (1, 3)],
        )
        for checkpoints in (False, True)
    },
    **{
        f"skipped modules of several meshes{', checkpointing' * checkpoints}": dropped(
            partial(OnMeshes, checkpoints), (1, 3), partial(settings_on_meshes, units)
        )
        for checkpoints, units in ON_MESHES.items()
    },
    # Steps that raise or take another path.
    "a step raised": Scenario(Fragile, (1, 3), loss=shaken_loss),
    "a step raised inside a unit": Scenario(FragileInside, (1, 3), loss=shaken_loss),
    "a checkpointed step raised": Scenario(FragileCheckpointed, (2,), loss=shaken_loss),
    "recomputation raised": Scenario(
        FragileCheckpointed, (2,), loss=partial(shaken_loss, where=["run 5"])
    ),
    "the order of units changes from step to step": Scenario(
        DetoursByStep,
        (1, 3),
        [*SPREAD, {"stage": 3, "schedule": Schedule(1 << 20)}],
        drawn=detour_steps,
    ),
}
