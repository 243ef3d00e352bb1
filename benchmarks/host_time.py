"""Count the host's CPU time of the engine itself: hooks, states, optimizer and clipping.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --profile       # cProfile's top 25 of the stage-3 loop

Targets: forward and backward of stage 3 cost at most half of FSDP2's time per unit above the plain
module, and optimizer steps and clipping at most 1.3 x the same on plain tensors of the local
shard's sizes.

How. One process that believes it is rank 0 of 8: torch's fake process group answers every
collective at once. It copies what a gather brings, tensor by tensor, which no real group does on
the host; so the same calls are made again by themselves, and their time is a column of its own that
"engine" leaves out. 32 blocks of 9 tiny parameters, one thread, CPU milliseconds (not wall),
medians, cases turn by turn. The transport of the fake group (coalesced collectives) is that of
NCCL. Optimizer and clipping are measured without a
forward pass, with gradients that are there already, on the tiny parameters and on those of four
decoder blocks of dim 512.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import _common as common

common.find_shardwise()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

NUM_RANKS = 8
CASES = ("plain", "fsdp2", "stage0", "stage1", "stage2", "stage3")
UNIT_LIMIT = 0.5  # of FSDP2's
STEP_LIMIT = 1.3
COLLECTIVES = (  # all that the cases call, under the names of several versions of torch
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base"),
)
_WIDTH = 16


class TinyBlock(nn.Module):
    """Nine parameters that cost next to nothing to compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(_WIDTH, _WIDTH) / _WIDTH for _ in range(5))
        self.biases = nn.ParameterList(torch.zeros(_WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=False):
            x = torch.addmm(bias, x, weight)
        return x @ self.weights[4]


class TinyModel(nn.Module):
    """A chain of blocks; every block is a unit."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class RealisticBlock(nn.Module):
    """The parameters of one decoder block; its forward pass is not used."""

    def __init__(self, dim: int = 512, hidden: int = 1376) -> None:
        super().__init__()
        shapes = [(dim, dim)] * 4 + [(hidden, dim)] * 2 + [(dim, hidden), (dim,), (dim,)]
        self.weights = nn.ParameterList(torch.randn(shape) * 0.02 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return x


class RealisticModel(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RealisticBlock() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30, help="calls per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", choices=["rows", "flat"], default="rows")
    parser.add_argument("--profile", action="store_true", help="profile stage 3 and stop")
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per case")
    return parser.parse_args()


def apply_case(model: Any, case: str, layout: str) -> nn.Module:
    """Shard a model the way the case says."""
    torch.manual_seed(0)
    if case == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif case != "plain":
        import shardwise

        shardwise.shard(model, stage=int(case.removeprefix("stage")), layout=layout)
    found: nn.Module = model
    return found


# -- forward and backward
def forward_backward(model: nn.Module) -> Callable[[], None]:
    """Return one micro-batch without an optimizer; a step of the shards is marked as SGD would."""
    x = torch.randn(2, _WIDTH)
    locals_ = [getattr(p, "_local_tensor", p) for p in model.parameters()]

    def run() -> None:
        model(x).sum().backward()
        for param in model.parameters():
            param.grad = None
        torch.autograd.graph.increment_version(locals_)  # full copies are stale from here on

    return run


def calls_of_group(run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes the calls of the process group in ``run``, and nothing else."""
    calls: list[Callable[[], object]] = []

    def listen(call: Callable[..., object]) -> Callable[..., object]:
        def listening(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> object:
            again = tree_map_only(Tensor, torch.empty_like, args)
            calls.append(partial(call, group, *again, **kwargs))
            return call(group, *args, **kwargs)

        return listening

    ours = vars(dist.ProcessGroup)
    found = {name: ours[name] for name in COLLECTIVES if name in ours}
    for name in found:
        setattr(dist.ProcessGroup, name, listen(getattr(dist.ProcessGroup, name)))
    try:
        run()
    finally:
        for name, before in found.items():
            setattr(dist.ProcessGroup, name, before)

    def replay() -> None:
        for call in calls:
            call()

    return replay


def measure_units(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure forward + backward of every case, turn by turn, and its group's calls."""
    loops = {c: forward_backward(apply_case(TinyModel(args.blocks), c, args.layout)) for c in CASES}
    groups = {case: calls_of_group(run) for case, run in loops.items()}
    times: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for case, run in loops.items():
            gc.collect()
            took = common.cpu_ms(run, args.repeats)
            times[case].append((took, common.cpu_ms(groups[case], args.repeats)))
    units = args.blocks + 1
    plain = common.median([took for took, _ in times["plain"]])
    found = {}
    for case, each in times.items():
        took, of_group = (common.median([*column]) for column in zip(*each, strict=True))
        engine = (took - plain - of_group) / units
        found[case] = {"cpu_ms": took, "group_ms": of_group / units, "engine_ms": engine}
    return found


# -- clipping and optimizer steps
def plain_twins(model: nn.Module) -> list[nn.Parameter]:
    """Return plain parameters of the local shards' sizes, with gradients."""
    twins = []
    for param in model.parameters():
        local = getattr(param, "_local_tensor", param).detach()
        twin = nn.Parameter(local.clone())
        twin.grad = torch.randn_like(local)
        twins.append(twin)
    return twins


def give_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Set a gradient on every sharded parameter, without a backward pass."""
    params = list(model.parameters())
    for param in params:
        grad = torch.zeros_like(param)
        getattr(grad, "_local_tensor", grad).normal_()
        param.grad = grad
    return params


def optimizer_calls(params: list[nn.Parameter]) -> dict[str, Callable[[], object]]:
    fused = torch.optim.AdamW(params, lr=1e-4, fused=True)
    foreach = torch.optim.AdamW(params, lr=1e-4, foreach=True)
    return {
        "clip": lambda: nn.utils.clip_grad_norm_(params, 1.0),
        "adamw fused": fused.step,
        "adamw foreach": foreach.step,
    }


def measure_optimizer(args: argparse.Namespace, which: str) -> dict[str, dict[str, Any]]:
    """Measure clipping and stepping, sharded and plain, turn by turn."""
    found: dict[str, dict[str, Any]] = {}
    for case in CASES[1:]:
        model = TinyModel(args.blocks) if which == "tiny" else RealisticModel()
        sharded = apply_case(model, case, args.layout)
        ours = optimizer_calls(give_gradients(sharded))
        plain = optimizer_calls(plain_twins(sharded))
        repeats = args.repeats if which == "tiny" else max(args.repeats // 3, 3)
        for name in ours:
            pairs = []
            for _ in range(args.rounds):
                theirs = common.cpu_ms(plain[name], repeats)
                pairs.append((common.cpu_ms(ours[name], repeats), theirs))
            found.setdefault(case, {})[name] = {
                "cpu_ms": common.median([a for a, _ in pairs]),
                "plain_cpu_ms": common.median([b for _, b in pairs]),
                "ratio": common.median([a / b for a, b in pairs]),
            }
    return found


# -- reports
def profile(args: argparse.Namespace) -> None:
    model = apply_case(TinyModel(args.blocks), "stage3", args.layout)
    run = forward_backward(model)
    for _ in range(3):
        run()
    profiler = cProfile.Profile(timer=time.process_time)
    profiler.enable()
    for _ in range(args.repeats):
        run()
    profiler.disable()
    steps, units = args.repeats, args.blocks + 1
    print(f"stage 3, {steps} steps of {units} units; the profiler itself is included")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def print_units(found: Mapping[str, Mapping[str, float]], blocks: int) -> None:
    rows = []
    for case, row in found.items():
        ratio = row["engine_ms"] / found["fsdp2"]["engine_ms"]
        said = common.verdict(ratio, UNIT_LIMIT) if case == "stage3" else "-"
        times = [f"{row['engine_ms']:.3f}", f"{row['group_ms']:.3f}", f"{ratio:.2f}"]
        rows.append([case, f"{row['cpu_ms']:.2f}", *times, said])
    print(f"\nforward + backward, {blocks} blocks x 9 parameters, {NUM_RANKS} fake ranks")
    target = f"target <= {UNIT_LIMIT}"
    heads = ["case", "CPU ms", "engine, ms a unit", "fake group, ms a unit", "engine / FSDP2"]
    common.print_table([*heads, target], rows)


def print_optimizer(found: Mapping[str, Mapping[str, Any]], which: str) -> None:
    rows = []
    for case, calls in found.items():
        cells = [
            f"{c['cpu_ms']:.2f} / {c['plain_cpu_ms']:.2f} = {c['ratio']:.2f}"
            for c in calls.values()
        ]
        worst = max(c["ratio"] for c in calls.values())
        said = common.verdict(worst, STEP_LIMIT) if case.startswith("stage") else "-"
        rows.append([case, *cells, said])
    names = [f"{name}: ms / plain" for name in next(iter(found.values()))]
    print(f"\noptimizer and clipping, {which} parameters, CPU ms sharded / plain = ratio")
    common.print_table(["case", *names, f"target <= {STEP_LIMIT}"], rows)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    if args.profile:
        profile(args)
        return
    units = measure_units(args)
    print_units(units, args.blocks)
    record = {"benchmark": "host_time", "layout": args.layout, "blocks": args.blocks}
    for case, row in units.items():
        common.append_json(args.json, {**record, "what": "units", "case": case, **row})
    for which in ("tiny", "realistic"):
        found = measure_optimizer(args, which)
        print_optimizer(found, which)
        for case, calls in found.items():
            common.append_json(args.json, {**record, "what": which, "case": case, **calls})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
