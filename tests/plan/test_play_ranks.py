"""A played step against real ranks: bytes sent, collectives, what is held, the allocator's peak."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from allocator import AllocatorTrace, traced
from models import OddModel
from ranks import run_ranks
from shardwise import Precision, accumulate, shard
from shardwise.config import PRECISIONS, Schedule
from shardwise.debug import stats
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Tape
from shardwise.plan.model.tracing import trace
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.ledger import Played
from shardwise.plan.step.play import play
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder

NUM_WINDOWS = 2  # what the transport's threads free is seen late: the least of several counts


class Block(nn.Module):
    """Rows that no number of ranks divides; small and large tensors, a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 101, vocabulary: int = 307, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Part(nn.Module):
    """Only one of its two layers is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.left = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class Idle(nn.Module):
    """A unit that runs, although its parameter has no part in what it returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Unused(nn.Module):
    """Parameters without a gradient: some of a unit, all of a unit that runs, and of one idle."""

    def __init__(self, width: int = 101, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.parts = nn.ModuleList(Part(width) for _ in range(3))
        self.idle = nn.ModuleList(Idle(width) for _ in range(2))
        self.never = nn.ModuleList(Block(width // 4) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in (*self.parts, *self.idle):
            x = layer(x)
        return self.head(x)


def make_batch(rows: int) -> Tensor:
    return torch.zeros(rows, 64, dtype=torch.long)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def mesh_of(candidate: Candidate) -> Any:
    if candidate.num_replicas == 1:
        return None
    sizes = (candidate.num_replicas, candidate.num_shards)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def precision_of(candidate: Candidate) -> Precision:
    named = PRECISIONS[candidate.precision]
    coded = {"gather": candidate.gather, "block": candidate.gather_block}
    return replace(named, reduce=candidate.reduce or named.reduce, **coded)


def make_model(name: str) -> nn.Module:
    if name == "net":
        return Net()
    if name == "tall net":
        return Net(vocabulary=1000)
    if name == "odd":
        return OddModel(width=33)
    if name == "unused":
        return Unused()
    if name == "frozen":
        model = Net()
        model.embed.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        return model
    config = TrainConfig(
        dim=64,
        layers=3,
        heads=4,
        kv_heads=2,
        tied_head=name == "tied decoder",
        activation_checkpointing=name == "checkpointed decoder",
    )
    return Decoder(config, vocab=211)


def run_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, candidate: Candidate
) -> tuple[int, int]:
    """Run a step; return the bytes of reduced gradients and of optimizer state it ended with."""
    for number in range(candidate.accumulation):
        with accumulate(model, last=number == candidate.accumulation - 1):
            batch = make_batch(candidate.micro_batch)
            loss_of(model, batch).backward()
            del batch
    grads = stats(model).grad_shard_bytes
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    state = [t for values in optimizer.state.values() for t in values.values()]
    return grads, sum(getattr(t, "_local_tensor", t).nbytes for t in state)


def measure(
    name: str, candidate: Candidate, traces: bool = True
) -> tuple[dict[str, Any], AllocatorTrace]:
    """Return counts of a step, and the allocator's trace, if any, of this and the next ones."""
    plain = make_model(name)  # what sharding broadcasts is freed by a thread of the transport
    with traced() if traces else nullcontext(AllocatorTrace()) as allocator:
        model = shard(
            plain,
            stage=candidate.stage,
            precision=precision_of(candidate),
            layout=candidate.layout,
            mesh=mesh_of(candidate),
            schedule=Schedule(
                candidate.prefetch_bytes, candidate.bucket_bytes, candidate.reduce_every
            ),
        )
        kernel = candidate.optimizer_kernel
        optimizer = torch.optim.AdamW(
            model.parameters(), fused=kernel == "fused", foreach=kernel == "foreach"
        )
        run_step(model, optimizer, candidate)
        before = stats(model)
        with allocator.window("step 0"):
            grads, state = run_step(model, optimizer, candidate)
        after = stats(model)
        for number in range(1, NUM_WINDOWS):
            with allocator.window(f"step {number}"):
                run_step(model, optimizer, candidate)
    counts = {
        "sent bytes": dict(Counter(after.sent_bytes) - Counter(before.sent_bytes)),
        "collectives": dict(Counter(after.num_collectives) - Counter(before.num_collectives)),
        "shards": after.param_shard_bytes,
        "full": after.param_full_peak_bytes,
        "optimizer state": state,
    }
    if candidate.accumulation == 1:  # later, those in p.grad are counted without their padding
        counts["grads"] = grads
    return counts, allocator


@cache
def make_tape(name: str, micro_batch: int, dtype: DtypeName) -> Tape:
    return trace(
        make_model(name),
        lambda: make_batch(micro_batch),
        loss_of,
        name=name,
        micro_batch=micro_batch,
        seq=64,
        compute_dtype=dtype,
    )


def play_it(name: str, candidate: Candidate) -> tuple[dict[str, Any], Played]:
    """Trace and play; return what `measure` counts."""
    dtype: DtypeName = "float32" if candidate.precision == "fp32" else "bfloat16"
    tape = make_tape(name, candidate.micro_batch, dtype)
    played = play(tape, candidate)
    counts = {
        "sent bytes": {k: v for k, v in played.program.sent_bytes.items() if v},
        "collectives": {k: v for k, v in played.program.num_collectives.items() if v},
        "shards": played.resting.param_shards,
        "full": max(m.ledger.param_full for m in played.peaks),
        "optimizer state": played.resting.optimizer_state,
    }
    if candidate.accumulation == 1:
        counts["grads"] = max(m.ledger.grad_shards for m in played.peaks)
    return counts, played


def measure_all(
    rank: int, world_size: int, cases: list[tuple[str, Candidate]]
) -> list[dict[str, Any]]:
    """Return what rank 0 measures in each case; the others only take part."""
    found = []
    for name, candidate in cases:
        real, allocator = measure(name, candidate, traces=rank == 0)
        if rank:
            continue
        steps = [f"step {i}" for i in range(NUM_WINDOWS)]
        real["rest"] = min(allocator.before(step) for step in steps)
        real["peak"] = min(allocator.peak(step) for step in steps)
        found.append(real)
    return found


def check(num_ranks: int, cases: list[tuple[str, Candidate]]) -> None:
    measured = run_ranks(measure_all, num_ranks, cases)[0]
    for (name, candidate), real in zip(cases, measured, strict=True):
        counts, played = play_it(name, candidate)
        label = f"{name}: {candidate}"
        for what, found in (
            ("rest", played.resting.total),
            ("peak", played.peak.ledger.total),
        ):
            expected = real.pop(what)
            assert abs(found - expected) < 0.01 * expected, (label, what)
        assert counts == real, label


def cpu(num_shards: int, **settings: Any) -> Candidate:
    settings = {"micro_batch": 2, "transport": "point_to_point", "precision": "fp32"} | settings
    return Candidate(num_shards=num_shards, **settings)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_stage_in_either_layout_and_precision(num_ranks: int) -> None:
    check(
        num_ranks,
        [
            ("net", cpu(num_ranks, stage=s, layout=layout, precision=p))
            for s, layout, p in (
                ((0, "rows", "fp32"), (3, "flat", "bf16"))
                if num_ranks == 1
                else (
                    *((0, "flat", "bf16"), (1, "rows", "fp32"), (2, "flat", "fp32")),
                    *((2, "rows", "bf16"), (3, "rows", "fp32"), (3, "flat", "bf16")),
                )
            )
        ],
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_matrices_whole_on_one_rank(num_ranks: int) -> None:
    """The one with the most to hold is played, which is rank 0 here."""
    settings: list[dict[str, Any]] = [
        *({"stage": stage} for stage in range(4)),
        {"precision": "bf16"},
        {"precision": "bf16", "accumulation": 2, "reduce_every": "step"},
    ]
    check(num_ranks, [("tall net", cpu(num_ranks, layout="matrices", **s)) for s in settings])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_encoded_gathers_send_and_hold_what_is_planned(num_ranks: int) -> None:
    """Shares with padding between scales and elements, blocks that cuts go through."""
    check(
        num_ranks,
        [
            ("net", cpu(num_ranks, stage=s, layout=layout, precision=p, gather=kind, **more))
            for s, layout, p, kind, more in (
                (1, "rows", "fp32", "int8", {}),
                (3, "flat", "bf16", "int4", {}),
                (3, "rows", "bf16", "fp8", {"gather_block": 64, "accumulation": 2}),
                (2, "flat", "fp32", "int4", {}),
            )
        ]
        + [("frozen", cpu(num_ranks, precision="bf16", gather="int4"))],
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_encoded_reductions_send_and_hold_what_is_planned(num_ranks: int) -> None:
    """Buckets of several units, parts without codes among them, and units without any."""
    settings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("net", {"stage": 0, "reduce": "int8-a2a", "precision": "fp32"}),
        ("net", {"stage": 1, "reduce": "fp8-a2a", "accumulation": 2}),
        ("net", {"stage": 2, "reduce": "int4-a2a", "accumulation": 2, "gather_block": 64}),
        ("net", {"reduce": "bf16-a2a", "precision": "fp32", "layout": "flat"}),
        ("net", {"reduce": "bf16-a2a", "bucket_bytes": 0}),
        ("tall net", {"reduce": "int8-a2a", "layout": "matrices"}),
        ("frozen", {"reduce": "fp8-a2a", "precision": "fp32", "gather": "int8"}),
        ("unused", {"reduce": "int8-a2a"}),
    )
    check(num_ranks, [(name, cpu(num_ranks, **{"precision": "bf16", **s})) for name, s in settings])


def test_accumulation_with_one_or_many_reductions() -> None:
    check(
        2,
        [
            ("net", cpu(2, stage=s, accumulation=a, reduce_every=every, precision=p, layout=layout))
            for s, a, every, p, layout in (
                (0, 2, None, "bf16", "flat"),
                (1, 3, None, "fp32", "rows"),
                (1, 2, "micro_batch", "bf16", "rows"),
                (2, 2, "step", "bf16", "flat"),
                (3, 2, None, "fp32", "rows"),
                (3, 3, "step", "bf16", "rows"),
            )
        ],
    )


def test_gradients_that_autograd_adds_to_sums_of_their_dtype_are_freed_one_by_one() -> None:
    """A tied weight's first part waits for the second all the same."""
    names = ("net", "tied decoder", "checkpointed decoder")
    check(2, [(name, cpu(2, accumulation=2, reduce_every="step")) for name in names])


def test_prefetching_nothing_something_and_everything() -> None:
    check(3, [("net", cpu(3, prefetch_bytes=b, layout="flat")) for b in (0, 300_000, 1 << 30)])


def test_optimizer_kernels() -> None:
    check(2, [("net", cpu(2, micro_batch=1, optimizer_kernel=k)) for k in ("foreach", "loop")])


def test_shards_and_replicas() -> None:
    check(
        4,
        [
            ("net", cpu(2, num_replicas=2, stage=s, precision=p, accumulation=a, layout=layout))
            for s, p, a, layout in (
                (0, "fp32", 1, "flat"),
                (1, "bf16", 2, "rows"),
                (3, "bf16", 1, "flat"),
                (3, "fp32", 2, "rows"),
            )
        ]
        + [
            ("net", cpu(2, num_replicas=2, stage=s, precision=p, reduce=kind, layout=layout))
            for s, p, kind, layout in (
                (0, "fp32", "int8-a2a", "flat"),
                (1, "bf16", "bf16-a2a", "rows"),
                (3, "bf16", "fp8-a2a", "flat"),
            )
        ],
    )


def test_the_built_in_decoder_tied_and_checkpointed() -> None:
    cases = (
        *(("decoder", 3, "bf16"), ("tied decoder", 2, "fp32"), ("tied decoder", 3, "bf16")),
        *(("checkpointed decoder", 2, "bf16"), ("checkpointed decoder", 3, "fp32")),
    )
    check(2, [(name, cpu(2, stage=s, precision=p)) for name, s, p in cases])


def test_parameters_without_a_gradient_have_no_state_and_contribute_zeros() -> None:
    settings = (
        *((0, "bf16", 1, None), (1, "fp32", 1, None), (2, "bf16", 2, None)),
        *((3, "bf16", 1, None), (3, "fp32", 2, "step")),
    )
    check(
        2,
        [
            ("unused", cpu(2, stage=s, precision=p, accumulation=a, reduce_every=every))
            for s, p, a, every in settings
        ],
    )


def test_tied_scalar_unused_and_frozen_parameters() -> None:
    names = ("odd", "frozen")
    settings = ((1, "bf16"), (3, "fp32"))
    check(2, [(name, cpu(2, stage=s, precision=p)) for name in names for s, p in settings])
