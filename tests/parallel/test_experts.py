"""Mixtures of experts over any axes: the steps of one process, wherever the experts lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from ranks import run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.interop.fsdp2 import fully_shard
from shardwise.parallel.experts import spread_experts
from shardwise.parallel.routing import balance_experts
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.shapes import DecoderShape, Experts

DIM, FFN, EXPERT, HEAD, VOCAB, LENGTH, LAYERS = 8, 10, 12, 4, 13, 5, 2
STEPS = 3


@dataclass(frozen=True)
class Cell:
    """One composition: degrees, how many experts, and what it is sharded by."""

    degrees: dict[str, int] = field(default_factory=dict)
    experts: int = 12
    by: Any = 3  # a stage of shard(), or "fully_shard"
    precision: str = "fp32"
    micro_batches: int = 1
    top_k: int = 2
    shared: int = 1
    dense: int = 0
    sigmoid: bool = False
    balance: float = 0.0
    biased: bool = False
    checkpointed: bool = False
    on_meta: bool = False
    layout: str = "rows"

    def make(self) -> PlainDecoder:
        torch.manual_seed(0)
        scoring: Any = "sigmoid" if self.sigmoid else "softmax"
        experts = Experts(self.experts, self.top_k, EXPERT, self.shared, self.dense, scoring)
        sizes = LAYERS, DIM, DIM // HEAD, 1, HEAD, FFN, VOCAB
        shape = DecoderShape(*sizes, experts=experts)
        made = PlainDecoder(shape, self.checkpointed, 0.0, self.balance, self.biased)
        for name, param in made.named_parameters():  # so large that rounding decides no choice
            if name.endswith("router.weight"):
                nn.init.normal_(param)
            elif param.ndim > 1:
                nn.init.normal_(param, std=0.3)
        return made

    def compose(self, model: PlainDecoder, axes: shardwise.Axes) -> Any:
        if axes.tp > 1 and self.shared:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks[self.dense :]:
                parallelize_module(block.feed_forward.shared, axes["tp"], plan)
        spread_experts(model, axes)
        if self.by == "fully_shard":
            policy = torch.distributed.fsdp.MixedPrecisionPolicy(
                torch.bfloat16 if self.precision == "bf16" else None, torch.float32
            )
            for block in model.blocks:
                fully_shard(block, mesh=axes, mp_policy=policy)
            return fully_shard(model, mesh=axes, mp_policy=policy)
        return shardwise.shard(
            model,
            mesh=axes,
            stage=self.by,
            layout=self.layout,
            precision=self.precision,
            experts="*.experts",
        )


# In each layer a norm, attention, a norm, the router with its softmax, experts, their mixture and
# the shared one; then the last norm, logits and their softmax.
SUMS = (
    *(DIM, DIM, HEAD, LENGTH, DIM, DIM, DIM, 12, DIM, EXPERT, 3, DIM, EXPERT) * LAYERS,
    *(DIM, DIM, VOCAB),
)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def alike(ours: Any, theirs: Any, roundings: int, what: str, precision: str) -> None:
    """Within the roundings of fp32; in bf16 a rank's sum is rounded, and what is made of it."""
    ours, theirs = whole(ours).detach(), theirs.detach()
    if precision == "bf16":
        ours, theirs, roundings = ours.bfloat16(), theirs.bfloat16(), 12
    assert_rounded_alike(ours, theirs, roundings, what)


def reference(cell: Cell) -> Any:
    """Return one process's model; in bf16 one that `shard()` has given the same casts."""
    plain = cell.make()
    if cell.precision == "fp32":
        return plain
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
    return shardwise.shard(plain, mesh=alone["one"], precision=cell.precision)


def batch_of(step: int, micro_batch: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + micro_batch)
    ids = torch.randint(VOCAB, (2, rows, LENGTH), generator=generator)
    return ids[0], ids[1]


def step_of(
    model: Any, optimizer: torch.optim.Optimizer, parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[dict[str, Tensor], Tensor]:
    """Take one step, clipped; return the gradients before that, whole, and their norm."""
    for number, (ids, targets) in enumerate(parts):
        if len(parts) == 1:
            model(ids, targets).backward()
        elif isinstance(model, PlainDecoder) and not hasattr(model, "no_sync"):
            (model(ids, targets) / len(parts)).backward()
        else:
            with shardwise.accumulate(model, last=number == len(parts) - 1):
                (model(ids, targets) / len(parts)).backward()
    grads = {name: whole(p.grad).detach().clone() for name, p in model.named_parameters()}
    norm = shardwise.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    balance_experts(model, rate=0.05)
    return grads, norm


def trains_as_one_process_does(cell: Cell, folder: Path | None = None) -> Any:
    """Three steps: gradients, norms, parameters, biases; then what the checkpoint has."""
    axes = shardwise.Axes(**cell.degrees)
    plain = reference(cell)
    start = cell.make()
    model = cell.compose(start, axes)
    size, place = axes["loss"].size(), axes["loss"].get_local_rank()
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    rows = 2
    base = of_gradient(*SUMS, over=rows * size * LENGTH)
    for step in range(STEPS):
        batches = [batch_of(step, m, rows * size) for m in range(cell.micro_batches)]
        mine = slice(rows * place, rows * (place + 1))
        parts = [(ids[mine], targets[mine]) for ids, targets in batches]
        grads, norm = step_of(model, ours, parts)
        wanted, right = step_of(plain, theirs, batches)
        roundings, what = base * (step + 1), f"{cell}, step {step}"
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            if cell.precision == "bf16" and step:
                break  # of parameters whose last digits of bf16 differ by now
            alike(grad, wanted[name], roundings, f"gradient of {name}, {what}", cell.precision)
        alike(norm, whole(right), roundings, f"norm, {what}", cell.precision)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            alike(p, whole(q), roundings, f"{name}, {what}", cell.precision)
        for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(b, c), f"{name}, {what}"
    if cell.biased:
        assert all(b.any() for name, b in model.named_buffers() if name.endswith("bias"))
    if cell.by != "fully_shard":
        shardwise.check_replicas(model, ours)
    return model


def all_cells(rank: int, num_ranks: int, cells: list[Cell]) -> None:
    for cell in cells:
        trains_as_one_process_does(cell)


CELLS: dict[int, list[Cell]] = {
    1: [
        Cell(balance=0.1, biased=True, sigmoid=True, micro_batches=3),
        Cell(by="fully_shard", balance=0.1),
    ],
    2: [
        Cell({"ep": 2}, by=0, balance=0.1),
        Cell({"ep": 2}, by=1, biased=True, checkpointed=True, balance=0.1, dense=1),
        Cell({"ep": 2}, by=2, micro_batches=3, sigmoid=True, biased=True),
        Cell({"ep": 2}, by=3, experts=2, precision="bf16"),
        Cell({"ep": 2}, by="fully_shard", micro_batches=3, balance=0.1),
        Cell({"tp": 2, "ep": 2}, by=3, top_k=3),
        Cell({"tp": 2}, by=3, biased=True),
    ],
    3: [
        Cell({"ep": 3}, by=3, balance=0.1, biased=True, layout="flat"),
        Cell({"ep": 3}, experts=3, by="fully_shard", precision="bf16"),
        Cell({"tp": 3, "ep": 3}, by=2, balance=0.1, micro_batches=3),
    ],
    4: [
        Cell({"ep": 4}, experts=4, by=2, balance=0.1, biased=True),
        Cell({"ep": 2}, experts=2, by=3, shared=0, sigmoid=True, balance=0.1),
        Cell({"ep": 2, "dp_replicate": 2}, by=3, micro_batches=3, biased=True),
        Cell({"ep": 2, "dp_replicate": 2}, by="fully_shard", balance=0.1),
        Cell({"ep": 2, "tp": 2}, by=3, precision="bf16", biased=True),
        Cell({"ep": 4, "tp": 2}, by="fully_shard", experts=4, balance=0.1, biased=True),
        Cell({"ep": 2, "tp": 4}, by=3, balance=0.1, top_k=1),
        Cell({"ep": 4}, by=1, micro_batches=3, checkpointed=True),
    ],
}


@pytest.mark.parametrize("num_ranks", CELLS)
def test_experts_over_any_axes_train_as_one_process_does(num_ranks: int) -> None:
    run_ranks(all_cells, num_ranks, CELLS[num_ranks])
