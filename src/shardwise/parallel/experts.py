"""Mixtures of experts whose experts lie on several ranks; no token is dropped.

Note [Where a token goes]
A rank sorts its tokens by the expert that each was routed to, tells every rank of ``ep`` how many
it will get for each expert there, and sends them; what comes back is sorted the other way round,
weighed and summed. The way back through autograd is the same exchange, so an expert's gradient is
the sum over the tokens of all ranks of ``ep``, whatever rank they came from. Ranks without tokens
and experts without tokens send and compute nothing, but take part in each exchange.

Ranks of one ``tp`` group have the same tokens. ``ep`` groups are cut out of ``dp_shard x cp x tp``,
so if each of them sent all its tokens, experts would compute ``tp`` times what they need and get
gradients ``tp`` times too large. So `at_experts` sends each rank's own part of the tokens, and
gathers the parts of the result (``exchange.alike``); routers and shared experts see all tokens on
all of them alike. With ``ep = 1`` nothing is divided.

B windows, T positions, n tokens, D dim, F width of an expert, E experts, k of them for a token.
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
    """Send each token to its experts, let them compute, and return what they made of it.

    ``compute(rows, counts)`` gets the rows of this rank's experts, ``counts[i]`` for the i-th of
    them one after the other, and returns as many. Of ``num`` experts, each rank of ``exchange`` has
    equally many, in rank order. With ``weights`` the k results of a token are weighed and summed.
    Ranks of one ``tp`` group pass the same tokens; see Note [Where a token goes].

    **Shapes** x [n, D], chosen int64 [n, k] -> [n, k, D'], or [n, D'] with weights [n, k].
    **Cost** each token's row goes to every rank that has an expert of it, once for each expert, and
    comes back: D and D' elements; as much in backward; 8 bytes for each expert of another rank. The
    host waits once, to learn how many rows come.
    """
    num_tokens, alike = len(x), None if exchange is None else exchange.alike
    if alike is not None:
        x, chosen = alike.part(x), alike.part(chosen)
        weights = None if weights is None else alike.part(weights)
    order = chosen.flatten().argsort(stable=True)
    inverse = order.argsort()
    rows: Tensor = _Picked.apply(x, order // chosen.shape[1], inverse)
    counts = load_of(chosen, num)
    if exchange is None or exchange.axis.size == 1:
        made = compute(rows, counts.tolist())
    else:
        made = _away(rows, counts.view(exchange.axis.size, -1), exchange, compute)
    picked: Tensor = _Picked.apply(made, inverse, order)
    back = picked.unflatten(0, chosen.shape)
    if weights is not None:
        back = (back * weights.unsqueeze(-1).to(back.dtype)).sum(1)
    return back if alike is None else alike.whole(back, num_tokens)


def _away(rows: Tensor, counts: Tensor, exchange: Exchange, compute: Compute) -> Tensor:
    """Let the experts of all ranks compute; ``counts`` [ranks, experts of one] are of rows."""
    ranks, here = counts.shape
    arriving = exchange.all_to_all(counts, [1] * ranks, [1] * ranks)
    known = torch.cat([counts.sum(1), arriving.sum(1), arriving.sum(0)]).tolist()  # asks once
    sent, received, per_expert = known[:ranks], known[ranks : 2 * ranks], known[2 * ranks :]
    arrived = exchange.all_to_all(rows, sent, received)
    # They come sorted by rank and then by expert; those of one expert are wanted together.
    experts = torch.arange(here, device=rows.device).repeat(ranks)
    of_rows = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
    order = of_rows.argsort(stable=True)
    inverse = order.argsort()
    made = compute(_Picked.apply(arrived, order, inverse), per_expert)
    return exchange.all_to_all(_Picked.apply(made, inverse, order), received, sent)


class _Picked(torch.autograd.Function):
    """Rows in another order, each of them k times; the gradient is summed in a fixed order.

    ``inverse[i]`` is where row i // k went.
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
        found = grad[inverse]
        if len(found) == ctx.num_rows:
            return found, None, None
        return found.unflatten(0, (ctx.num_rows, -1)).sum(1), None, None


class RoutedExperts(nn.Module):
    """SwiGLU experts (arXiv:2002.05202), stacked.

    ``gate`` and ``up`` are [E, F, D], ``down`` [E, D, F]. ``exchange`` is over the ranks that have
    other experts, where there are several.
    """

    exchange: Exchange | None = None

    def __init__(
        self, num: int, dim: int, width: int, std: float = 0.02, out_std: float = 0.02
    ) -> None:
        super().__init__()
        self.num, self.std, self.out_std = num, std, out_std
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
        """Return what each token's experts make of it, as `at_experts` does."""
        return at_experts(x, chosen, self.num, self.exchange, self._compute, weights)

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        # unbind: its gradient is put together once, and has zeros for experts without rows.
        stacks = [local_of(w).unbind() for w in (self.gate, self.up, self.down)]
        made = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(rows.split(list(counts)), *stacks, strict=True)
        ]
        return torch.cat(made)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of which each token meets a few experts, and the shared one, if any.

    ``shared`` is a module that all tokens go through. ``spread_experts(model, axes)`` lays the
    experts on several ranks; `balance_experts` is for routers with a bias.

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
        """Return the layer's output, and the auxiliary loss, which is to be added to the model's.

        The loss is zero unless the routing is ``balanced`` and this is training; its mean over
        ranks is that of one process.

        **Shapes** x [B, T, D] -> [B, T, D], fp32 [].
        """
        tokens = x.flatten(0, -2)
        weights, chosen, balance = self.router(tokens)
        mixed = self.experts(tokens, chosen, weights).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x), balance


def spread_experts(
    model: nn.Module, axes: Axes, experts: str | Sequence[str] = "*.experts"
) -> nn.Module:
    """Lay a model's experts on the ranks of ``axes["ep"]``, in place; return the model.

    ``experts`` names modules, as for `shardwise.shard`, which is to be called afterwards with the
    same names: dim 0 of each of their parameters counts experts, and is cut. So a layer of your own
    can be spread too; what sends its tokens is `at_experts`. A module that has an attribute
    ``exchange``, None in its class, is given one over ``ep``, which sends each token once
    under ``tp`` too. Routers learn which ranks have other tokens, so call it for any axes.

    **State** parameters become DTensors, in place; meta tensors stay on meta. Nothing is sent.

    **Raises** ConfigError, before anything is changed, for names that fit nothing, and experts that
    ``ep`` does not divide.
    """
    over_ep = axes["ep"]
    num_ranks, names = over_ep.size(), [experts] if isinstance(experts, str) else list(experts)
    found = _named(model, names, may_lack=axes.pp > 1) if num_ranks > 1 else {}
    params = _checked(found, num_ranks)
    for module, key, param in params:
        placed = distribute_tensor(param.detach(), over_ep, [Shard(0)], src_data_rank=None)
        module._parameters[key] = nn.Parameter(placed, requires_grad=param.requires_grad)
    for module in found.values():
        for each in module.modules():
            if getattr(type(each), "exchange", 0) is None:
                alike = _exchange(axes, "tp", "(tokens)")
                each.exchange = _exchange(axes, "ep", "(experts)", alike)  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Router):
            module.exchange = _exchange(axes, "loss", "(load)")
    return model


def _exchange(axes: Axes, name: str, what: str, alike: Exchange | None = None) -> Exchange | None:
    """Return one over an axis of several ranks."""
    mesh = axes[name]
    return Exchange(axis_of(mesh, 0, name), what, alike) if mesh.size() > 1 else None


def _named(model: nn.Module, names: Sequence[str], may_lack: bool) -> dict[str, nn.Module]:
    """Return the modules that are named; a stage of a pipeline may have none."""
    found: dict[str, nn.Module] = {}
    for name in names:
        fitting = {path: m for path, m in model.named_modules() if fnmatchcase(path, name)}
        if not may_lack and not any(True for m in fitting.values() for _ in m.parameters()):
            raise ConfigError(f"experts: '{name}' is the name of no module that has parameters")
        found |= fitting
    return found


def _checked(
    modules: dict[str, nn.Module], num_ranks: int
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return the parameters with their owners, each once."""
    found: dict[tuple[int, str], tuple[nn.Module, str, nn.Parameter]] = {}
    for path, module in modules.items():
        for inner, owner in module.named_modules():
            for key, param in owner._parameters.items():
                if param is None:
                    continue
                name = ".".join(part for part in (path, inner, key) if part)
                _check(name, param, num_ranks)
                found[id(owner), key] = owner, key, param
    return list(found.values())


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
    """Return what this rank has of a parameter; autograd goes through it.

    A block that is recomputed in backward, and is no unit by itself, has shards in its modules:
    operations find the full parameters behind them, which `to_local` would not.
    """
    whole: Tensor = in_full(param)
    return whole.to_local() if isinstance(whole, DTensor) else whole
