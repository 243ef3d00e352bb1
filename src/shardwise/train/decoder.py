"""The decoder of `shardwise train`, by the keys of a run, and how it continues a text."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.plan.model.decoder import PlainDecoder
from shardwise.train.config import TrainConfig


class Decoder(PlainDecoder):
    """A Llama-style language model, as the model's keys and activation_checkpointing say.

    ``vocab`` is V, at least the tokenizer's size.
    """

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
    """Continue one window; every rank must call this with the same arguments.

    The number of forward passes is fixed, and each sees at most the last ``seq`` tokens, so the
    ranks of a sharded model stay in lockstep. ``seed`` is that of the draws; at temperature 0 the
    likeliest token is taken. Windows are filled up to a ``multiple`` of tokens, which a model over
    tensor parallelism shares out; what comes later is not seen.

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
