"""The built-in decoder as stages of a pipeline, by torch's own schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shardwise.plan.model.decoder import rotary_tables, run_blocks, token_loss

if TYPE_CHECKING:
    from shardwise.axes import Axes
    from shardwise.train.config import TrainConfig

_SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
TIED = {"head.weight": "embedding.weight"}  # as `shardwise.parallel.tie` takes them


class Stage(nn.Module):
    """Some blocks of a `PlainDecoder`, and its ends where they are; names are the whole one's.

    Where layers do not divide, the first stages have one more. ``positions`` int64 [T] are those of
    the tokens that the next pass gets, 0 to T - 1 where it is None.
    """

    def __init__(self, whole: Any, index: int, num_stages: int, tokens_of_tp: int = 1) -> None:
        super().__init__()
        each, more = divmod(len(whole.blocks), num_stages)
        first = index * each + min(index, more)
        mine = range(first, first + each + (index < more))
        is_last = index == num_stages - 1
        self.head_dim, self.tokens_of_tp = whole.head_dim, tokens_of_tp
        self.checkpointed, self.dropout = whole.checkpointed, whole.dropout
        self.positions: Tensor | None = None
        self.embedding = whole.embedding if index == 0 else None
        self.blocks = nn.ModuleList()  # whose members are units, as those of the whole one's
        for n in mine:
            self.blocks.add_module(str(n), whole.blocks[n])
        self.norm: Any = whole.norm if is_last else None
        self.head: Any = whole.head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, T, V] of the last stage, or what the next one takes.

        **Shapes** int64 [B, T] to the first stage; [B, t, D] to others, of this rank's tokens.
        """
        num_tokens = x.shape[1] * (1 if self.embedding is not None else self.tokens_of_tp)
        if self.embedding is not None:
            x = F.dropout(self.embedding(x), self.dropout, self.training)
        positions = self.positions
        if positions is None:
            positions = torch.arange(num_tokens, device=x.device)
        rotary = rotary_tables(positions.flatten(), self.head_dim)
        x, _ = run_blocks(self.blocks, x, rotary, self.checkpointed)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


class Pipeline:
    """The schedule of a run, and this rank's stage in it."""

    def __init__(
        self, stage: nn.Module, axes: Axes, config: TrainConfig, device: torch.device
    ) -> None:
        index, num = axes["pp"].get_local_rank(), axes.pp
        self.is_first, self.is_last = index == 0, index == num - 1
        self._num_stages = num
        self._stage: Any = stage
        pipe = PipelineStage(stage, index, num, device, group=axes["pp"].get_group())
        num_micro_batches = config.accumulation or 1
        self._schedule = _SCHEDULES[config.pp_schedule](pipe, num_micro_batches, loss_fn=token_loss)

    def step(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        """Run forward and backward of all micro-batches, whose rows follow each other.

        The mean over all ranks of what is returned is the loss: other stages than the last return
        0, and the last its mean as often as there are stages.
        """
        losses: list[Tensor] = []
        # Without return_outputs the logits of all micro-batches would be kept, and then copied.
        given: dict[str, Any] = {"losses": losses, "return_outputs": False}
        self._run(self._schedule.step, ids, targets, positions, **given)
        if not self.is_last:
            return torch.zeros((), device=ids.device)
        return torch.stack([loss.detach() for loss in losses]).mean() * self._num_stages

    def logits(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor | None:
        """Return the logits of as many rows as a step has, on the last stage; None on others."""
        found: Tensor | None = self._run(self._schedule.eval, ids, targets, positions)
        return found

    def _run(
        self, schedule: Any, ids: Tensor, targets: Tensor, positions: Tensor | None, **given: Any
    ) -> Any:
        self._stage.positions = positions
        told = {"target": targets, **given} if self.is_last else {}
        return schedule(*((ids,) if self.is_first else ()), **told)
