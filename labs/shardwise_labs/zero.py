"""Train the model with a trainer of labs 3 to 5, and count what it holds and sends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from shardwise_labs.counting import Call, Meter, Traffic
from shardwise_labs.given import batch, loss_of, make_model


class Trainer(Protocol):
    """What a reader's Zero1, Zero2 and Zero3 can do."""

    def backward(self, loss: Tensor) -> None:
        """Run backward."""

    def step(self) -> None:
        """Update the parameters."""


@dataclass
class Trained:
    """The parameters after training, and bytes of the last step on this rank."""

    model: nn.Module
    trainer: Trainer
    values: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    at_rest: int = 0  # before backward begins to write, after a step
    held: int = 0  # after backward, before the step
    peak: int = 0  # of forward and backward
    calls: list[Call] = field(default_factory=list)
    calls_of_setup: list[Call] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Return the bytes that this rank sent in the last step."""
        return sum(call.sent for call in self.calls)


def train(
    build: Callable[[nn.Module], Trainer],
    rank: int,
    folder: Path,
    steps: int = 3,
    micro_batches: int = 1,
    rows: int = 1,
    is_plain: bool = False,
) -> Trained:
    """Train ``steps`` steps; every rank of the group calls this."""
    model = make_model(is_plain)
    with Meter(*model.parameters()) as meter, Traffic(folder) as traffic:
        trainer = build(model)
        found = Trained(model, trainer, calls_of_setup=list(traffic.calls))
        for step in range(steps):
            traffic.clear()
            found.at_rest = meter.settled()
            meter.restart()
            total = 0.0
            for micro in range(micro_batches):
                loss = loss_of(model, batch(rank, step * micro_batches + micro, rows))
                trainer.backward(loss)
                total += loss.item()
                del loss
            found.peak, found.held = meter.peak, meter.settled()
            trainer.step()
            found.losses.append(total / micro_batches)
        found.calls = list(traffic.calls)
        if hasattr(trainer, "full_parameters"):
            trainer.full_parameters()
    found.values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found
