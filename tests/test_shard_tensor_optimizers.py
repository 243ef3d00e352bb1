"""Every optimizer of torch.optim, and Hugging Face's Adafactor, at every stage, layout and size.

The oracle is a plain loop in one process. What is elementwise must have its bits. What takes norms
or products over whole tensors adds up in another order: there the model is in float64, and the
roundings are counted.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from oracle import average, plain_loop
from ranks import run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import shard
from shardwise.errors import ShardError

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LAYOUTS = ("rows", "flat", "matrices")
# Each optimizer has two of these at each number of ranks, which lie four apart: at two ranks and
# three it meets all four stages and both layouts. Those that can do without `foreach` do so at two
# ranks, and have it at three.
COMBINATIONS = [(s, LAYOUTS[x]) for s, x in ((0, 0), (1, 1), (0, 1), (1, 0))]
COMBINATIONS += [(s, LAYOUTS[x]) for s, x in ((3, 1), (2, 0), (3, 0), (2, 1))]
STEPS = 2
# A gradient over 3 ranks of 4 rows; sums over all 105 elements, of which Adafactor takes a few, and
# L-BFGS two with each of 10 pairs of vectors in each of 5 iterations. What is divided (by a root of
# a square, by the product of two steps) is a thousandth of the largest, and so are its roundings.
GRADIENT, NUMEL, DIVIDED = of_gradient(5, 7, 5, 12, over=3 * 4), 105, 1000
OF_WHOLE = STEPS * (GRADIENT + 4 * NUMEL) * DIVIDED
OF_L_BFGS = STEPS * 5 * (GRADIENT + 2 * 10 * NUMEL) * DIVIDED


class Shapes(nn.Module):
    """Matrices, a vector, a scalar, one column, one row, and a convolution's four dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.column = nn.Parameter(torch.randn(5, 1))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.kernel = nn.Parameter(torch.randn(3, 2, 2, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.row) @ self.column * self.scale + self.kernel.square().sum()


ELEMENTWISE: dict[str, Make] = {
    f"{name}, foreach {foreach}": lambda p, make=make, foreach=foreach: make(p, foreach=foreach)
    for name, make in {
        "adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1, **k),
        "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, **k),
        "adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
        "adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.1, **k),
        "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
        "asgd": lambda p, **k: torch.optim.ASGD(p, lr=0.1, t0=1, **k),
        "nadam": lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k),
        "radam": lambda p, **k: torch.optim.RAdam(p, lr=0.1, **k),
        "rmsprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, centered=True, **k),
        "rprop": lambda p, **k: torch.optim.Rprop(p, lr=0.1, **k),
        "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    }.items()
    for foreach in (False, True)
}
WHOLE: dict[str, Make] = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "transformers' adafactor": lambda p: HuggingFaceAdafactor(list(p)),
    "transformers' adafactor, with momentum": lambda p: HuggingFaceAdafactor(
        list(p), lr=0.1, beta1=0.9, weight_decay=0.1, scale_parameter=False, relative_step=False
    ),
}
L_BFGS: dict[str, Make] = {
    "l-bfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=5, history_size=3),
    "l-bfgs with a line search": lambda p: torch.optim.LBFGS(
        p, max_iter=5, line_search_fn="strong_wolfe"
    ),
}


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Shapes().to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator).to(dtype)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def expected_after(make: Make, num_ranks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    steps = [[[batch_of(r, s, dtype) for r in range(num_ranks)]] for s in range(STEPS)]
    return plain_loop(make_model(dtype), steps, loss_of, make).parameters


def train(rank: int, make: Make, dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
    model = shard(make_model(dtype), **how)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        loss_of(model, batch_of(rank, step, dtype)).backward()
        optimizer.step()  # type: ignore[call-arg]
        optimizer.zero_grad()
    return {n: p.full_tensor() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def check_optimizers(rank: int, world_size: int, every: bool = False) -> None:
    for table, dtype, roundings in (
        (ELEMENTWISE, torch.float32, 0),
        (WHOLE, torch.float64, OF_WHOLE),
    ):
        for number, (label, make) in enumerate(table.items()):
            if table is ELEMENTWISE and world_size > 1 and (number + world_size) % 2 and not every:
                continue
            expected = expected_after(make, world_size, dtype)
            drawn = COMBINATIONS[(number + world_size) % 4 :: 4]
            for stage, layout in COMBINATIONS if every else drawn:
                ours = train(rank, make, dtype, stage=stage, layout=layout)
                for name, value in expected.items():
                    what = f"{label}, stage {stage}, {layout}: {name}"
                    assert_rounded_alike(ours[name], value, roundings, what)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_of_torch_makes_the_steps_of_a_plain_loop_at_every_stage(
    world_size: int,
) -> None:
    run_ranks(check_optimizers, world_size)


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> Callable[[], float]:
    """Return the closure that data-parallel ranks need: the loss is the mean, as gradients are."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return closure


def plain_closure(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> Callable[[], float]:
    def closure() -> float:
        by_rank, losses = [], []
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            by_rank.append({n: p.grad for n, p in model.named_parameters()})
            losses.append(loss.item())
        for name, grad in average(by_rank).items():
            model.get_parameter(name).grad = grad
        return sum(losses) / len(losses)

    return closure


def check_l_bfgs(rank: int, world_size: int, every: bool = False) -> None:
    dtype = torch.float64
    for number, (label, make) in enumerate(L_BFGS.items()):
        plain = make_model(dtype)
        plain.layers[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        optimizer = make(plain.parameters())
        for step in range(STEPS):
            batches = [batch_of(r, step, dtype) for r in range(world_size)]
            optimizer.step(plain_closure(plain, optimizer, batches))
        evaluations = next(iter(optimizer.state.values()))["func_evals"]
        drawn = COMBINATIONS[(number + world_size) % 4 :: 4]
        for stage, layout in COMBINATIONS if every else drawn:
            model = make_model(dtype)
            model.layers[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
            ours = make(shard(model, stage=stage, layout=layout).parameters())
            for step in range(STEPS):
                ours.step(closure_of(model, ours, batch_of(rank, step, dtype)))
            what = f"{label}, stage {stage}, {layout}"
            state = next(iter(ours.state.values()))
            assert state["func_evals"] == evaluations > 2 * STEPS, what
            numel = sum(p.numel() for p in model.parameters())
            if stage:  # the history is cut as the parameters are
                held = state["old_dirs"][0].to_local().numel()
                assert held <= -(-numel // world_size) + 8 or layout == "rows", what
            for name, value in plain.named_parameters():
                found = model.get_parameter(name).full_tensor()  # type: ignore[operator]
                assert_rounded_alike(found, value, OF_L_BFGS, f"{what}: {name}")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.kernels), 3])
def test_l_bfgs_makes_the_steps_of_a_plain_loop_at_every_stage(world_size: int) -> None:
    run_ranks(check_l_bfgs, world_size)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check_muon(rank: int, world_size: int) -> str:
    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(p, lr=0.1)

    torch.manual_seed(3)
    plain = Matrices()
    steps = [[[batch_of(r, s, torch.float32) for r in range(world_size)]] for s in range(STEPS)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    torch.manual_seed(3)
    model = shard(Matrices(), stage=0)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        loss(model, batch_of(rank, step, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain_loop(plain, steps, loss, make).parameters.items():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name  # type: ignore[operator]
    messages = set()
    for stage in (1, 2, 3):
        torch.manual_seed(3)
        model = shard(Matrices(), stage=stage)
        optimizer = make(model.parameters())
        loss(model, batch_of(rank, 0, torch.float32)).backward()
        before = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
        with pytest.raises(ShardError) as refused:
            optimizer.step()
        messages.add(str(refused.value))
        after = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
        assert all(map(torch.equal, before, after))
    (message,) = messages
    return message


def test_muon_runs_at_stage_0_and_its_refusal_elsewhere_says_so() -> None:
    for world_size in (1, 2):
        for message in run_ranks(check_muon, world_size):
            assert message.startswith("Muon asks for"), message
            assert "shard(stage=0), where it runs as it is" in message
