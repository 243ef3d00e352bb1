"""Measure tokens/s and peak memory on one CUDA GPU, beside plain PyTorch and FSDP2.

    python benchmarks/gpu.py --minutes 6 --json out.json
    python benchmarks/gpu.py --parts correct,memory
    python benchmarks/gpu.py --tiny                     # a tiny model; also without a GPU

Targets: stages 0 to 3 at world size 1 within 2 % of plain autocast's tokens/s and above FSDP2's;
peak memory at 8 ranks below FSDP2's at stage 3, below DDP's at stages 0 to 2; every loss right.

How. Llama-1B shapes (tied head, 2,048 tokens) in bf16 with fp32 master weights, built on the GPU,
AdamW(fused=True), clip_grad_norm_ 1.0. Needs torch and this package, nothing else. Three parts:

correct  A tiny fp32 model at world size 1 (nccl): losses of every stage and layout against a plain
         loop, at most two fp32 numbers apart; with activation checkpointing too; bf16 runs, falls.
memory   One process that believes it is rank 0 of --ranks (torch's fake process group, whose
         collectives cost nothing): its shards are as small as on so many GPUs, so
         the allocator's peak is the engine's real one (NCCL's own buffers are not in it). Tokens/s
         here are compute and host only, an upper bound. The losses mean nothing: the fake group
         does not gather. A hook that does nothing replaces DDP's all-reduce.
speed    World size 1 over nccl. Cases take turns, each in a process of its own (micro-batches of
         --micro-batches windows in it one after the other), in rounds until --minutes are over. A
         figure is the median of blocks of steps, each block between two synchronisations, after
         warm-up; peaks are counted after the warm-up. `+ckpt` recomputes each block in backward.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

PLAIN = ("autocast", "pure-bf16")
STAGES = ("stage0", "stage1", "stage2", "stage3")
SPEED_CASES = (*PLAIN, "fsdp2", *STAGES)
MEMORY_CASES = ("ddp", "fsdp2", *STAGES)
PEER = {"stage0": "ddp", "stage1": "ddp", "stage2": "ddp", "stage3": "fsdp2"}
# At one rank each kernel gets the numbers that it gets in the plain loop; the norm by which
# gradients are clipped may be summed in another order. Adam's step hardly depends on the scale of
# gradients, so each weight is off by one rounding a step at most, up or down. Over the thousands of
# weights behind a loss these cancel to less than a rounding of the loss, which with the loss's own
# makes it the second next number of fp32 at most.
LOSS_STEPS = 2
_GIB = 2**30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6, help="no new case starts after this")
    parser.add_argument("--parts", default="correct,memory,speed")
    parser.add_argument("--cases", help="comma-separated; default: all of the part")
    parser.add_argument("--rounds", type=int, default=5, help="at most so many rounds of speed")
    parser.add_argument("--ranks", type=int, default=8, help="fake ranks of the memory part")
    parser.add_argument(
        "--micro-batches", default="1,4,4+ckpt", help="windows per step; +ckpt recomputes blocks"
    )
    parser.add_argument("--memory-micro-batch", default="1+ckpt", help="of the memory part")
    parser.add_argument("--layout", choices=["rows", "flat"], default="rows")
    parser.add_argument("--warmup", type=int, default=3, help="steps")
    parser.add_argument("--blocks", type=int, default=3, help="timed blocks per case and round")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per row")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    args.cases = args.cases.split(",") if args.cases else None
    args.micro_batches = args.micro_batches.split(",")
    return args


# -- one case in one process
Step = Callable[..., Any]
PHASES = ("forward", "backward", "clip", "step")


def build(case: str, layout: str, checkpointed: bool, tiny: bool, precision: str) -> Step:
    """Build the model and its engine; return a step (ids, targets) -> loss, not synchronised."""
    import torch

    from shardwise.plan.model.decoder import PlainDecoder

    torch.manual_seed(0)
    device = device_here()
    with torch.device(device):  # FSDP2 checkpoints by itself: see `apply_fsdp2`
        model: Any = PlainDecoder(_shape(tiny)[0], checkpointed and case != "fsdp2")
    enter: Callable[[], Any] = contextlib.nullcontext
    if case in ("autocast", "ddp") and precision == "bf16":
        enter = lambda: torch.autocast(device.type, torch.bfloat16)  # noqa: E731
    if case == "pure-bf16":
        model.to(torch.bfloat16)
    elif case == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(None, _leave_bucket)
    elif case == "fsdp2":
        apply_fsdp2(model, precision, checkpointed)
    elif case in STAGES:
        import shardwise

        stage = int(case.removeprefix("stage"))
        shardwise.shard(model, stage=stage, precision=precision, layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    return make_step(model, optimizer, enter)


def make_step(
    model: Any, optimizer: Any, enter: Callable[[], Any] = contextlib.nullcontext
) -> Step:
    """Return a step of training, which clips, and calls ``mark`` around each of `PHASES`."""
    import torch

    def step(ids: Any, targets: Any, mark: Callable[[], None] = lambda: None) -> Any:
        mark()
        with enter():
            loss = model(ids, targets)
        mark()
        loss.backward()
        mark()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        mark()
        optimizer.step()
        mark()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _leave_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
    """Stand in for DDP's all-reduce, whose result the fake group does not answer with."""
    import torch

    buffer = bucket.buffer()
    future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def apply_fsdp2(model: Any, precision: str, checkpointed: bool, **options: Any) -> None:
    """Shard a decoder by torch's own, each block by itself.

    Checkpoints are inside the units, as torch does not cast a unit's inputs when it is recomputed:
    outside, the rotary tables, fp32, would be saved in bf16 and recomputed in fp32 (CheckpointError
    of torch 2.11).
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device_here().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if checkpointed:
        model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)


def device_here() -> Any:
    """Return the GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """Wait for the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _shape(tiny: bool) -> tuple[Any, int]:
    """Return the decoder's shape and the tokens of a window."""
    from shardwise.plan.model.presets import find_preset
    from shardwise.plan.model.shapes import llama_shape

    if tiny:
        return llama_shape(4, 64, 4, 2, 160, 256, tied=True), 32
    return find_preset("llama-3.2-1b").shape, 2048


def windows_of(shape: Any, seq: int, count: int, seed: int = 1) -> tuple[Any, Any]:
    """Return ids and targets of random windows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab, (count, seq + 1), generator=generator).to(device_here())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure(config: Mapping[str, Any], micro_batch: str) -> dict[str, Any]:
    """Build one case, step it, and return its times and peaks."""
    import torch

    cuda = torch.cuda.is_available()
    windows = int(micro_batch.removesuffix("+ckpt"))
    checkpointed = micro_batch.endswith("+ckpt")
    gc.collect()  # a model is in cycles with its hooks
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = build(config["case"], config["layout"], checkpointed, config["tiny"], "bf16")
    built_peak = torch.cuda.max_memory_allocated() if cuda else 0
    ids, targets = windows_of(*_shape(config["tiny"]), windows)
    losses = [step(ids, targets) for _ in range(config["warmup"])]
    synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    blocks, cpu = [], []
    for _ in range(config["blocks"]):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        losses += [step(ids, targets) for _ in range(config["steps"])]
        synchronize()
        blocks.append((time.perf_counter() - begin) / config["steps"])
        cpu.append((time.process_time() - cpu_begin) / config["steps"])
    return {
        "tokens": ids.numel(),
        "step_s": blocks,
        "cpu_s": cpu,
        "built_peak_bytes": built_peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "between_bytes": torch.cuda.memory_allocated() if cuda else 0,
        "losses": [float(x) for x in losses],
    }


def work(config: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    if config["part"] == "memory":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config["ranks"])
        found: dict[str, Any] = {m: measure(config, m) for m in [config["memory_micro_batch"]]}
        dist.destroy_process_group()
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        with common.joined_ranks(config, backend):
            if config["part"] == "correct":
                found = check_losses()
            else:
                found = {m: measure(config, m) for m in config["micro_batches"]}
    write_found(config, found)


def write_found(config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write a worker's result, and where it was found."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    common.write_result(config, {"found": found, "device": name, "torch": torch.__version__})


# -- correct
def be_exact() -> None:
    """Let kernels be deterministic."""
    import torch

    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=True)


def check_losses(num_steps: int = 6) -> dict[str, Any]:
    """Train a tiny model every way there is; return each way's losses."""
    be_exact()
    batches = [windows_of(*_shape(True), 2, seed) for seed in (1, 2)]
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        for checkpointed in (False, True):
            mark = f"{precision}{'+ckpt' if checkpointed else ''}"
            ways = [("autocast", "rows"), ("fsdp2", "rows")]
            ways += [(stage, layout) for stage in STAGES for layout in ("rows", "flat")]
            for case, layout in ways:
                name = f"{mark} {case}" + (f" {layout}" if case in STAGES else "")
                try:
                    step = build(case, layout, checkpointed, True, precision)
                    found[name] = [float(step(*batches[i % 2])) for i in range(num_steps)]
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"
    return found


def step_of_fp32(value: float) -> float:
    """Return how far the next number of fp32 is from a positive one."""
    return math.ldexp(1.0, math.frexp(value)[1] - 24)


def report_correct(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    rows = []
    for name, losses in found.items():
        mark, case = name.split(" ")[:2]
        reference = found[f"{mark} autocast"]
        if isinstance(losses, str):
            rows.append([name, "failed: " + losses[:120], "-", "-"])
            continue
        pairs = list(zip(losses, reference, strict=True))
        distance = max(abs(a - b) for a, b in pairs)
        in_steps = max(abs(a - b) / step_of_fp32(b) for a, b in pairs)
        said = "-"
        if case in STAGES:
            fell = losses[-1] < losses[0]
            exact = mark.startswith("fp32")
            said = common.verdict(in_steps, LOSS_STEPS) if exact else ("met" if fell else "missed")
        rows.append([name, f"{losses[0]:.4f} -> {losses[-1]:.4f}", f"{distance:.1e}", said])
        record = {"part": "correct", "case": name, "losses": losses, "distance": distance}
        common.append_json(args.json, {"benchmark": "gpu", **record})
    target = f"target (fp32: <= {LOSS_STEPS} fp32 numbers apart; bf16: falls)"
    print("\ncorrect: losses against plain PyTorch's, tiny model, world size 1")
    common.print_table(["case", "loss", "distance", target], rows)


# -- memory and speed
def run_part(args: argparse.Namespace, part: str, case: str) -> dict[str, Any] | None:
    """Run one case of one part; print why when it fails."""
    config = {**vars(args), "part": part, "case": case}
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if part == "correct" else {}
    try:
        return common.run_processes(Path(__file__), config, 1, env)[0]
    except common.CaseFailed as failure:
        print(f"{part} {case}: {failure}", flush=True)
        return None


def merge(results: Sequence[Mapping[str, Any]], micro_batch: str) -> dict[str, Any]:
    """Reduce a case's rounds to one row: medians of time, maxima of memory."""
    each = [r["found"][micro_batch] for r in results]
    step_s = common.median([s for e in each for s in e["step_s"]])
    peaks = ("built_peak_bytes", "peak_bytes", "reserved_bytes", "between_bytes")
    return {
        "micro_batch": micro_batch,
        "rounds": len(each),
        "step_s": step_s,
        "step_range_s": [min(min(e["step_s"]) for e in each), max(max(e["step_s"]) for e in each)],
        "cpu_s": common.median([s for e in each for s in e["cpu_s"]]),
        "tokens_per_s": each[0]["tokens"] / step_s,
        **{key: max(e[key] for e in each) for key in peaks},
        "losses": each[0]["losses"],
    }


def report(
    args: argparse.Namespace, part: str, results: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Print one table per micro-batch size, with the ratio to the peers."""
    if not any(results.values()):
        return
    about = next(r[0] for r in results.values() if r)
    for micro_batch in about["found"]:
        rows = {case: merge(r, micro_batch) for case, r in results.items() if r}
        where = f"{args.ranks} fake ranks" if part == "memory" else "world size 1"
        print(
            f"\n{part}: {where}, micro-batch {micro_batch}, {about['device']}, "
            f"torch {about['torch']}, Shardwise layout {args.layout}"
        )
        table = []
        peers = [peer for peer in ("autocast", "ddp", "fsdp2") if peer in rows]
        for case, row in rows.items():
            fast, slow = row["step_range_s"]
            table.append(
                [
                    case,
                    str(row["rounds"]),
                    f"{row['tokens_per_s']:,.0f}",
                    f"{row['step_s'] * 1e3:.1f} ({fast * 1e3:.1f}-{slow * 1e3:.1f})",
                    f"{row['cpu_s'] * 1e3:.1f}",
                    *(_gib(row[k]) for k in ("built_peak_bytes", "peak_bytes", "reserved_bytes")),
                    _gib(row["between_bytes"]),
                    *(_against(rows, case, peer, part) for peer in peers),
                ]
            )
            common.append_json(args.json, {"benchmark": "gpu", "part": part, "case": case, **row})
        ratio = "peak" if part == "memory" else "tokens/s"
        header = "case|rounds|tokens/s|step ms (range)|CPU ms|peak build|peak|reserved|between"
        common.print_table([*header.split("|"), *(f"{ratio} x {p}" for p in peers)], table)
        _print_targets(rows, part)


def _against(rows: Mapping[str, Mapping[str, Any]], case: str, peer: str, part: str) -> str:
    key = "peak_bytes" if part == "memory" else "tokens_per_s"
    if peer not in rows or not rows[peer][key]:
        return "-"
    return f"{rows[case][key] / rows[peer][key]:.3f}"


def _print_targets(rows: Mapping[str, Mapping[str, Any]], part: str) -> None:
    for case in (c for c in STAGES if c in rows):
        if part == "memory":
            peer = PEER[case]
            if peer in rows and rows[peer]["peak_bytes"]:
                ratio = rows[case]["peak_bytes"] / rows[peer]["peak_bytes"]
                print(f"{case}: peak {ratio:.3f} x {peer}: {common.verdict(ratio, 1.0)}")
            continue
        for peer, limit in (("autocast", 0.98), ("fsdp2", 1.0)):
            if peer in rows:
                ratio = rows[case]["tokens_per_s"] / rows[peer]["tokens_per_s"]
                said = common.verdict(ratio, limit, at_most=False)
                print(f"{case}: {ratio:.3f} x {peer}'s tokens/s, target >= {limit}: {said}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f}"


def run_rounds(args: argparse.Namespace, part: str, deadline: float) -> None:
    """Run the cases of a part turn by turn until the rounds or the minutes are over."""
    cases = args.cases or (MEMORY_CASES if part == "memory" else SPEED_CASES)
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    failed: set[str] = set()
    for number in range(1 if part == "memory" else args.rounds):
        for case in cases:
            if case in failed or time.monotonic() > deadline:
                continue
            result = run_part(args, part, case)
            if result is None:
                failed.add(case)
                continue
            results[case].append(result)
            print(f"{part} round {number + 1} {case}", flush=True)
    report(args, part, results)


def main() -> None:
    args = parse()
    deadline = time.monotonic() + 60 * args.minutes
    if "correct" in args.parts:
        checked = run_part(args, "correct", "all")
        if checked is not None:
            report_correct(args, checked["found"])
    for part in ("memory", "speed"):
        if part in args.parts:
            run_rounds(args, part, deadline)


if __name__ == "__main__":
    common.main(work, main)
