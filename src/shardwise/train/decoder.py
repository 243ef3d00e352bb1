"""The built-in decoder of `shardwise train`: whole, tensor-parallel, as pipeline stages; sampling.

`spread_decoder` cuts the decoder with torch's parallel layers. `DecoderStage` holds some of its
blocks, and `Pipeline` runs them with torch's schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.parallel.experts import MixtureOfExperts
from shardwise.plan.model.decoder import Block, PlainDecoder, rotary_tables, run_blocks, token_loss

if TYPE_CHECKING:
    from shardwise.axes import Axes
    from shardwise.train.config import TrainConfig

TIED = {"head.weight": "embedding.weight"}  # as `shardwise.parallel.tie` takes them
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_TOKENS = Shard(1)  # of [B, T, D]: each rank has some of the tokens between layers


class Decoder(PlainDecoder):
    """A Llama-style language model with the sizes of a run's config; ``vocab`` is V."""

    def __init__(self, config: TrainConfig, vocab: int) -> None:
        super().__init__(
            config.shape(vocab),
            config.activation_checkpointing,
            config.dropout,
            balance=config.expert_balance if config.experts else 0.0,
            biased=config.expert_bias,
        )


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    num_tokens: int,
    seq: int,
    temperature: float = 0.0,
    seed: int = 0,
    multiple: int = 1,
) -> Tensor:
    """Continue one window. Every rank calls this with the same arguments.

    The number of forward passes is fixed and each sees at most the last ``seq`` tokens, so the
    ranks of a sharded model stay in step. ``seed`` seeds the draws; temperature 0 takes the
    likeliest token. Windows are padded to a ``multiple`` of tokens, which tensor parallelism
    needs; the model does not attend to the padding.

    **Shapes** ids int64 [T], T at least 1, -> int64 [T + num_tokens]; ``model`` maps [1, T] to
    logits [1, T, V].
    """
    generator = torch.Generator(ids.device).manual_seed(seed)
    for _ in range(num_tokens):
        window = ids[-seq:]
        filled = F.pad(window, (0, -len(window) % multiple))
        logits = model(filled.unsqueeze(0))[0, len(window) - 1].float()
        if temperature > 0:
            shares = torch.softmax(logits / temperature, dim=-1)
            token = torch.multinomial(shares, 1, generator=generator)
        else:
            token = logits.argmax().unsqueeze(0)
        ids = torch.cat([ids, token])
    return ids


def spread_decoder(model: PlainDecoder, axes: Axes) -> PlainDecoder:
    """Cut a decoder over ``axes["tp"]``, in place; return it.

    Heads, columns of the feed-forward and rows of the vocabulary are divided; between layers each
    rank has some of the tokens (Korthikanti et al., arXiv:2205.05198). The shared expert is
    divided too; `spread_experts` spreads the routed ones over ``ep``. Logits are whole on every
    rank. A tied head stays one parameter with the embedding. **State** parameters become DTensors.
    """
    if axes.tp == 1:
        return model
    mesh = axes["tp"]
    tied = model.head.weight is model.embedding.weight
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=_TOKENS, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    if tied:
        model.head.weight = model.embedding.weight
    for block in cast(Iterable[Block], model.blocks):
        attention = PrepareModuleInput(
            input_layouts=(_TOKENS, None, None),
            desired_input_layouts=(Replicate(), None, None),
        )
        styles = {
            "attention_norm": SequenceParallel(),
            "attention": attention,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(output_layouts=_TOKENS),
            "feed_forward_norm": SequenceParallel(),
            **_feed_forward_styles(block.feed_forward),
        }
        parallelize_module(block, mesh, styles)
    return model


def _feed_forward_styles(layer: nn.Module) -> dict[str, ParallelStyle]:
    if not isinstance(layer, MixtureOfExperts):
        tokens = PrepareModuleInput(input_layouts=(_TOKENS,), desired_input_layouts=(Replicate(),))
        return {"feed_forward": tokens, **_column_styles("feed_forward", layer, _TOKENS)}
    # torch's annotation does not allow None, its code does
    outputs = cast(tuple[Placement, ...], (_TOKENS, None))
    tokens_and_balance = PrepareModuleInputOutput(
        input_layouts=(_TOKENS,),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(Replicate(), None),
        desired_output_layouts=outputs,
    )
    shared = {}
    if layer.shared is not None:
        shared = _column_styles("feed_forward.shared", layer.shared, Replicate())
    return {"feed_forward": tokens_and_balance, **shared}


def _column_styles(path: str, layer: nn.Module, to: Placement) -> dict[str, ParallelStyle]:
    columns = [name for name in ("gate", "up") if getattr(layer, name) is not None]
    return {
        **{f"{path}.{name}": ColwiseParallel() for name in columns},
        f"{path}.down": RowwiseParallel(output_layouts=to),
    }


class DecoderStage(nn.Module):
    """Consecutive blocks of a decoder for one pipeline stage, and its embedding or head.

    Parameter names are those of the whole decoder. If the layers do not divide evenly, the first
    stages have one more. ``positions`` int64 [T] are those of the next pass's tokens; None means
    0 to T - 1.
    """

    def __init__(
        self, whole: PlainDecoder, index: int, num_stages: int, tokens_of_tp: int = 1
    ) -> None:
        super().__init__()
        per_stage, more = divmod(len(whole.blocks), num_stages)
        first = index * per_stage + min(index, more)
        end = first + per_stage + (index < more)
        is_last = index == num_stages - 1
        self.head_dim = whole.head_dim
        self.tokens_of_tp = tokens_of_tp
        self.checkpointed = whole.checkpointed
        self.dropout = whole.dropout
        self.positions: Tensor | None = None
        self.embedding = whole.embedding if index == 0 else None
        self.blocks = nn.ModuleList()  # its members are found as units, as in the whole decoder
        for n in range(first, end):
            self.blocks.add_module(str(n), whole.blocks[n])
        self.norm = whole.norm if is_last else None
        self.head = whole.head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, T, V] on the last stage, else the next stage's input.

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
    """Runs the passes of this rank's `DecoderStage` by one of torch's schedules."""

    def __init__(
        self, stage: nn.Module, axes: Axes, config: TrainConfig, device: torch.device
    ) -> None:
        index, num = axes["pp"].get_local_rank(), axes.pp
        self.is_first = index == 0
        self.is_last = index == num - 1
        self._num_stages = num
        self._stage = cast(DecoderStage, stage)
        pipe = PipelineStage(stage, index, num, device, group=axes["pp"].get_group())
        num_micro_batches = config.accumulation or 1
        self._schedule = _SCHEDULES[config.pp_schedule](pipe, num_micro_batches, loss_fn=token_loss)

    def step(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        """Run forward and backward of all micro-batches, given as consecutive rows.

        The mean of the results over all ranks is the loss: the last stage returns its mean times
        the number of stages, the others 0.
        """
        losses: list[Tensor] = []
        # With return_outputs the schedule would keep and copy the logits of all micro-batches.
        options: dict[str, object] = {"losses": losses, "return_outputs": False}
        self._run(self._schedule.step, ids, targets, positions, **options)
        if not self.is_last:
            return torch.zeros((), device=ids.device)
        return torch.stack([loss.detach() for loss in losses]).mean() * self._num_stages

    def logits(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor | None:
        """Return the logits of one step's rows on the last stage, None on others."""
        return self._run(self._schedule.eval, ids, targets, positions)

    def _run(
        self,
        schedule: Callable[..., Tensor | None],
        ids: Tensor,
        targets: Tensor,
        positions: Tensor | None,
        **options: object,
    ) -> Tensor | None:
        self._stage.positions = positions
        last_only = {"target": targets, **options} if self.is_last else {}
        return schedule(*((ids,) if self.is_first else ()), **last_only)
