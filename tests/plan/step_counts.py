"""What the engine holds and sends in a step, of a plan and of a sharded model on real ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from allocator import AllocatorTrace, traced
from shardwise import accumulate, shard
from shardwise.config import PRECISIONS, Schedule
from shardwise.debug import stats


def planned_counts(played, candidate):
    """Return what `measure` counts."""
    counts = {
        "sent_bytes": {k: v for k, v in played.program.sent_bytes.items() if v},
        "num_collectives": {k: v for k, v in played.program.num_collectives.items() if v},
        "param_shards": played.device.param_shards,
        "param_full": max(m.ledger.param_full for m in played.peaks),
        "optimizer_state": played.device.optimizer_state,
    }
    if candidate.accumulation == 1:  # later, those in p.grad are counted without their padding
        counts["grad_shards"] = max(m.ledger.grad_shards for m in played.peaks)
    return counts


def mesh_of(candidate):
    if candidate.num_replicas == 1:
        return None
    sizes = (candidate.num_replicas, candidate.num_shards)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def precision_of(candidate):
    named = PRECISIONS[candidate.precision]
    coded = {"gather": candidate.gather, "block": candidate.gather_block}
    return replace(named, reduce=candidate.reduce or named.reduce, **coded)


def measure(plain, loss_of, candidate, num_windows=1, traces=True):
    """Return the counts of the second step; by the allocator's trace, if any, its rest and peak.

    What sharding broadcasts is freed by a thread of the transport, so ``plain`` is made before the
    trace. What such threads free is seen late: of ``num_windows`` steps the least figures count.
    """
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

        def step():
            for number in range(candidate.accumulation):
                with accumulate(model, last=number == candidate.accumulation - 1):
                    loss_of(model).backward()
            grads = stats(model).grad_shard_bytes
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return grads

        step()
        before = stats(model)
        with allocator.window("step 0"):
            grads = step()
        after = stats(model)
        state = [t for values in optimizer.state.values() for t in values.values()]
        state_bytes = sum(getattr(t, "_local_tensor", t).nbytes for t in state)
        for number in range(1, num_windows):
            with allocator.window(f"step {number}"):
                step()
    counts = {
        "sent_bytes": dict(Counter(after.sent_bytes) - Counter(before.sent_bytes)),
        "num_collectives": dict(Counter(after.num_collectives) - Counter(before.num_collectives)),
        "param_shards": after.param_shard_bytes,
        "param_full": after.param_full_peak_bytes,
        "optimizer_state": state_bytes,
    }
    if candidate.accumulation == 1:
        counts["grad_shards"] = grads
    if traces:
        steps = [f"step {number}" for number in range(num_windows)]
        counts["rest"] = min(map(allocator.before, steps))
        counts["peak"] = min(map(allocator.peak, steps))
    return counts
