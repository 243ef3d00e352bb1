"""Measure offload on one CUDA GPU, beside FSDP2's and DeepSpeed's, and the largest that trains.

    python benchmarks/gpu_offload.py --minutes 8 --json out.json
    python benchmarks/gpu_offload.py --parts speed --sizes 7b --cases host,fsdp2
    python benchmarks/gpu_offload.py --tiny             # tiny models; also without a GPU

Targets: tokens/s of our fastest case at least 2 x the faster of FSDP2's and DeepSpeed's offload,
and at least 0.6 x those without offload, at 8,192 tokens a step with clipping; losses right.

How. Llama shapes, checkpointed blocks, bf16 with fp32 masters, AdamW, clip_grad_norm_ 1.0, world
size 1, each case in a process of its own, with all of the host's cores. Needs torch and this
package; DeepSpeed's case runs where it is installed. A size whose state does not fit this host's
memory is left out, and said so.

correct  A tiny fp32 model: losses of every kind of offload against those without. A step on the
         host is another kernel than one on the device: each weight may be off by one rounding a
         step, which in the loss is at most so many fp32 numbers as `benchmarks/gpu.py` derives.
link     GB/s of copies of page-locked memory, each way and both, and what the host's cores do.
phases   The milliseconds of a step's parts, with the device awaited after each, and of a whole step
         without; a trace of two steps into --traces.
speed    tokens/s and peaks of each case and size.
largest  The most layers of Llama-2-7B's shape that are planned to fit, with state on the host and
         stepped on the device, and without offload: planned peak, and that of a run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import _common as common
import gpu

common.find_shardwise()

CASES = ("none", "host", "host-copy", "device-step", "device-step-8bit", "inputs", "fsdp2")
SIZES = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "7b": "llama-2-7b", "13b": "llama-2-13b"}
PEERS = ("fsdp2", "deepspeed")
STATE_BYTES = 16  # of a parameter: master, gradient, two moments
_GIB = 2**30
_SEQ = 2048


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8, help="no new case starts after this")
    parser.add_argument("--parts", default="correct,link,phases,speed,largest")
    parser.add_argument("--sizes", default="1b,3b,7b,13b")
    parser.add_argument("--cases", default=",".join((*CASES, "deepspeed")))
    parser.add_argument("--windows", type=int, default=4, help=f"of {_SEQ} tokens, in a step")
    parser.add_argument("--warmup", type=int, default=2, help="steps")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--traces", metavar="DIR", help="Chrome traces of the phases' cases")
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per row")
    args = parser.parse_args()
    for name in ("parts", "sizes", "cases"):
        setattr(args, name, getattr(args, name).split(","))
    args.sizes = ["tiny"] if args.tiny else args.sizes
    return args


def shape_of(size: str, layers: int | None = None) -> tuple[Any, int]:
    """Return a decoder's shape and the tokens of a window."""
    from shardwise.plan.model.presets import find_preset
    from shardwise.plan.model.shapes import llama_shape

    if size == "tiny":
        shape, seq = llama_shape(4, 64, 4, 2, 160, 256), 32
    else:
        shape, seq = find_preset(SIZES[size]).shape, _SEQ
    return (shape if layers is None else replace(shape, layers=layers)), seq


def offload_of(case: str) -> Any:
    """Return what a case offloads."""
    from shardwise import Offload

    return {
        "none": None,
        "host": "cpu",
        "host-copy": Offload(optimizer="cpu"),
        "device-step": Offload(optimizer="cpu", step_on="device"),
        "device-step-8bit": Offload(optimizer="cpu", step_on="device"),
        "inputs": Offload(optimizer="cpu", step_on="device", activations="cpu"),
        "largest": Offload("cpu", "cpu", "cpu", step_on="device", activations="cpu"),
    }[case]


def build(case: str, shape: Any, precision: str) -> gpu.Step:
    """Build a case; return a step (ids, targets) -> loss."""
    import torch

    import shardwise
    from shardwise.plan.model.decoder import PlainDecoder

    torch.manual_seed(0)
    with torch.device(gpu.device_here()):
        model: Any = PlainDecoder(shape, case != "fsdp2")
    if case == "deepspeed":
        return _build_deepspeed(model)
    if case == "fsdp2":
        from torch.distributed.fsdp import CPUOffloadPolicy

        away = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        gpu.apply_fsdp2(model, precision, True, offload_policy=away)
    else:
        shardwise.shard(model, stage=3, precision=precision, offload=offload_of(case))
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    if case == "device-step-8bit":
        optimizer: Any = shardwise.optim.AdamW(model.parameters(), moments="8bit", **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    return gpu.make_step(model, optimizer)


def _build_deepspeed(model: Any) -> gpu.Step:
    """Build ZeRO-3 with optimizer and parameters in host memory, as its documentation says."""
    import deepspeed  # type: ignore[import-not-found]

    away = {"device": "cpu", "pin_memory": True}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "offload_optimizer": away, "offload_param": away},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        },
    )

    def step(ids: Any, targets: Any, mark: Callable[[], None] = lambda: None) -> Any:
        mark()
        loss = engine(ids, targets)
        mark()
        engine.backward(loss)
        mark()  # it clips in its step
        mark()
        engine.step()
        mark()
        return loss.detach()

    return step


# -- one case in one process
def work(config: Mapping[str, Any]) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with common.joined_ranks(config, backend, threads=_num_cores()):
        found = WORK[config["part"]](config)
    gpu.write_found(config, found)


def check_losses(config: Mapping[str, Any], num_steps: int = 6) -> dict[str, Any]:
    """Train a tiny model in fp32 with each kind of offload; return the losses."""
    gpu.be_exact()
    shape, seq = shape_of("tiny")
    batches = [gpu.windows_of(shape, seq, 2, seed) for seed in (1, 2)]
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            step = build(case, shape, "fp32")
            found[case] = [float(step(*batches[i % 2])) for i in range(num_steps)]
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"
    return found


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Build one case, step it; return times and peaks."""
    from shardwise.device import peak_memory_bytes, reset_peak_memory

    shape, seq = shape_of(config["size"], config["layers"])
    begin = time.perf_counter()
    step = build(config["case"], shape, "bf16")
    built_s, device = time.perf_counter() - begin, gpu.device_here()
    batch = gpu.windows_of(shape, seq, config["windows"], 1)
    losses = [step(*batch) for _ in range(config["warmup"])]
    gpu.synchronize()
    reset_peak_memory(device)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    losses += [step(*batch) for _ in range(config["steps"])]
    gpu.synchronize()
    step_s = (time.perf_counter() - begin) / config["steps"]
    return {
        "step_s": step_s,
        "cpu_s": (time.process_time() - cpu_begin) / config["steps"],
        "tokens_per_s": batch[0].numel() / step_s,
        "built_s": built_s,
        "peak_bytes": peak_memory_bytes(device),
        "host_bytes": common.resident_bytes(),
        "losses": [float(x) for x in losses],
    }


def seconds_of(work: Callable[[], Any], times: int = 3) -> float:
    """Return the seconds of one call, after a warm-up."""
    work()
    gpu.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    gpu.synchronize()
    return (time.perf_counter() - begin) / times


def measure_link(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return GB/s of the link, by the way memory is page-locked, and of the host's cores."""
    import torch

    from shardwise.device import time_of

    size, device = (1 << 22) if config["tiny"] else (1 << 30), gpu.device_here()
    up, down = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    other = time_of(device).new_stream()
    found: dict[str, Any] = {}
    for name, make in (
        ("allocator", lambda: time_of(device).host_memory(size, torch.uint8)),
        ("registered", lambda: time_of(device).locked_memory(size)),
    ):
        source, target = make(), make()

        def copy(pieces: int, rises: int, falls: int, a: Any = source, b: Any = target) -> None:
            for number in range(pieces):
                part = slice(number * size // pieces, (number + 1) * size // pieces)
                if falls:
                    with other.use():
                        b[part].copy_(down[part], non_blocking=True)
                if rises:
                    up[part].copy_(a[part], non_blocking=True)

        ways = {"up": (1, 1, 0), "down": (1, 0, 1), "both": (1, 1, 1), "both, in 16": (16, 1, 1)}
        for way, how in ways.items():
            found[f"{name} {way}"] = size / 1e9 / seconds_of(partial(copy, *how))
    values = torch.ones(size // 4)
    found["host norm"] = size / 1e9 / seconds_of(lambda: torch.linalg.vector_norm(values))
    found["host scale, read and written"] = 2 * size / 1e9 / seconds_of(lambda: values.mul_(1.0))
    param = torch.nn.Parameter(torch.zeros(size // 4))
    param.grad = values
    step = torch.optim.AdamW([param], fused=True).step
    found["host AdamW, G elements/s"] = param.numel() / 1e9 / seconds_of(step)
    return found


def measure_phases(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of a step's parts, and of whole steps."""
    import torch

    shape, seq = shape_of(config["size"])
    marks: list[float] = []

    def mark() -> None:
        gpu.synchronize()
        marks.append(time.perf_counter())

    step = build(config["case"], shape, "bf16")
    batch = gpu.windows_of(shape, seq, config["windows"], 1)
    for _ in range(3):
        marks.clear()
        step(*batch, mark)
    ends = zip(gpu.PHASES, pairwise(marks), strict=True)
    found: dict[str, Any] = {name: 1e3 * (end - begin) for name, (begin, end) in ends}
    found["whole step"] = 1e3 * seconds_of(lambda: step(*batch))
    if config["traces"]:
        with torch.profiler.profile() as profile:
            seconds_of(lambda: step(*batch), 1)
        profile.export_chrome_trace(str(Path(config["traces"], f"{config['case']}.json.gz")))
    return found


WORK = {
    "correct": check_losses,
    "link": measure_link,
    "phases": measure_phases,
    "speed": measure,
    "largest": measure,
}


# -- the parts
def run_case(
    args: argparse.Namespace, part: str, case: str, size: str, layers: int | None = None
) -> dict[str, Any] | None:
    """Run one case; print why when it fails."""
    config = {**vars(args), "part": part, "case": case, "size": size, "layers": layers}
    env = {"OMP_NUM_THREADS": str(_num_cores())}
    if part == "correct":
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    try:
        result = common.run_processes(Path(__file__), config, 1, env)[0]
    except common.CaseFailed as failure:
        print(f"{part} {size} {case}: {failure}", flush=True)
        return None
    if part in ("speed", "largest"):
        record = {"benchmark": "gpu_offload", "part": part, "size": size, "case": case}
        common.append_json(args.json, {**record, "layers": layers, **result["found"]})
        print(f"{part} {size} {case}: {result['found']['tokens_per_s']:,.0f} tokens/s", flush=True)
    return result


def report_correct(found: Mapping[str, Any]) -> None:
    rows = []
    for case, losses in found.items():
        if isinstance(losses, str):
            rows.append([case, "failed: " + losses[:120], "-"])
            continue
        pairs = list(zip(losses, found["none"], strict=True))
        apart = max(abs(a - b) / gpu.step_of_fp32(b) for a, b in pairs)
        is_exact = not case.endswith("8bit")
        said = common.verdict(apart, gpu.LOSS_STEPS) if is_exact else f"{apart:.0f} (other moments)"
        rows.append([case, f"{losses[0]:.4f} -> {losses[-1]:.4f}", said])
    print("\ncorrect: losses against those without offload, tiny fp32 model")
    common.print_table(["case", "loss", f"target: <= {gpu.LOSS_STEPS} fp32 numbers apart"], rows)


def run_phases(args: argparse.Namespace, deadline: float) -> None:
    size, rows = args.sizes[0], []
    for case in args.cases:
        result = run_case(args, "phases", case, size) if time.monotonic() < deadline else None
        if result:
            record = {"benchmark": "gpu_offload", "part": "phases", "size": size, "case": case}
            common.append_json(args.json, {**record, **result["found"]})
            rows.append([case, *(f"{ms:.0f}" for ms in result["found"].values())])
    print(f"\nphases: milliseconds, {size}; the device is awaited after each, not in a whole step")
    common.print_table(["case", *gpu.PHASES, "whole step"], rows)


def run_link(args: argparse.Namespace) -> None:
    result = run_case(args, "link", "all", args.sizes[0])
    if result:
        print("\nlink and host: GB/s, of each way where both are used")
        common.print_table(["what", "rate"], [[k, f"{v:.2f}"] for k, v in result["found"].items()])
        common.append_json(args.json, {"benchmark": "gpu_offload", **result["found"]})


def run_speed(args: argparse.Namespace, deadline: float) -> None:
    for size in args.sizes:
        shape, seq = shape_of(size)
        if not _fits_host(size, shape.num_params):
            continue
        rows: dict[str, dict[str, Any]] = {}
        for case in args.cases:
            if time.monotonic() < deadline:
                result = run_case(args, "speed", case, size)
                if result is not None:
                    rows[case] = result["found"]
        print(f"\nspeed: {size}, {args.windows * seq:,} tokens a step, world size 1")
        table = [
            [
                case,
                f"{row['tokens_per_s']:,.0f}",
                f"{row['step_s'] * 1e3:.0f}",
                f"{row['cpu_s'] * 1e3:.0f}",
                f"{row['peak_bytes'] / _GIB:.2f}",
                f"{row['host_bytes'] / _GIB:.1f}",
                f"{row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}",
            ]
            for case, row in rows.items()
        ]
        header = "case|tokens/s|step ms|CPU ms|peak GiB|host GiB|loss"
        common.print_table(header.split("|"), table)
        _print_targets(rows)


def _fits_host(size: str, num_params: int) -> bool:
    from shardwise.host import available_host_bytes

    needed, free = STATE_BYTES * num_params, available_host_bytes()
    if needed > 0.95 * free:
        print(f"speed {size}: {needed / _GIB:.0f} GiB of state, {free / _GIB:.0f} GiB of host free")
    return needed <= 0.95 * free


def _print_targets(rows: Mapping[str, Mapping[str, Any]]) -> None:
    speed = {case: row["tokens_per_s"] for case, row in rows.items()}
    ours = {case: s for case, s in speed.items() if case not in ("none", *PEERS)}
    peers = [speed[peer] for peer in PEERS if peer in speed]
    if not ours:
        return
    best = max(ours, key=lambda case: ours[case])
    for name, other, limit in (
        ("peers", max(peers, default=0), 2.0),
        ("none", speed.get("none"), 0.6),
    ):
        if other:
            said = common.verdict(ours[best] / other, limit, at_most=False)
            print(f"{best}: {ours[best] / other:.2f} x {name}, target >= {limit}: {said}")


def run_largest(args: argparse.Namespace) -> None:
    """Plan the most layers that fit, with and without offload; run what is planned."""
    from shardwise.host import available_host_bytes

    size = "tiny" if args.tiny else "7b"
    rows = []
    for case in ("none", "largest"):
        layers, planned = 0, 0
        for each in range(1, 8 if args.tiny else 120):
            peak, num_params = _planned_peak(case, size, each, args.windows)
            on_host = 0 if case == "none" else STATE_BYTES * num_params
            if peak > 0.95 * _capacity_bytes() or on_host > 0.85 * available_host_bytes():
                break
            layers, planned = each, peak
        result = run_case(args, "largest", case, size, layers) if layers else None
        params = shape_of(size, layers)[0].num_params / 1e9 if layers else 0
        row = [case, str(layers), f"{params:.2f} B", f"{planned / _GIB:.2f}", "-", "-"]
        if result:
            found = result["found"]
            row[4:] = [f"{found['peak_bytes'] / _GIB:.2f}", f"{found['tokens_per_s']:,.0f}"]
        rows.append(row)
    print("\nlargest: layers of one shape that are planned to fit, and then run")
    header = ["case", "layers", "params", "planned GiB", "peak GiB", "tokens/s"]
    common.print_table(header, rows)


def _planned_peak(case: str, size: str, layers: int, windows: int) -> tuple[int, int]:
    from shardwise.plan.candidate import Candidate, Offload
    from shardwise.plan.machine.hardware import make_cluster
    from shardwise.plan.model.shaped import ShapedModel
    from shardwise.plan.planning import plan

    shape, seq = shape_of(size, layers)
    away = Offload("cpu", "cpu", "cpu", activations="cpu", step_on="device")
    candidate = Candidate(
        stage=3,
        micro_batch=windows,
        activation_checkpointing="full",
        offload=Offload() if case == "none" else away,
    )
    model = ShapedModel(size, shape, seq)
    found = plan(model, make_cluster("h100-sxm", 1), candidate)
    return found.played.peak.ledger.total, shape.num_params


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _capacity_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        return 1 << 30
    return torch.cuda.get_device_properties(0).total_memory


def main() -> None:
    args = parse()
    deadline = time.monotonic() + 60 * args.minutes
    if "correct" in args.parts:
        checked = run_case(args, "correct", "all", "tiny")
        if checked is not None:
            report_correct(checked["found"])
    if "link" in args.parts:
        run_link(args)
    if "phases" in args.parts:
        run_phases(args, deadline)
    if "speed" in args.parts:
        run_speed(args, deadline)
    if "largest" in args.parts and time.monotonic() < deadline:
        run_largest(args)


if __name__ == "__main__":
    common.main(work, main)
