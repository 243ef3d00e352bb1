"""The result of a run, against plain data parallelism and the plan's predictions."""

from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.quantities import format_bytes, format_count
from shardwise.tensor.elements import elements_of
from shardwise.train.config import TrainConfig

_SPEED_MEMORY = 0.9


@dataclass(frozen=True)
class StateBytes:
    """Training state of one rank after an optimizer step and before `zero_grad`.

    ``param_bytes`` has shards, and full copies that outlive the step (stages 0 to 2);
    ``replicated_bytes`` is what a rank would hold without sharding.
    """

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    replicated_bytes: int
    num_params: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all state on this rank."""
        return self.param_bytes + self.grad_bytes + self.optimizer_bytes


def count_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, outer_bytes: int = 0
) -> StateBytes:
    """Count the training state of this rank; call between `step` and `zero_grad`.

    ``outer_bytes``: those of the state of `LocalSteps`, beside the optimizer's state.
    """
    stats = shardwise.debug.stats(model)
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    params = list(model.parameters())
    return StateBytes(
        param_bytes=stats.param_shard_bytes + stats.param_full_bytes,
        grad_bytes=stats.grad_shard_bytes + stats.grad_partial_bytes,
        optimizer_bytes=outer_bytes
        + sum(
            (elements_of(state) if isinstance(state, DTensor) else state).nbytes for state in states
        ),
        replicated_bytes=2 * sum(p.nbytes for p in params) + sum(state.nbytes for state in states),
        num_params=sum(p.numel() for p in params),
    )


@dataclass
class RunResult:
    """The result of a run so far; losses are in nats per token."""

    unigram_entropy: float
    first_step: int = 1
    steps: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    tokens_per_s: float = 0.0
    state: StateBytes = field(default_factory=lambda: StateBytes(0, 0, 0, 0, 0))
    state_bytes_of_ranks: list[int] = field(default_factory=list)
    peak_bytes_of_ranks: list[int] = field(default_factory=list)
    added_bytes_of_ranks: list[int] = field(default_factory=list)  # peak minus base
    steps_s: list[float] = field(default_factory=list)
    sample: str = ""
    stopped: bool = False
    saved_step: int | None = None
    save_stall_s: float = 0.0
    wall_s: float = 0.0

    def add_step(
        self, step: int, loss: float, step_s: float, num_tokens: int, state: StateBytes
    ) -> None:
        """Add one step; `tokens_per_s` is a moving average over about ten steps."""
        speed = num_tokens / step_s
        weight = _SPEED_MEMORY if self.losses else 0.0  # of the steps before
        self.tokens_per_s = weight * self.tokens_per_s + (1 - weight) * speed
        self.steps = step
        self.tokens += num_tokens
        self.state = state
        self.losses.append(loss)
        self.steps_s.append(step_s)

    @property
    def loss(self) -> float:
        """Mean training loss of the last ten steps."""
        last = self.losses[-10:]
        return sum(last) / len(last)


def compare(config: TrainConfig, result: RunResult) -> list[str]:
    """Write each predicted quantity beside the measured one, a line each.

    The step time is the median without the first step. State and peak are those of the rank that
    holds most. On the CPU, the peak is the growth of the process since before the model was built;
    about 50 MiB of it are buffers of libraries, freed pages and the copy that a save makes. On
    other devices it is the bytes that the allocator gave out.
    """
    step_s = median(result.steps_s[1:] or [0.0])
    state = max(result.state_bytes_of_ranks, default=0)
    peak = max(result.added_bytes_of_ranks, default=0)
    rows = (
        ("step time", config.predicted_step_s, step_s, "{:.3g} s".format),
        ("state", config.predicted_state_bytes, state, format_bytes),
        ("peak", config.predicted_peak_bytes, peak, format_bytes),
    )
    lines = []
    for name, expected, actual, write in rows:
        if not expected:
            continue
        error = f" ({expected / actual - 1:+.1%})" if actual else ""
        measured = f"measured {write(actual)}" if actual else "not measured in a single step"
        lines.append(f"{name} {write(expected)}, {measured}{error}")
    return lines


def format_result(result: RunResult, config: TrainConfig) -> str:
    """Write the result of a run: loss, speed, bytes per rank, predictions, sample."""
    if not result.losses:
        return f"nothing left to do: step {result.steps} is the last one; raise steps to go on"
    state = result.state
    per_param = state.replicated_bytes / max(1, state.num_params)
    largest = max(result.state_bytes_of_ranks, default=0)
    lines = [
        f"{len(result.losses)} steps, {result.tokens:,} tokens in {result.wall_s:.0f} s "
        f"({result.tokens_per_s:,.0f} tokens/s at the end)",
        f"loss          {result.loss:.3f} nats per token (last steps)"
        + (f", {result.eval_loss:.3f} held out" if result.eval_loss is not None else ""),
        f"              {result.unigram_entropy:.3f} is the unigram entropy of the data",
        f"parameters    {format_count(state.num_params)}",
        f"state         {_by_rank(result.state_bytes_of_ranks)}",
        f"              {format_bytes(state.replicated_bytes)} a rank in plain data parallelism "
        f"({per_param:.1f} bytes per parameter): {largest / max(1, state.replicated_bytes):.0%}",
        f"peak memory   {_by_rank(result.peak_bytes_of_ranks)}",
    ]
    if result.first_step > 1:
        lines.append(f"resumed       from step {result.first_step - 1}, to step {result.steps}")
    if result.saved_step is not None:
        lines.append(
            f"checkpoints   the last of step {result.saved_step}; saving stopped training for "
            f"{result.save_stall_s:.2f} s in all"
        )
    for number, line in enumerate(compare(config, result)):
        lines.append(f"{'' if number else 'predicted':<14}{line}")
    if config.observe:
        lines.append(f"report        shardwise report {config.output}")
    if result.sample:
        lines += ["sample"]
        for line in result.sample.split("\n"):  # an untrained model samples control characters
            shown = (
                c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line.expandtabs(4)
            )
            lines.append(f"  {''.join(shown)}")
    return "\n".join(lines)


def _by_rank(sizes: list[int]) -> str:
    return ", ".join(f"rank {rank}: {format_bytes(size)}" for rank, size in enumerate(sizes))
