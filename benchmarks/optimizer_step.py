"""Time AdamW's step against the bandwidth of memory: torch's implementations, and our own.

    python benchmarks/optimizer_step.py
    python benchmarks/optimizer_step.py --threads 1 --numel 67108864

Target: with parameters and moments in fp32, a gradient in fp32 or bf16, and where asked for a bf16
copy of the parameters written as well, 80 % or more of what a copy of memory reaches.

How. One process, plain tensors that are together far larger than its caches. GB/s are the bytes
that a step has to move, once each, over its wall time. Per element: 8 for the parameter, read and
written; 4 or 2 for the gradient; twice the bytes of both moments (8, 4, or 2 + 8 / block); 2 for a
bf16 copy. What an implementation moves beside that is its own affair, and lowers its figure. The
copy (as STREAM counts it: bytes read plus bytes written) runs in every round beside the steps, in
turn and in changing order; ratios are medians of those within one round. CPU seconds are those of
all threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from shardwise.optim import AdamW  # noqa: E402
from shardwise.optim.kinds import BLOCK  # noqa: E402
from shardwise.optim.moments import MOMENTS, kind_of  # noqa: E402
from shardwise.optim.slices import slice_of  # noqa: E402
from shardwise.optim.step import Settings, Work, update  # noqa: E402

TARGET = 0.8
_PARAM, _COPY = 8.0, 2.0
_MOMENTS = {"fp32": 16.0, "bf16": 8.0, "8bit": 4.0 + 16 / BLOCK}


@dataclass(frozen=True)
class Case:
    """One way to take a step; ``run`` takes it once."""

    name: str
    element_bytes: float
    run: Callable[[], object]
    has_target: bool = False


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of all parameters")
    parser.add_argument("--tensors", type=int, default=8, help="parameters that they are in")
    parser.add_argument("--threads", type=int, default=None, help="unset: torch's own number")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per case")
    return parser.parse_args()


def make_params(args: argparse.Namespace) -> list[nn.Parameter]:
    """Return parameters with gradients, in memory that is there."""
    numel = args.numel // args.tensors
    params = [nn.Parameter(torch.randn(numel)) for _ in range(args.tensors)]
    for param in params:
        param.grad = torch.randn(numel) / 100
    return params


def torch_case(args: argparse.Namespace, name: str, **how: Any) -> Case:
    optimizer = torch.optim.AdamW(make_params(args), **how)
    return Case(f"torch, {name}", _PARAM + 4 + _MOMENTS["fp32"], optimizer.step)


def own_case(args: argparse.Namespace, moments: str) -> Case:
    optimizer = AdamW(make_params(args), moments=moments)
    size = _PARAM + 4 + _MOMENTS[moments]
    return Case(f"shardwise, {moments} moments", size, optimizer.step, moments == "fp32")


def copying_case(args: argparse.Namespace, moments: str, grad_dtype: torch.dtype) -> Case:
    """Step with gradients of a dtype, and write a bf16 copy of the parameters as well."""
    kind, settings = kind_of(moments, BLOCK), Settings(1e-3, 0.9, 0.999, 1e-8, 0.01)
    work = []
    for param in make_params(args):
        grad: Tensor = param.grad.to(grad_dtype)  # type: ignore[union-attr]
        held = slice_of(param, grad)
        states = [kind.empty(held.place, held.param) for _ in MOMENTS]
        copy = torch.zeros(held.param.numel(), dtype=torch.bfloat16)
        work.append(Work(held, (states[0], states[1]), torch.tensor(1.0), copy))

    @torch.no_grad()
    def run() -> None:
        torch._foreach_add_([each.step for each in work], 1)
        update(work, kind, settings)

    dtype = "bf16" if grad_dtype == torch.bfloat16 else "fp32"
    size = _PARAM + grad_dtype.itemsize + _MOMENTS[moments] + _COPY
    name = f"shardwise, {moments} moments, {dtype} gradient, bf16 copy"
    return Case(name, size, run, moments == "fp32")


def copy_case(args: argparse.Namespace) -> Case:
    source, target = torch.randn(2 * args.numel), torch.zeros(2 * args.numel)
    return Case("copy", 16.0, lambda: target.copy_(source))


def make_cases(args: argparse.Namespace) -> list[Case]:
    return [
        copy_case(args),
        torch_case(args, "for-loop", foreach=False),
        torch_case(args, "foreach", foreach=True),
        torch_case(args, "fused", fused=True),
        *(own_case(args, moments) for moments in _MOMENTS),
        copying_case(args, "fp32", torch.float32),
        copying_case(args, "fp32", torch.bfloat16),
        copying_case(args, "bf16", torch.bfloat16),
    ]


def measure(cases: list[Case], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of every case in every round."""
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for number in range(-1, rounds):
        shift = number % len(cases)
        for case in cases[shift:] + cases[:shift]:
            wall, cpu = time.perf_counter(), time.process_time()
            case.run()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if number >= 0:  # the round before makes state, and touches memory
                times[case.name].append(took)
    return times


def main() -> None:
    args = parse()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    cases = make_cases(args)
    times = measure(cases, args.rounds)
    copies = [16.0 * args.numel / wall for wall, _ in times["copy"]]
    print(
        f"{args.numel:,} elements in {args.tensors} tensors, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, medians of {args.rounds} rounds"
    )
    print(f"{'':54}{'B/el':>6}{'GB/s':>7}{'of copy':>9}{'ns/el':>7}{'CPU ns':>8}  target")
    for case in cases:
        walls = [wall for wall, _ in times[case.name]]
        rates = [case.element_bytes * args.numel / wall for wall in walls]
        ratio = common.median([r / c for r, c in zip(rates, copies, strict=True)])
        nanoseconds = [
            1e9 * common.median(each) / args.numel for each in zip(*times[case.name], strict=True)
        ]
        said = common.verdict(ratio, TARGET, at_most=False) if case.has_target else ""
        row = {
            "case": case.name,
            "bytes_per_element": case.element_bytes,
            "gb_per_s": common.median(rates) / 1e9,
            "of_copy": ratio,
            "wall_ns": nanoseconds[0],
            "cpu_ns": nanoseconds[1],
            "threads": torch.get_num_threads(),
        }
        print(
            f"{case.name:54}{case.element_bytes:6.2f}{row['gb_per_s']:7.1f}{ratio:9.0%}"
            f"{nanoseconds[0]:7.2f}{nanoseconds[1]:8.2f}  {said}"
        )
        if args.json:
            with Path(args.json).open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
