"""Time composed models beside torch's own FSDP2, and hold counted bytes against formulas.

    python benchmarks/compose.py
    python benchmarks/compose.py --cases tp --rounds 9 --json runs/compose.jsonl

Targets: on 4 CPU ranks, 2 x shards with tensor parallelism, and 2 stages x 2 shards, take at most
0.9 x the step of FSDP2 with the same parallel layers or the same schedule; tensor parallelism adds
at most 0.1 ms of host time to a unit; bytes by axis are those of the formulas.

How. The built-in decoder with the same weights and batches on both sides, torch's own parallel
layers and schedules, AdamW(fused=True). Both models live in the same four processes and take turns
step by step, so that a machine that slows down slows both. Times are those of rank 0 from barrier
to barrier; ratios are of medians, of wall time and of the ranks' CPU seconds. Bytes are what
`stats()` counts in one step, against what each axis has to send: shards as `describe()` says,
keys and values for context parallelism, tokens whose experts are on other ranks (summed over all
ranks). Host time is that of one process on torch's fake process group, whose collectives take no
time: with and without DTensors underneath.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

CASES = ("tp", "pp", "cp", "ep", "host")
LIMIT, HOST_LIMIT_MS = 0.9, 0.1
NUM_RANKS = 4
SHAPE: dict[str, int] = {
    **{"layers": 4, "dim": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 2048},
}
ROWS, LENGTH, MICRO_BATCHES = 4, 128, 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=20, help="steps of each that are timed")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per case")
    return parser.parse_args()


# -- models
def make_decoder() -> Any:
    import torch

    from shardwise.plan.model.decoder import PlainDecoder
    from shardwise.plan.model.shapes import llama_shape

    torch.manual_seed(0)
    return PlainDecoder(llama_shape(**SHAPE))


def batch_of(seed: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE["vocab"], (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def by_torch(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stepping(model: Any, passes: Callable[[Any], Any]) -> Callable[[], float]:
    """Return a function that takes a step: the passes of a model, which return its loss, AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        loss = passes(model)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def passes_over(batch: tuple[Any, Any]) -> Callable[[Any], Any]:
    """Return the forward and backward pass of a batch."""

    def passes(model: Any) -> Any:
        loss = model(*batch)
        loss.backward()
        return loss.detach()

    return passes


# -- tensor parallelism
def tensor_case(rounds: int) -> dict[str, Any]:
    """Time steps of 2 shards x tp 2."""
    import shardwise
    from shardwise.train.decoder import spread_decoder

    axes = shardwise.Axes(tp=2)
    batch = batch_of(axes["dp_shard"].get_local_rank())
    models = {
        "fsdp2": by_torch(spread_decoder(make_decoder(), axes), axes["dp_shard"]),
        "shard": shardwise.shard(spread_decoder(make_decoder(), axes), mesh=axes),
    }
    steps = {name: stepping(model, passes_over(batch)) for name, model in models.items()}
    times = in_turns(steps, rounds)
    return {**times, **shard_bytes(models["shard"], steps["shard"], True)}


# -- pipelines
def pipeline_case(rounds: int) -> dict[str, Any]:
    """Time 1F1B over 2 stages x 2 shards, four micro-batches."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import cross_entropy

    import shardwise
    from shardwise.train.decoder import DecoderStage

    axes = shardwise.Axes(pp=2)
    stage, device = axes["pp"].get_local_rank(), torch.device("cpu")
    parts = [batch_of(10 * axes["dp_shard"].get_local_rank() + n) for n in range(MICRO_BATCHES)]
    ids, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def loss(logits: Any, wanted: Any) -> Any:
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())

    models = {
        "fsdp2": by_torch(DecoderStage(make_decoder(), stage, 2), axes["dp_shard"]),
        "shard": shardwise.shard(DecoderStage(make_decoder(), stage, 2), mesh=axes),
    }
    steps = {}
    for name, model in models.items():
        group = axes["pp"].get_group()
        pipe = PipelineStage(model, stage, 2, device, group=group)
        schedule = Schedule1F1B(pipe, MICRO_BATCHES, loss_fn=loss)

        def passes(_: Any, schedule: Any = schedule) -> float:
            losses: list[Any] = []
            if stage == 0:
                schedule.step(ids)
            else:
                schedule.step(target=targets, losses=losses)
            return float(sum(losses)) / MICRO_BATCHES

        steps[name] = stepping(model, passes)
    times = in_turns(steps, rounds)
    return {**times, **shard_bytes(models["shard"], steps["shard"], False)}


# -- context parallelism
def context_case(rounds: int) -> dict[str, Any]:
    """Count what two ways of attention send, and time them beside each other."""
    from torch.nn.functional import cross_entropy

    import shardwise

    axes = shardwise.Axes(cp=4)
    ids, targets = batch_of(1)
    steps, models = {}, {}
    for method in ("gather", "heads"):
        models[method] = model = shardwise.shard(make_decoder(), mesh=axes)
        context = shardwise.parallel.ContextParallel(model, axes, method=method)  # type: ignore[arg-type]

        def passes(model: Any, context: Any = context) -> Any:
            with context.cut(ids, targets) as (part, wanted, positions):
                logits = model(part, positions=positions)
                total = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
                loss = shardwise.parallel.mean_loss(model, total, wanted.numel())
                loss.backward()
            return loss.detach()

        steps[method] = stepping(model, passes)
    times = in_turns(steps, rounds)
    heads, kv_heads = SHAPE["heads"], SHAPE["kv_heads"]
    vector = 4 * SHAPE["dim"] // heads * ROWS * LENGTH // 4 * SHAPE["layers"]
    wanted = {
        "gather": {"cp.all_gather": 2 * kv_heads * vector * 3},
        "heads": {},
    }
    wanted["gather"]["cp.all_to_all"] = wanted["gather"]["cp.all_gather"]
    wanted["heads"]["cp.all_to_all"] = 2 * (2 * heads + 2 * kv_heads) * vector * 3 // 4
    found = {name: sent_by(models[name], steps[name], "cp.") for name in models}
    return {**times, "bytes": found, "formula": wanted, "exact": found == wanted}


# -- experts
def expert_case(rounds: int) -> dict[str, Any]:
    """Count the bytes of tokens that go to experts; time experts gathered beside experts spread."""
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    import shardwise
    from shardwise.parallel.experts import RoutedExperts
    from shardwise.plan.model.decoder import PlainDecoder
    from shardwise.plan.model.shapes import Experts, llama_shape

    experts = Experts(num=16, top_k=2, ffn=SHAPE["ffn"] // 4, shared=1)
    shape = replace(llama_shape(**SHAPE), experts=experts)
    batch, chosen, steps, models = batch_of(dist.get_rank()), [], {}, {}
    for ep in (1, NUM_RANKS):
        axes = shardwise.Axes(ep=ep)
        torch.manual_seed(0)
        model = shardwise.parallel.spread_experts(PlainDecoder(shape), axes)
        models[f"ep {ep}"] = model = shardwise.shard(
            model, mesh=axes, units=shardwise.config.Units(experts="*.experts")
        )
        steps[f"ep {ep}"] = stepping(model, passes_over(batch))
    times = in_turns(steps, rounds)
    name = f"ep {NUM_RANKS}"
    for layer in models[name].modules():
        if isinstance(layer, RoutedExperts):
            layer.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    here, others = experts.num // NUM_RANKS, NUM_RANKS - 1
    sent = sent_by(models[name], steps[name], "ep.")["ep.all_to_all"]
    away = sum(int((each // here != dist.get_rank()).sum()) for each in chosen)
    both = torch.tensor([sent, away])
    dist.all_reduce(both)
    found, rows = both.tolist()
    counts = 8 * here * others * NUM_RANKS * SHAPE["layers"]
    wanted = 4 * rows * SHAPE["dim"] * 4 + counts  # there and back, and so do the gradients
    return {**times, "bytes": found, "formula": wanted, "exact": found == wanted}


# -- bytes
def sent_by(model: Any, step: Callable[[], object], start: str) -> dict[str, int]:
    """Return what one step sends, of the kinds that start so."""
    import shardwise

    before = dict(shardwise.debug.stats(model).sent_bytes)
    step()
    after = shardwise.debug.stats(model).sent_bytes
    return {k: n - before.get(k, 0) for k, n in after.items() if k.startswith(start)}


def shard_bytes(model: Any, step: Callable[[], object], again: bool) -> dict[str, Any]:
    """Compare what a step sends over the shards with the slices that this rank has.

    ``again``: blocks are gathered for backward too, but the last, which is still there. Beside a
    slice of each gradient goes a number that says whether there is one.
    """
    import shardwise

    found = {k: n for k, n in sent_by(model, step, "shard.").items() if "scalars" not in k}
    described = shardwise.describe(model)
    others = described.num_shards - 1
    _, *blocks = sizes = [unit.rank_bytes * others for unit in described.units]
    flags = 4 * others * sum(unit.num_params for unit in described.units)
    wanted = {
        "shard.all_gather": sum(sizes) + (sum(blocks[:-1]) if again else 0),
        "shard.reduce_scatter": sum(sizes) + flags,
    }
    return {"bytes": found, "formula": wanted, "exact": found == wanted}


# -- time
def in_turns(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Take steps of all models in turns; return medians by model, and losses that must agree."""
    import torch.distributed as dist

    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step() for name, step in steps.items()}  # warms up
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begin, begun = time.perf_counter(), time.process_time()
            losses[name] = step()
            dist.barrier()
            wall[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - begun)
    return {
        "step_ms": {name: 1e3 * common.median(values) for name, values in wall.items()},
        "cpu_ms": {name: 1e3 * common.median(values) for name, values in cpu.items()},
        "losses": losses,
    }


RUN: dict[str, Callable[[int], dict[str, Any]]] = {
    "tp": tensor_case,
    "pp": pipeline_case,
    "cp": context_case,
    "ep": expert_case,
}


def work(config: Mapping[str, Any]) -> None:
    with common.joined_ranks(config):
        result = RUN[config["case"]](config["rounds"])
        common.write_result(config, result)
        gc.collect()


# -- host time
def host_case(rounds: int) -> dict[str, Any]:
    """Count what sharding adds to a unit's host time, without and with tensor parallelism."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import shardwise

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    axes, blocks, width = shardwise.Axes(tp=2), 16, 16
    loops: dict[str, Callable[[], None]] = {}
    for tensor in (False, True):
        for sharded in (False, True):
            model = nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
                    for _ in range(blocks)
                )
            )
            if tensor:
                for block in model:
                    parallelize_module(
                        block, axes["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
                    )
            if sharded:
                shardwise.shard(model, mesh=axes, units=list(model))
            x = torch.randn(2, width)
            kept = [getattr(p, "_local_tensor", p) for p in model.parameters()]

            def run(model: Any = model, x: Any = x, kept: Any = kept) -> None:
                model(x).sum().backward()
                for param in model.parameters():
                    param.grad = None
                torch.autograd.graph.increment_version(kept)  # as an optimizer's step would

            name = f"{'tp' if tensor else 'plain'}{', sharded' if sharded else ''}"
            loops[name] = run
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(3):
        for name, loop in loops.items():
            gc.collect()
            times[name].append(common.cpu_ms(loop, rounds))
    each = {name: common.median(values) / blocks for name, values in times.items()}
    without, beside = (each[f"{name}, sharded"] - each[name] for name in ("plain", "tp"))
    dist.destroy_process_group()
    return {"per_unit_ms": each, "shard_adds_ms": without, "shard_adds_under_tp_ms": beside}


# -- reports
def report(case: str, found: Mapping[str, Any]) -> None:
    if case == "host":
        more = found["shard_adds_under_tp_ms"] - found["shard_adds_ms"]
        print("\nhost time of one process, CPU ms per unit, fake group")
        rows = [[name, f"{ms:.3f}"] for name, ms in found["per_unit_ms"].items()]
        common.print_table(["16 units of two linear maps", "ms"], rows)
        said = common.verdict(more, HOST_LIMIT_MS)
        print(f"tensor parallelism adds {more:.3f} ms to a unit: {said} (at most {HOST_LIMIT_MS})")
        return
    print(f"\n{case}: {NUM_RANKS} CPU ranks, steps in turns")
    first, second = found["step_ms"]
    wall, cpu = found["step_ms"], found["cpu_ms"]
    rows = [
        [name, f"{wall[name]:.0f}", f"{cpu[name]:.0f}", f"{found['losses'][name]:.5f}"]
        for name in wall
    ]
    common.print_table(["model", "step ms", "CPU ms of rank 0", "last loss"], rows)
    ratio, of_cpu = wall[second] / wall[first], cpu[second] / cpu[first]
    said = f": {common.verdict(ratio, LIMIT)} (at most {LIMIT})" if first == "fsdp2" else ""
    print(f"{second} / {first}: time {ratio:.2f}, CPU {of_cpu:.2f}{said}")
    print(f"sent in a step: {found['bytes']}")
    print(f"by formula:     {found['formula']}: {'equal' if found['exact'] else 'NOT EQUAL'}")


def main() -> None:
    args = parse()
    for case in args.cases.split(","):
        if case == "host":
            found = host_case(args.rounds)
        else:
            config = {"case": case, "rounds": args.rounds}
            found, *_, last = common.run_processes(
                Path(__file__), config, NUM_RANKS, timeout_s=args.timeout
            )
            found["losses"] = last["losses"]  # of a pipeline, the last stage has it
        report(case, found)
        if args.json:
            common.append_json(args.json, {"case": case, **found})


if __name__ == "__main__":
    common.main(work, main)
