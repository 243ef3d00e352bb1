"""Record who holds each element of one parameter in a step, at each stage.

Run `python docs/record_owner.py`; then `make pages` writes the page on owners from what was
recorded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.engine.api import engine_of
from shardwise.svg import colour_of

RECORDED = Path(__file__).parent / "site" / "data" / "owner.json"
KINDS = {
    "slice that the rank owns": "param_shards",
    "full copy": "param_full",
    "stale copy": "outside",
    "gradient of its own batch": "grad_full",
    "mean gradient": "grad_shards",
}
RANKS, SHAPE, OURS = 4, (8, 3), "1"
# The third step is recorded, of two micro-batches: the engine knows the order of the units, and
# Adam's averages exist.
WARM_STEPS = 2


class Watch(torch.autograd.Function):
    """Pass a weight on, and show its gradient to a function while the layer's backward runs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, look: Any) -> Tensor:
        ctx.look = look
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.look("its layer's backward", grad)
        return grad, None


class Layer(nn.Module):
    """A product with a weight, which calls ``look`` in forward and in backward."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.look: Any = lambda moment, grad=None: None

    def forward(self, x: Tensor) -> Tensor:
        self.look("its layer's forward")
        return x @ Watch.apply(self.weight, self.look).t()  # type: ignore[no-untyped-call]


class Recorder:
    """What this rank holds of one parameter, moment by moment."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.unit = next(unit for unit in engine_of(model).units if unit.name == OURS)
        self.optimizer, self.moments = optimizer, list[dict[str, Any]]()

    def look(self, moment: str, grad: Tensor | None = None) -> None:
        """Record a moment; ``grad`` is a full gradient that autograd has just made."""
        param, storage = self.unit.params[0], self.unit.storages[0]
        cut, held = param.cut, [None] * SHAPE[0] * SHAPE[1]
        begin, end = (cut.lo, cut.hi) if storage.shards_state else (0, len(held))
        is_full = storage.copy.is_allocated
        if is_full:
            held = rounded(storage.view(0))
        held[begin:end] = rounded(storage.local(0, (end - begin,)))
        kind, state = "none", self.unit.grads.state.name
        if grad is None and state in ("REDUCING", "REDUCED"):  # a read waits for the reduction
            kind, grad = "mean", param.sharded.grad._local_tensor
        elif grad is not None or state == "PARTIAL":
            kind, kept = "own", param.gradient.partial
            grad = (
                param.leaf.grad if grad is None and kept is None else grad if kept is None else kept
            )
        average = self.optimizer.state[param.sharded]["exp_avg"]
        self.moments.append(
            {
                "moment": moment,
                "owns": [begin, end],
                "full": "no" if not is_full else "fresh" if storage.is_fresh else "stale",
                "values": held,
                "grad": kind,
                "grads": [] if grad is None else rounded(grad),
                "adam": average._local_tensor.numel(),
            }
        )


def rounded(tensor: Tensor) -> list[Any]:
    return [round(value, 3) for value in tensor.detach().flatten().tolist()]


def train(stage: int, output: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Layer(SHAPE[1], 3), Layer(*SHAPE), Layer(1, SHAPE[0]))
    shardwise.shard(model, stage=stage, units=list(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(WARM_STEPS):
        forward_and_backward(model, is_last=True)
        optimizer.step()
        optimizer.zero_grad()
    recorder = Recorder(model, optimizer)
    recorder.look("at rest")
    model[1].look = recorder.look
    model[2].look = lambda moment, grad=None: (
        recorder.look("the next layer's forward") if grad is None else None
    )
    forward_and_backward(model, is_last=False)
    recorder.look("between two micro-batches")
    model[1].look = model[2].look = lambda moment, grad=None: None
    forward_and_backward(model, is_last=True)
    recorder.look("after the last backward")
    optimizer.step()
    recorder.look("after the optimizer's step")
    optimizer.zero_grad()
    recorder.look("at rest, without gradients")
    Path(output, f"{dist.get_rank()}.json").write_text(json.dumps(recorder.moments))
    dist.destroy_process_group()


def forward_and_backward(model: nn.Module, is_last: bool) -> None:
    """Run a micro-batch; at stages 0 and 1 only the last one of a step is reduced."""
    with shardwise.accumulate(model, last=is_last):
        model(torch.randn(16, SHAPE[1])).square().mean().backward()


def record(stage: int) -> list[dict[str, Any]]:
    """Train at a stage; return what each rank holds, by moment."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__)
        command = [sys.executable, "-m", *launch, "--stage", str(stage), "--output", folder]
        subprocess.run(command, check=True)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    moments = []
    for of_ranks in zip(*ranks, strict=True):
        (name,) = {each.pop("moment") for each in of_ranks}
        moments.append({"moment": name, "ranks": of_ranks})
    return moments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--output")
    asked = parser.parse_args()
    if asked.output:
        return train(asked.stage, asked.output)
    stages = {str(stage): record(stage) for stage in range(4)}
    write(stages)


def write(stages: dict[str, list[dict[str, Any]]]) -> None:
    colours = {word: colour_of(kind) for word, kind in KINDS.items()}
    found = {"shape": SHAPE, "kinds": colours, "stages": stages}
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace("{", "\n{") + "\n")


if __name__ == "__main__":
    main()
