"""The model and the batches of labs, and training them in one process: the oracle."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

LR = 0.01
WIDTH, HIDDEN, INPUTS, CLASSES = 64, 128, 13, 7


class Block(nn.Module):
    """A residual block; ``spare`` has parameters that nothing uses."""

    def __init__(self, spare: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        if spare:
            self.spare = nn.Parameter(torch.ones(spare))

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the block's part added."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Four units: one runs twice, one has a parameter without a gradient; no size divides well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.twice = Block()
        self.once = Block(spare=4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.twice(self.once(self.twice(self.first(x)))))


class Plain(nn.Sequential):
    """A stack of equal blocks between two linear layers: each unit runs once, with gradients."""

    def __init__(self, num_blocks: int = 4) -> None:
        blocks = (Block() for _ in range(num_blocks))
        super().__init__(nn.Linear(INPUTS, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


def make_model(is_plain: bool = False) -> nn.Module:
    """Return a model with the same values on every rank."""
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = Plain() if is_plain else Net()
    torch.random.set_rng_state(state)
    return model


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that form units: the children that have parameters."""
    return [m for m in model.children() if next(m.parameters(), None) is not None]


def numel_of(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


def batch(rank: int, step: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Return the inputs and classes of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, INPUTS, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def loss_of(model: nn.Module, of: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(model(of[0]), of[1])


@dataclass
class OneProcess:
    """The parameters after each step of training in one process, and the mean gradients."""

    values: list[dict[str, Tensor]]
    grads: list[dict[str, Tensor]]
    rank_grads: list[list[dict[str, Tensor]]]  # by step and rank, of its batches alone
    last_grads: list[dict[str, Tensor]]  # the means of the last micro-batch alone


@cache
def one_process(
    num_ranks: int, steps: int = 3, micro_batches: int = 1, rows: int = 1, scale: float = 1
) -> OneProcess:
    """Train on the batches of all ranks in one process: the mean of their gradients, and Adam.

    ``scale`` multiplies the means.
    """
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, foreach=False)
    found = OneProcess([], [], [], [])
    for step in range(steps):
        total: dict[str, Tensor] = {}
        of_ranks: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
        for micro in range(micro_batches):
            sums: dict[str, Tensor] = {}
            for rank in range(num_ranks):
                model.zero_grad()
                loss_of(model, batch(rank, step * micro_batches + micro, rows)).backward()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        _add(sums, name, p.grad)
                        _add(of_ranks[rank], name, p.grad)
            for name, grad in sums.items():
                _add(total, name, grad / num_ranks * scale)
        for name, p in model.named_parameters():
            p.grad = total.get(name)
        optimizer.step()
        found.grads.append(total)
        found.last_grads.append({name: grad / num_ranks for name, grad in sums.items()})
        found.rank_grads.append(of_ranks)
        found.values.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return found


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value.clone()
