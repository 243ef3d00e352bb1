"""Routing of tokens to experts, and load balancing of experts.

Note [Two ways to balance]
Without balancing, a router sends most tokens to a few experts, which then learn most. The auxiliary
loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6) is E sum_i f_i P_i over E
experts. f_i is the number of tokens sent to expert i over the number of tokens (with the k choices
of a token it sums to k, as transformers counts it for Mixtral). P_i is the mean of the router's
probability of i. f is counted over all ranks with different tokens, since the product of the ranks'
means is not the mean of their products: a rank with one kind of text would have to spread it
(arXiv:2501.11873). So the mean of the ranks' losses is the loss of one process.

DeepSeek-V3 (arXiv:2408.15664, algorithm 1; arXiv:2412.19437, section 2.1.2) adds a bias per expert
to the scores, for the choice only. After each step it moves the bias by the sign of the expert's
missing load. The bias has no gradient.

B windows, T positions, n tokens, D dim, E experts, k experts per token.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.exchange import Exchange
from shardwise.engine.api import find_engine
from shardwise.engine.passes import in_backward
from shardwise.errors import ConfigError

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """Settings of a router: each token goes to the ``top_k`` of ``num`` experts.

    ``scoring``: softmax over all experts (Mixtral), or a sigmoid for each (DeepSeek-V3).
    ``normalized``: the chosen experts' scores are divided by their sum. They are multiplied by
    ``scale``. ``balanced``: with the auxiliary loss. ``biased``: with a bias per expert, moved by
    `balance_experts`. See Note [Two ways to balance].

    **Raises** ConfigError for a ``top_k`` out of range or an unknown ``scoring``.
    """

    num: int
    top_k: int
    scoring: Scoring = "softmax"
    normalized: bool = True
    scale: float = 1.0
    balanced: bool = False
    biased: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num:
            raise ConfigError(
                f"experts: top_k={self.top_k} of {self.num}: expected 1 to {self.num}"
            )
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"experts: scoring={self.scoring!r}: expected 'softmax' or 'sigmoid'")


class Router(nn.Module):
    """Scores all experts for each token, and chooses the token's experts.

    ``weight`` is [E, D]. ``exchange`` connects the ranks with different tokens; None on one rank.
    ``load`` counts the tokens sent to each expert since the last `balance_experts`.
    """

    exchange: Exchange | None = None
    bias: Tensor
    load: Tensor

    def __init__(self, dim: int, routing: Routing, std: float = 0.02) -> None:
        super().__init__()
        self.routing = routing
        self.std = std
        self.weight = nn.Parameter(torch.empty(routing.num, dim))
        if routing.biased:
            self.register_buffer("bias", torch.empty(routing.num, dtype=torch.float32))
            load = torch.empty(routing.num, dtype=torch.int64)
            self.register_buffer("load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, and zero the bias."""
        nn.init.normal_(self.weight, std=self.std)
        for buffer in self.buffers(recurse=False):
            nn.init.zeros_(buffer)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and numbers of each token's experts, and the auxiliary loss.

        The loss is zero unless the routing is ``balanced`` and the module trains.

        **Shapes** x [n, D] -> fp32 [n, k], int64 [n, k], fp32 [].
        **Cost** with the loss, one all-reduce of E numbers.
        """
        routing = self.routing
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
        wanted = scores.detach() + self.bias if routing.biased else scores.detach()
        chosen = wanted.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if routing.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        balance = scores.new_zeros(())
        if self.training and (routing.balanced or routing.biased):
            load = load_of(chosen, routing.num)
            if routing.biased and not in_backward():  # forward has counted a recomputed pass
                self.load += load
            if routing.balanced:
                balance = self._balance(scores, load)
        return weights * routing.scale, chosen, balance

    def _balance(self, scores: Tensor, load: Tensor) -> Tensor:
        """Return the loss of this rank's tokens, times the number of ranks."""
        shares = scores if self.routing.scoring == "softmax" else scores / scores.sum(-1, True)
        ranks = 1
        if self.exchange is not None:
            load = self.exchange.total(load)
            ranks = self.exchange.axis.size
        tokens = (load.sum() / self.routing.top_k).clamp_min(1)
        sent = load / tokens
        return sent.dot(shares.sum(0)) * (self.routing.num * ranks / tokens)


def load_of(chosen: Tensor, num: int) -> Tensor:
    """Return how often each of ``num`` experts was chosen, int64 [num], without a host sync."""
    flat = chosen.flatten()
    return flat.new_zeros(num).scatter_add_(0, flat, torch.ones_like(flat))


@torch.no_grad()
def balance_experts(model: nn.Module, rate: float = 1e-3) -> None:
    """Move each expert's bias towards an equal load; call it after each optimizer step.

    All ranks call it. The load is that of all ranks since the last call, over all micro-batches. A
    model without biases is unchanged.

    **Cost** one all-reduce for all layers, of E numbers per layer with experts.

    **Raises** ConfigError on several ranks if the routers have no exchange.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.routing.biased]
    if not routers:
        return
    loads = torch.cat([router.load for router in routers])
    exchange = routers[0].exchange
    if exchange is not None:
        loads = exchange.total(loads)
    elif (engine := find_engine(model)) is not None and engine.comm.axes.num_ranks > 1:
        raise ConfigError(
            "experts: balance_experts() on several ranks, and the routers have no exchange: call "
            "spread_experts(model, axes) before the model is sharded"
        )
    for router, load in zip(routers, loads.split([r.routing.num for r in routers]), strict=True):
        missing = load.sum() - load * router.routing.num  # (mean - load) x E
        router.bias += rate * missing.sign()
        router.load.zero_()
