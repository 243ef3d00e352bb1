"""The training engines that are compared, behind one face: ``step(batches) -> loss``.

Every engine gets the same model, ``clip_grad_norm_`` 1.0 and a fused AdamW. Measures nothing by
itself; used by step_time.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]
CLIP = 1.0
_ADAMW: dict[str, Any] = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "fused": True,
}


@dataclass(frozen=True)
class Settings:
    """What differs between cases besides the engine."""

    num_ranks: int
    precision: str = "fp32"
    layout: str = "rows"


@dataclass
class Trainer:
    """One engine, ready to step; ``micro_batch`` says how to enter one micro-batch."""

    model: nn.Module
    optimizer: Optimizer
    micro_batch: Callable[[bool], contextlib.AbstractContextManager[object]]
    state_bytes: Callable[[], int]
    sent_bytes: Callable[[], int] | None = None

    def step(self, batches: Sequence[Batch]) -> float:
        """Take one optimizer step over the micro-batches; return their mean loss on this rank."""
        total = 0.0
        for number, (ids, targets) in enumerate(batches):
            with self.micro_batch(number + 1 == len(batches)):
                loss = self.model(ids, targets) / len(batches)
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def build_trainer(name: str, model: nn.Module, settings: Settings) -> Trainer:
    """Build an engine by the name of its case."""
    if name in ("ddp", "ddp+zero"):
        return _build_ddp(model, settings, shards_state=name == "ddp+zero")
    if name in ("fsdp2", "fully_shard"):
        return _build_fsdp2(model, settings, ours=name == "fully_shard")
    return _build_shardwise(model, settings, int(name.removeprefix("stage")))


def _build_ddp(model: nn.Module, settings: Settings, shards_state: bool) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Optimizer
    if shards_state:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **_ADAMW
        )
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), **_ADAMW)

    @contextlib.contextmanager
    def micro_batch(last: bool) -> Any:
        sync = contextlib.nullcontext() if last else wrapped.no_sync()
        with sync, torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
            yield

    def state_bytes() -> int:
        inner = getattr(optimizer, "optim", optimizer)  # what ZeroRedundancyOptimizer wraps
        buckets = sum(p.nbytes for p in wrapped.parameters())  # they outlive zero_grad
        return buckets + _local_bytes(wrapped.parameters()) + _optimizer_bytes(inner)

    return Trainer(wrapped, optimizer, micro_batch, state_bytes)


def _build_fsdp2(model: Any, settings: Settings, ours: bool) -> Trainer:
    import torch.distributed.fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import shardwise

    fully_shard: Any = shardwise.fully_shard if ours else torch.distributed.fsdp.fully_shard
    mesh = init_device_mesh("cpu", (settings.num_ranks,))
    policy = MixedPrecisionPolicy()
    if settings.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)

    def state_bytes() -> int:
        return _local_bytes(model.parameters()) + _optimizer_bytes(optimizer)

    return Trainer(model, optimizer, lambda last: contextlib.nullcontext(), state_bytes)


def _build_shardwise(model: nn.Module, settings: Settings, stage: int) -> Trainer:
    import shardwise

    shardwise.shard(model, stage=stage, precision=settings.precision, layout=settings.layout)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)

    def state_bytes() -> int:
        held = shardwise.debug.stats(model)
        kept = held.param_shard_bytes + held.param_full_bytes
        return kept + held.grad_shard_bytes + held.grad_partial_bytes + _optimizer_bytes(optimizer)

    return Trainer(
        model,
        optimizer,
        lambda last: shardwise.accumulate(model, last=last),
        state_bytes,
        lambda: sum(shardwise.debug.stats(model).sent_bytes.values()),
    )


def _optimizer_bytes(optimizer: Optimizer) -> int:
    tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return _local_bytes(tensors)


def _local_bytes(tensors: Any) -> int:
    """Sum the bytes of this rank's part of every tensor."""
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
