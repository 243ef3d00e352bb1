"""Mixtures of experts with experts on several ranks; no token is dropped.

Note [Where a token goes]
A rank sorts its tokens by expert, sends each rank of ``ep`` the number of tokens for each of its
experts, and then the tokens. The results are sorted back, weighted and summed. Backward is the same
exchange, so an expert's gradient is the sum over the tokens of all ranks of ``ep``. Ranks and
experts without tokens send and compute nothing, but take part in each exchange.

Ranks of one ``tp`` group have the same tokens. ``ep`` groups are cut out of ``dp_shard x cp x tp``.
If each rank sent all its tokens, experts would compute ``tp`` times too much, and their gradients
would be ``tp`` times too large. So in `at_experts` each rank sends its part of the tokens, and
gathers the parts of the result (``exchange.replicas``). Routers and shared experts see all tokens
on each of these ranks. With ``ep = 1`` nothing is divided.

B windows, T positions, n tokens, D dim, F expert width, E experts, k experts per token.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.axes import Axes
from shardwise.comm.exchange import Exchange
from shardwise.errors import ConfigError
from shardwise.mesh import axis_of
from shardwise.parallel.routing import Router, Routing, load_of
from shardwise.tensor.dispatch import in_full

Compute = Callable[[Tensor, Sequence[int]], Tensor]


def at_experts(
    x: Tensor,
    chosen: Tensor,
    num: int,
    exchange: Exchange | None,
    compute: Compute,
    weights: Tensor | None = None,
) -> Tensor:
    """Send each token to its experts, and return the experts' results.

    ``compute(rows, counts)`` receives the rows of this rank's experts in order, ``counts[i]`` rows
    for expert i, and returns as many rows. Each rank of ``exchange`` has an equal share of the
    ``num`` experts, in rank order. With ``weights`` a token's k results are weighted and summed.
    Ranks of one ``tp`` group pass the same tokens; see Note [Where a token goes].

    **Shapes** x [n, D], chosen int64 [n, k] -> [n, k, D'], or [n, D'] with weights [n, k].
    **Cost** each token's row is sent to its experts' ranks, once per expert (D elements), and back
    (D' elements); as much in backward; 8 bytes for each expert of another rank. The host waits
    once, for the numbers of rows.
    """
    num_tokens = len(x)
    same_tokens = (
        None if exchange is None else exchange.replicas
    )  # over the ranks of one ``tp`` group
    if same_tokens is not None:
        x = same_tokens.part(x)
        chosen = same_tokens.part(chosen)
        weights = None if weights is None else same_tokens.part(weights)
    order = chosen.flatten().argsort(stable=True)
    inverse = order.argsort()
    rows: Tensor = _ReorderedRows.apply(x, order // chosen.shape[1], inverse)
    counts = load_of(chosen, num)
    if exchange is None or exchange.axis.size == 1:
        outputs = compute(rows, counts.tolist())
    else:
        outputs = _on_all_ranks(rows, counts.view(exchange.axis.size, -1), exchange, compute)
    reordered: Tensor = _ReorderedRows.apply(outputs, inverse, order)
    result = reordered.unflatten(0, chosen.shape)
    if weights is not None:
        result = (result * weights.unsqueeze(-1).to(result.dtype)).sum(1)
    return result if same_tokens is None else same_tokens.whole(result, num_tokens)


def _on_all_ranks(rows: Tensor, counts: Tensor, exchange: Exchange, compute: Compute) -> Tensor:
    """Compute on the experts of all ranks; ``counts`` are rows [ranks, experts of a rank]."""
    ranks, local_experts = counts.shape
    received_counts = exchange.all_to_all(counts, [1] * ranks, [1] * ranks)
    totals = [counts.sum(1), received_counts.sum(1), received_counts.sum(0)]
    numbers = torch.cat(totals).tolist()  # the host waits once
    sent = numbers[:ranks]
    received = numbers[ranks : 2 * ranks]
    per_expert = numbers[2 * ranks :]
    received_rows = exchange.all_to_all(rows, sent, received)
    # The rows are sorted by rank and then by expert; `compute` needs them by expert.
    experts = torch.arange(local_experts, device=rows.device).repeat(ranks)
    expert_of_row = experts.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    order = expert_of_row.argsort(stable=True)
    inverse = order.argsort()
    outputs = compute(_ReorderedRows.apply(received_rows, order, inverse), per_expert)
    return exchange.all_to_all(_ReorderedRows.apply(outputs, inverse, order), received, sent)


class _ReorderedRows(torch.autograd.Function):
    """Rows in another order, each k times; the gradient is summed in a fixed order.

    ``inverse[i]`` is a new position of row i // k.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows = len(rows)
        return rows[source]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        row_grads = grad[inverse]
        if len(row_grads) == ctx.num_rows:
            return row_grads, None, None
        return row_grads.unflatten(0, (ctx.num_rows, -1)).sum(1), None, None


class RoutedExperts(nn.Module):
    """SwiGLU experts (arXiv:2002.05202), stacked.

    ``gate`` and ``up`` are [E, F, D], ``down`` [E, D, F]. ``exchange`` connects the ranks that have
    other experts; None on one rank.
    """

    exchange: Exchange | None = None

    def __init__(
        self, num: int, dim: int, width: int, std: float = 0.02, out_std: float = 0.02
    ) -> None:
        super().__init__()
        self.num = num
        self.std = std
        self.out_std = out_std
        self.gate = nn.Parameter(torch.empty(num, width, dim))
        self.up = nn.Parameter(torch.empty(num, width, dim))
        self.down = nn.Parameter(torch.empty(num, dim, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.gate, std=self.std)
        nn.init.normal_(self.up, std=self.std)
        nn.init.normal_(self.down, std=self.out_std)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the results of each token's experts, as `at_experts` does."""
        return at_experts(x, chosen, self.num, self.exchange, self._compute, weights)

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        # unbind: its gradient is one stack, with zeros for experts without rows.
        stacks = [local_of(w).unbind() for w in (self.gate, self.up, self.down)]
        outputs = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(rows.split(list(counts)), *stacks, strict=True)
        ]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer that sends each token to a few experts, and to a shared one if given.

    ``shared`` is a module for all tokens. ``spread_experts(model, axes)`` places the experts on
    several ranks. `balance_experts` is for routers with a bias.

    **Source** Mixtral (arXiv:2401.04088), DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """

    def __init__(
        self,
        dim: int,
        width: int,
        routing: Routing,
        shared: nn.Module | None = None,
        std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.router = Router(dim, routing, std)
        self.experts = RoutedExperts(routing.num, dim, width, std, out_std)
        self.shared = shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the auxiliary loss to add to the model's loss.

        The loss is zero unless the routing is ``balanced`` and the module trains. Its mean over
        ranks is the loss of one process.

        **Shapes** x [B, T, D] -> [B, T, D], fp32 [].
        """
        tokens = x.flatten(0, -2)
        weights, chosen, balance = self.router(tokens)
        mixed = self.experts(tokens, chosen, weights).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x), balance


def spread_experts(
    model: nn.Module, axes: Axes, experts: str | Sequence[str] = "*.experts"
) -> nn.Module:
    """Place a model's experts on the ranks of ``axes["ep"]``, in place; return the model.

    ``experts`` names modules; call `shardwise.shard` afterwards with the same names. Dim 0 of each
    of their parameters counts experts, and is sharded. A custom layer works too, and sends its
    tokens with `at_experts`. A module with an attribute ``exchange``, None in its class, gets an
    exchange over ``ep``, which sends each token once also with ``tp``. Routers get an exchange over
    the ranks with other tokens, so call it for any axes.

    **State** parameters become DTensors, in place; meta tensors stay on meta. No communication.

    **Raises** ConfigError, before any change, for names that match nothing, and for experts that
    ``ep`` does not divide.
    """
    over_ep = axes["ep"]
    num_ranks = over_ep.size()
    names = [experts] if isinstance(experts, str) else list(experts)
    named = _named(model, names, may_lack=axes.pp > 1) if num_ranks > 1 else {}
    params = _checked(named, num_ranks)
    for module, key, param in params:
        placed = distribute_tensor(param.detach(), over_ep, [Shard(0)], src_data_rank=None)
        module._parameters[key] = nn.Parameter(placed, requires_grad=param.requires_grad)
    for expert_module in named.values():
        for module in expert_module.modules():
            if getattr(type(module), "exchange", 0) is None:
                same_tokens = _exchange(axes, "tp", "(tokens)")
                exchange = _exchange(axes, "ep", "(experts)", same_tokens)
                module.exchange = exchange  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Router):
            module.exchange = _exchange(axes, "loss", "(load)")
    return model


def _exchange(
    axes: Axes, name: str, content: str, same_tokens: Exchange | None = None
) -> Exchange | None:
    """Return an exchange over an axis, or None for one rank."""
    mesh = axes[name]
    return Exchange(axis_of(mesh, 0, name), content, same_tokens) if mesh.size() > 1 else None


def _named(model: nn.Module, names: Sequence[str], may_lack: bool) -> dict[str, nn.Module]:
    """Return the named modules; with ``may_lack`` a name may match nothing, as on a stage."""
    named: dict[str, nn.Module] = {}
    for name in names:
        fitting = {path: m for path, m in model.named_modules() if fnmatchcase(path, name)}
        if not may_lack and not any(True for m in fitting.values() for _ in m.parameters()):
            raise ConfigError(f"experts: '{name}' is the name of no module that has parameters")
        named |= fitting
    return named


def _checked(
    modules: dict[str, nn.Module], num_ranks: int
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return each parameter once, with its owner."""
    params: dict[tuple[int, str], tuple[nn.Module, str, nn.Parameter]] = {}
    for path, module in modules.items():
        for inner, owner in module.named_modules():
            for key, param in owner._parameters.items():
                if param is None:
                    continue
                name = ".".join(part for part in (path, inner, key) if part)
                _check(name, param, num_ranks)
                params[id(owner), key] = owner, key, param
    return list(params.values())


def _check(name: str, param: nn.Parameter, num_ranks: int) -> None:
    if isinstance(param, DTensor):
        raise ConfigError(
            f"experts: parameter '{name}' is a DTensor already; call spread_experts() once, before "
            "the model is sharded"
        )
    if not param.ndim or param.shape[0] % num_ranks:
        raise ConfigError(
            f"experts: parameter '{name}' {tuple(param.shape)}: its dim 0 counts experts, which "
            f"ep={num_ranks} does not divide: make ep a divisor"
        )


def local_of(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter, through autograd.

    A block that is recomputed in backward, and is no unit by itself, has shards in its modules.
    Operations find the full parameters behind them; `to_local` would not.
    """
    whole: Tensor = in_full(param)
    return whole.to_local() if isinstance(whole, DTensor) else whole
