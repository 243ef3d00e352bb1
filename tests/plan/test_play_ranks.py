"""A played step against real ranks: bytes sent, collectives, what is held, the allocator's peak."""

from functools import cache, partial

import pytest
import torch
from torch import nn

from models import OddModel
from ranks import run_ranks
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tracing import trace
from shardwise.plan.step.play import play
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder
from step_counts import measure, planned_counts


class Block(nn.Module):
    """Rows that no number of ranks divides; small and large tensors, a bias."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=101, vocabulary=307, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Part(nn.Module):
    """Only one of its two layers is used."""

    def __init__(self, width):
        super().__init__()
        self.used = nn.Linear(width, width)
        self.left = nn.Linear(width, 2 * width)

    def forward(self, x):
        return x + torch.tanh(self.used(x))


class Idle(nn.Module):
    """A unit that runs, although its parameter has no part in what it returns."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return 2 * x


class Unused(nn.Module):
    """Parameters without a gradient: some of a unit, all of a unit that runs, and of one idle."""

    def __init__(self, width=101, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.parts = nn.ModuleList(Part(width) for _ in range(3))
        self.idle = nn.ModuleList(Idle(width) for _ in range(2))
        self.never = nn.ModuleList(Block(width // 4) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in (*self.parts, *self.idle):
            x = layer(x)
        return self.head(x)


def make_batch(rows):
    return torch.zeros(rows, 64, dtype=torch.long)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def freeze_some(model):
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return model


def make_model(name):
    made = {
        **{"net": Net, "tall net": partial(Net, vocabulary=1000), "unused": Unused},
        **{"odd": partial(OddModel, width=33), "frozen": lambda: freeze_some(Net())},
    }
    if name in made:
        return made[name]()
    config = TrainConfig(
        dim=64,
        layers=3,
        heads=4,
        kv_heads=2,
        tied_head=name == "tied decoder",
        activation_checkpointing=name == "checkpointed decoder",
    )
    return Decoder(config, vocab=211)


@cache
def make_tape(name, micro_batch, dtype):
    return trace(
        make_model(name),
        lambda: make_batch(micro_batch),
        loss_of,
        name=name,
        compute_dtype=dtype,
    )


def measure_all(rank, world_size, cases):
    """Return what this rank measures in each case; memory on rank 0 alone."""

    def loss(model, rows):
        return loss_of(model, make_batch(rows))

    return [
        measure(
            make_model(name),
            partial(loss, rows=candidate.micro_batch),
            candidate,
            num_windows=2,
            traces=rank == 0,
        )
        for name, candidate in cases
    ]


BF16 = {"precision": "bf16"}
FLAT = {"layout": "flat"}
WHOLE = {"layout": "matrices"}  # the one with the most to hold is rank 0 here
STEP = {"accumulation": 2, "reduce_every": "step"}
# By the number of ranks: the model and what the candidate has. Cells of a kind are in turns over
# the numbers of ranks, so that each setting is met with and without peers.
CASES = {
    1: [
        ("net", {"stage": 0}),
        ("net", {**FLAT, **BF16}),
        ("tall net", {"stage": 2, **WHOLE, **BF16}),
        # encoded gathers and reductions
        ("net", {"stage": 1, "gather": "int8"}),
        ("net", {**BF16, "gather": "fp8", "gather_block": 64, "accumulation": 2}),
        ("net", {"stage": 0, "reduce": "int8-a2a"}),
        ("net", {"stage": 2, **BF16, "reduce": "int4-a2a", "accumulation": 2, "gather_block": 64}),
        ("frozen", {"reduce": "fp8-a2a", "gather": "int8"}),
        ("unused", {**BF16, "reduce": "int8-a2a"}),
    ],
    2: [
        ("tall net", {"stage": 1, **WHOLE}),
        ("tall net", {**WHOLE, **BF16, **STEP}),
        # one or many reductions
        ("net", {"stage": 0, **BF16, **FLAT, "accumulation": 2}),
        ("net", {"stage": 1, "accumulation": 3}),
        ("net", {"stage": 1, **BF16, "accumulation": 2, "reduce_every": "micro_batch"}),
        ("net", {"stage": 2, **BF16, **FLAT, **STEP}),
        ("net", {"accumulation": 2}),
        ("net", {**BF16, "accumulation": 3, "reduce_every": "step"}),
        # gradients that autograd adds to sums of their dtype; a tied weight's first part waits
        ("net", STEP),
        ("tied decoder", STEP),
        ("checkpointed decoder", STEP),
        *(("net", {"micro_batch": 1, "optimizer_kernel": k}) for k in ("foreach", "loop")),
        ("decoder", BF16),
        ("tied decoder", {"stage": 2}),
        ("tied decoder", BF16),
        ("checkpointed decoder", {"stage": 2, **BF16}),
        # parameters without a gradient have no state and contribute zeros
        ("unused", {"stage": 0, **BF16}),
        ("unused", {"stage": 1}),
        ("unused", {"stage": 2, **BF16, "accumulation": 2}),
        ("unused", BF16),
        ("unused", STEP),
        # tied, scalar and frozen parameters
        *((name, {"stage": 1, **BF16}) for name in ("odd", "frozen")),
        *((name, {}) for name in ("odd", "frozen")),
    ],
    3: [
        ("net", {"stage": 0, **FLAT, **BF16}),
        ("net", {"stage": 1}),
        ("net", {"stage": 2, **FLAT}),
        ("net", {"stage": 2, **BF16}),
        ("net", {}),
        ("net", {**FLAT, **BF16}),
        ("tall net", {"stage": 0, **WHOLE}),
        ("tall net", {**WHOLE, **BF16}),
        # shares with padding between scales and elements, blocks that cuts go through
        ("net", {"stage": 1, "gather": "int8"}),
        ("net", {**FLAT, **BF16, "gather": "int4"}),
        ("net", {**BF16, "gather": "fp8", "gather_block": 64, "accumulation": 2}),
        ("frozen", {**BF16, "gather": "int4"}),
        # buckets of several units, parts without codes among them, and units without any
        ("net", {"stage": 0, "reduce": "int8-a2a"}),
        ("net", {"stage": 1, **BF16, "reduce": "fp8-a2a", "accumulation": 2}),
        ("net", {"reduce": "bf16-a2a", **FLAT}),
        ("net", {**BF16, "reduce": "bf16-a2a", "bucket_bytes": 0}),
        ("tall net", {**WHOLE, **BF16, "reduce": "int8-a2a"}),
        ("unused", {**BF16, "reduce": "int8-a2a"}),
        *(("net", {**FLAT, "prefetch_bytes": b}) for b in (0, 300_000, 1 << 30)),
    ],
    4: [
        ("net", {"num_shards": 2, "num_replicas": 2, **settings})
        for settings in (
            {"stage": 0, **FLAT},
            {"stage": 1, **BF16, "accumulation": 2},
            {**BF16, **FLAT},
            {"accumulation": 2},
            {"stage": 0, **FLAT, "reduce": "int8-a2a"},
            {"stage": 1, **BF16, "reduce": "bf16-a2a"},
            {**BF16, **FLAT, "reduce": "fp8-a2a"},
        )
    ],
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_a_played_step_is_a_runs(num_ranks):
    common = {"micro_batch": 2, "transport": "point_to_point", "precision": "fp32"}
    common["num_shards"] = num_ranks
    cases = [(name, Candidate(**{**common, **settings})) for name, settings in CASES[num_ranks]]
    measured = run_ranks(measure_all, num_ranks, cases)[0]
    for (name, candidate), real in zip(cases, measured, strict=True):
        dtype = "float32" if candidate.precision == "fp32" else "bfloat16"
        played = play(make_tape(name, candidate.micro_batch, dtype), candidate)
        label = f"{name}: {candidate}"
        for what, found in (
            ("rest", played.device.total),
            ("peak", played.peak.ledger.total),
        ):
            expected = real.pop(what)
            assert abs(found - expected) < 0.01 * expected, (label, what)
        assert planned_counts(played, candidate) == real, label
