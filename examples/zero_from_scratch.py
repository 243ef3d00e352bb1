"""ZeRO from scratch: data-parallel training at stages 0 to 3, in the simplest form that is right.

    python examples/zero_from_scratch.py --ranks 2
    torchrun --nproc-per-node 2 examples/zero_from_scratch.py

Everything blocks: no prefetch, no overlap, no buckets, one dtype. It is the twin of `shardwise`:
the same ideas in one file, read by people first and used by the tests as an oracle.

In data parallelism every rank (process) trains on its own part of each batch, and all of them keep
the same parameters, gradients and optimizer state: N copies. ZeRO keeps one copy instead, cut into
N shards, and brings a full parameter back only while a layer computes with it.

    ZeRO: Rajbhandari, Rasley, Ruwase, He 2020, "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", arXiv:1910.02054. Sections below are of this paper.
    FSDP: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
    arXiv:2304.11277.

Reading order: STAGES, Unit (one parameter's life, top to bottom), train, main.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Its default arguments keep the process group that exists when it is imported. The first optimizer
# step imports it; too late, the group's threads would outlive destroy_process_group, and may abort.
import torch.distributed.nn.functional
from torch import Tensor, nn


class Stage(NamedTuple):
    """A stage is a row of data: how long the full (unsharded) tensors live. That is all."""

    shards_optimizer: bool  # P_os, section 5.1: a rank keeps optimizer state for its shard only
    reduces_every_micro_batch: bool  # P_g, section 5.2: full gradients do not outlive a backward
    frees_parameters: bool  # P_p, section 5.3: full parameters do not outlive their layer's turn


STAGES = {
    0: Stage(shards_optimizer=False, reduces_every_micro_batch=False, frees_parameters=False),
    1: Stage(shards_optimizer=True, reduces_every_micro_batch=False, frees_parameters=False),
    2: Stage(shards_optimizer=True, reduces_every_micro_batch=True, frees_parameters=False),
    3: Stage(shards_optimizer=True, reduces_every_micro_batch=True, frees_parameters=True),
}


class Unit:
    """Parameters that are gathered and freed together: as a rule, one transformer block.

    They lie one after another in one flat index space of P elements, padded so that N divides P;
    rank r owns the elements [r*S, (r+1)*S) with S = P/N, wherever the parameters' borders fall
    (FSDP calls this a FlatParameter). The module still uses its parameters by name: each one is a
    view of `full`.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], stage: Stage):
        self.parameters, self.stage = parameters, stage
        self.num_ranks, rank = dist.get_world_size(), dist.get_rank()
        numel = sum(p.numel() for p in parameters.values())
        self.shard_numel = -(-numel // self.num_ranks)  # S, rounded up
        self.sent_bytes = 0

        # Full parameters, [P]. `p.data = view` rather than an in-place copy gives the parameter its
        # own version counter: autograd will not take a later gather for a forbidden edit.
        self.full = torch.zeros(self.num_ranks * self.shard_numel)
        for p, span in self._spans():
            self.full[span] = p.data.flatten()
            p.data = self.full[span].view_as(p)
        dist.broadcast(self.full, src=0)  # all ranks start from rank 0's values
        self.fresh = True  # does `full` hold the values of the shards?

        # The optimizer sees one flat parameter. At stages 1 and 2 it is a slice of `full`,
        # so it costs no memory; at stage 3 it is all that stays when `full` is freed.
        mine = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)
        owned = self.full[mine] if stage.shards_optimizer else self.full
        self.shard = nn.Parameter(owned.clone() if stage.frees_parameters else owned)
        if stage.frees_parameters:
            self.free()

        # When: gather before the module computes, free after; and the same in backward.
        module.register_forward_pre_hook(lambda *_: self.gather())
        if stage.frees_parameters:
            module.register_forward_hook(lambda _module, _inputs, output: self.end_forward(output))
        for p in parameters.values():
            p.register_post_accumulate_grad_hook(lambda _: self.count_gradient())

    def _spans(self) -> Iterable[tuple[nn.Parameter, slice]]:
        start = 0
        for p in self.parameters.values():
            yield p, slice(start, start + p.numel())
            start += p.numel()

    def gather(self) -> None:
        """Bring the full parameters back: [S] on every rank -> [P]. Sends (N-1)*S elements.

        The optimizer changes shards, so every full copy is stale after a step, and whoever needs
        it next gathers it. So "all-gather after the step" (stages 1 and 2) and "all-gather before
        the layer" (stage 3, section 7.2.2) are this same call.
        """
        if self.fresh:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        dist.all_gather(list(self.full.view(self.num_ranks, -1)), self.shard.data)
        self.sent_bytes += (self.num_ranks - 1) * self.shard.nbytes
        self.fresh = True

    def free(self) -> None:
        """Give the full parameters' memory back, but keep the tensors.

        Autograd has saved some of them for backward. They share this storage, so they come back
        to life, unnoticed by autograd, when backward gathers again.
        """
        self.full.untyped_storage().resize_(0)
        self.fresh = False

    def end_forward(self, output: Tensor) -> None:
        self.free()
        if output.requires_grad:  # backward enters the module where the output's gradient is known
            output.register_hook(lambda _grad: self.gather())

    def start_micro_batch(self, last: bool) -> None:
        self.reduces_now = last or self.stage.reduces_every_micro_batch
        self.num_missing = len(self.parameters)

    def count_gradient(self) -> None:
        """Count a gradient that autograd has written; the last one ends the unit's backward."""
        self.num_missing -= 1
        if self.num_missing == 0:
            self.finish_backward()

    def finish_backward(self) -> None:
        self.num_missing = 0
        if self.reduces_now:
            self.reduce()
        if self.stage.frees_parameters:
            self.free()

    def reduce(self) -> None:
        """Average the gradients over ranks: [P] on every rank -> [S]. Sends (N-1)*S elements.

        Each rank gets its shard's gradients from all ranks, and sums them in rank order with one
        division at the end, so every stage does the same arithmetic and gets the same bits.
        """
        partial = torch.zeros(self.num_ranks * self.shard_numel)
        for p, span in self._spans():
            if p.grad is not None:  # a parameter that was not used in this step counts as zero
                partial[span] = p.grad.flatten()
            p.grad = None
        received = torch.empty_like(partial)  # N slices of S: rank 0's, rank 1's, ...
        dist.all_to_all_single(received, partial)
        self.sent_bytes += (self.num_ranks - 1) * received.nbytes // self.num_ranks
        total, *others = received.view(self.num_ranks, self.shard_numel)
        for other in others:
            total += other
        grad = total / self.num_ranks

        if not self.stage.shards_optimizer:  # all-reduce is this reduce-scatter and an all-gather,
            grad_shard, grad = grad, torch.empty_like(partial)  # section 7.1
            dist.all_gather(list(grad.view(self.num_ranks, -1)), grad_shard)
            self.sent_bytes += (self.num_ranks - 1) * grad_shard.nbytes
        # Earlier micro-batches of this step: at stages 2 and 3 they are summed here, as shards;
        # at stages 0 and 1 autograd has summed them in p.grad, full size.
        self.shard.grad = grad if self.shard.grad is None else self.shard.grad + grad


def make_units(model: nn.Module, unit_modules: Sequence[nn.Module], stage: Stage) -> list[Unit]:
    """Cut the model into units: the given modules, and the model itself for the rest."""
    units: list[Unit] = []
    taken: set[nn.Parameter] = set()
    for module in [*unit_modules, model]:
        inside = set(module.parameters())
        mine = {n: p for n, p in model.named_parameters() if p in inside and p not in taken}
        if mine:
            units.append(Unit(module, mine, stage))
            taken |= inside
    return units


def clip(units: Sequence[Unit], stage: Stage, max_norm: float) -> None:
    """Scale all gradients if their common norm is above `max_norm`; one number per rank is sent."""
    grads = [unit.shard.grad for unit in units if unit.shard.grad is not None]
    square = torch.stack([grad.square().sum() for grad in grads]).sum()
    if stage.shards_optimizer:  # shards are disjoint, so their squares add up to the whole
        squares = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(squares, square)
        square = torch.stack(squares).sum()
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad *= scale


class Trained(NamedTuple):
    """The result of a run: this rank's losses, the full parameters, and bytes held and sent."""

    losses: list[float]  # one per step, of this rank's own data
    parameters: dict[str, Tensor]
    held_bytes: int  # parameters, gradients, optimizer state: the most after any backward
    sent_bytes: int  # by this rank, in the last step


def train(
    model: nn.Module,
    unit_modules: Sequence[nn.Module],
    steps: Sequence[Sequence[Any]],  # steps[step][micro_batch]: this rank's own data
    loss_fn: Callable[[nn.Module, Any], Tensor],
    stage: int,
    optimizer_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    max_norm: float | None = None,
) -> Trained:
    """Train `model`, which is changed in place; every rank of the process group calls this.

    Any elementwise optimizer works unmodified: it never sees that its parameters are slices.
    """
    row = STAGES[stage]
    units = make_units(model, unit_modules, row)
    optimizer = optimizer_factory([unit.shard for unit in units])
    losses, held_bytes, sent_before = [], 0, 0
    for micro_batches in steps:
        sent_before = sum(unit.sent_bytes for unit in units)
        losses.append(0.0)
        for i, batch in enumerate(micro_batches):
            for unit in units:
                unit.start_micro_batch(last=i == len(micro_batches) - 1)
            loss = loss_fn(model, batch) / len(micro_batches)
            loss.backward()
            for unit in units:  # a parameter without a gradient has kept its unit waiting
                if unit.num_missing > 0:
                    unit.finish_backward()
            losses[-1] += loss.item()
            held_bytes = max(held_bytes, count_held_bytes(units, optimizer))
        if max_norm is not None:
            clip(units, row, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        for unit in units:
            unit.fresh = not row.shards_optimizer  # the shards have moved on, `full` has not
    sent_bytes = sum(unit.sent_bytes for unit in units) - sent_before

    parameters: dict[str, Tensor] = {}
    for unit in units:
        unit.gather()
        parameters |= {name: p.detach().clone() for name, p in unit.parameters.items()}
    return Trained(losses, parameters, held_bytes, sent_bytes)


def count_held_bytes(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> int:
    """Add up the model states of this rank (section 3.1), each storage once."""
    held = [t for state in optimizer.state.values() for t in state.values()]
    for unit in units:
        held += [
            unit.full,
            unit.shard,
            unit.shard.grad,
            *(p.grad for p in unit.parameters.values()),
        ]
    storages = [t.untyped_storage() for t in held if isinstance(t, Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes() > 0}.values())


# The formulas, for fp32 and Adam: 4 bytes per parameter each for the value, the gradient and the
# two moments (section 3.1 with K = 8 in place of mixed precision's 12), divided by N where sharded.


def formula_held_bytes(numel: int, num_ranks: int, stage: int) -> float:
    shared = {0: 0, 1: 8, 2: 12, 3: 16}[stage]
    return numel * (16 - shared + shared / num_ranks)


def formula_sent_bytes(numel: int, num_ranks: int, stage: int, num_micro_batches: int) -> float:
    """Count passes over the model's bytes (section 7): a reduce, a gather, or both gathers."""
    passes = {0: 2, 1: 2, 2: 1 + num_micro_batches, 3: 3 * num_micro_batches}[stage]
    return passes * 4 * numel * (num_ranks - 1) / num_ranks


class TinyModel(nn.Module):
    """Embedding, three residual blocks, head: the next byte from this one."""

    def __init__(self, width: int = 48, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] -> [batch, time, 256]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def compare_stages(num_steps: int = 8, num_micro_batches: int = 2) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(rank)

    def draw_batch() -> Tensor:
        starts = torch.randint(len(text) - 33, (8,), generator=random)
        return torch.stack([text[start : start + 33] for start in starts])

    steps = [[draw_batch() for _ in range(num_micro_batches)] for _ in range(num_steps)]
    if rank == 0:
        print(f"{num_ranks} ranks, {num_micro_batches} micro-batches per step; kB on rank 0")
        print("stage   first loss  last loss    held  formula    sent/step  formula")
    for stage in STAGES:
        torch.manual_seed(0)
        model = TinyModel()
        numel = sum(p.numel() for p in model.parameters())
        done = train(
            model,
            list(model.blocks),
            steps,
            next_byte_loss,
            stage,
            lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
            max_norm=1.0,
        )
        held = formula_held_bytes(numel, num_ranks, stage)
        sent = formula_sent_bytes(numel, num_ranks, stage, num_micro_batches)
        if rank == 0:
            print(
                f"{stage:<7} {done.losses[0]:10.6f} {done.losses[-1]:10.6f}"
                f" {done.held_bytes / 1e3:7.0f} {held / 1e3:8.0f}"
                f" {done.sent_bytes / 1e3:12.0f} {sent / 1e3:8.0f}"
            )


def run_rank(rank: int, num_ranks: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    compare_stages()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model at every ZeRO stage.")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (not by torchrun)")
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():  # torchrun has started this process as one of the ranks
        dist.init_process_group("gloo")
        compare_stages()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_rank, args=(arguments.ranks, f"{folder}/rendezvous"), nprocs=arguments.ranks
        )


if __name__ == "__main__":
    main()
