"""`shardwise.optim.gathering`: optimizers that need whole tensors step as in one process."""

import logging

import pytest
import torch
from torch import nn

import shardwise
from ranks import on_ranks, run_ranks
from shardwise.config import Offload
from shardwise.errors import ConfigError, ShardError
from shardwise.interop.fsdp2 import fully_shard


class Stepped(torch.optim.Optimizer):
    """Gives `one` each parameter; its first step makes the state."""

    def __init__(self, params, **options):
        super().__init__(params, {"lr": 0.05, "d": 1e-3, **options})

    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.start(p, self.state[p])
            self.all_of(params, group)
            for p in params:
                self.one(p, self.state[p], group)

    def start(self, p, state):
        state["mean"] = torch.zeros_like(p)

    def all_of(self, params, group):
        pass


class Distance(Stepped):
    """Learns its step size from dots of flattened tensors, in the manner of Prodigy."""

    def start(self, p, state):
        super().start(p, state)
        state["first"] = p.flatten()[::2].detach().clone()
        state["sum"] = torch.zeros_like(state["first"])

    def all_of(self, params, group):
        moved = 0.0
        for p in params:
            state = self.state[p]
            part = p.grad.flatten()[::2]
            moved += torch.dot(part, state["first"] - p.data.flatten()[::2]).item()
            state["sum"].add_(part, alpha=group["d"])
        size = sum(self.state[p]["sum"].abs().sum().item() for p in params)
        group["d"] = max(group["d"], 0.5 * moved / size + 2e-3)

    def one(self, p, state, group):
        state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.data.addcdiv_(state["mean"], state["mean"].abs() + 0.1, value=-10 * group["d"])


class Rotated(Stepped):
    """Keeps factors and a basis of every dim of 2 or more, in the manner of Shampoo and SOAP."""

    def start(self, p, state):
        super().start(p, state)
        state["factors"] = [torch.eye(n) for n in p.shape]

    @torch.no_grad()
    def one(self, p, state, group):
        grad = p.grad
        for dim, factor in enumerate(state["factors"]):
            rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
            factor.add_(rows @ rows.T)
            found, basis = torch.linalg.eigh(factor)
            turned = basis @ (found.pow(-0.25)[:, None] * (basis.T @ rows))
            grad = turned.view(grad.movedim(dim, 0).shape).movedim(0, dim)
        state["mean"].lerp_(grad, 0.1)
        state["last"] = grad.clone()
        p.add_(state["mean"], alpha=-group["lr"])


class Projected(Stepped):
    """Writes through views, sorts, and keeps moments of lower rank, like AdamP and GaLore."""

    def start(self, p, state):
        super().start(p, state)
        state["exp_avg"] = torch.zeros(2, p.numel())

    @torch.no_grad()
    def one(self, p, state, group):
        rows = p.grad.reshape(len(p), -1) if p.ndim else p.grad.reshape(1, 1)
        if rows.shape[0] > 1 and rows.shape[1] > 1:
            left, _, right = torch.linalg.svd(rows, full_matrices=False)
            rows = rows + left[:, :1] @ right[:1]
        state["exp_avg"][0].add_(rows.reshape(-1))
        limit = p.grad.abs().quantile(0.5)
        p.grad.copy_(rows.view(p.shape).clamp(-2 * limit, 2 * limit))
        p.view(-1)[0] += 0.01 * torch.sort(p.grad.flatten())[0][-1]
        p.data.view(-1).mul_(0.999)
        p.sub_(p.grad * state["exp_avg"][0].view(p.shape).sign().abs(), alpha=group["lr"])


class Noisy(Stepped):
    """Adds noise that it draws as plain tensors."""

    @torch.no_grad()
    def one(self, p, state, group):
        p.add_(torch.randn(p.shape).abs() - p.grad, alpha=group["lr"])


KINDS = (Distance, Rotated, Projected, Noisy)


class Model(nn.Module):
    """A convolution, matrices, vectors, and slices that are empty on some ranks."""

    def __init__(self, is_scalar=True):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, 2)
        self.up = nn.Linear(12, 5)
        self.down = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(()) if is_scalar else torch.ones(1))

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.conv(x).flatten(1)))) * self.scale


def loss_of(model, step):
    x = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(step))
    return (model(x) - 1).square().mean()


def train(model, optimizer, steps=range(3)):
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plainly(make, num_steps=3, is_scalar=True):
    model = Model(is_scalar)
    optimizer = make(model.parameters())
    torch.manual_seed(7)
    train(model, optimizer, range(num_steps))
    return model


def check_same(model, plain):
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        full = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(full.detach(), theirs.detach(), rtol=1e-4, atol=2e-5, msg=name)


SETTINGS = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "layout": "matrices"},
    {"stage": 3, "layout": "flat"},
    {"stage": 3, "precision": None},
)


@on_ranks(1, 2, 3)
def test_steps_are_those_of_one_process_at_every_stage_and_layout(rank, num_ranks):
    for kind in KINDS:
        plain = plainly(kind)
        for settings in SETTINGS:
            model = shardwise.shard(Model(), units=[], **settings)
            optimizer = shardwise.optim.gathering(kind(model.parameters()))
            torch.manual_seed(7 + rank)  # draws of a step are rank 0's
            train(model, optimizer)
            check_same(model, plain)
            assert isinstance(optimizer.state[model.conv.weight]["mean"], shardwise.ShardTensor)
            if kind is Rotated:  # what it made whole, in the parameter's shape, was cut
                assert isinstance(optimizer.state[model.conv.weight]["last"], shardwise.ShardTensor)


@on_ranks(2, 3)
def test_steps_under_fully_shard_and_with_offload_are_those_of_one_process(rank, num_ranks):
    for kind in KINDS:
        model = Model(is_scalar=False)
        fully_shard(model)
        optimizer = shardwise.optim.gathering(kind(model.parameters()))
        torch.manual_seed(7)
        train(model, optimizer)
        check_same(model, plainly(kind, is_scalar=False))
        offloaded = shardwise.shard(Model(), units=[], offload=Offload(optimizer="cpu"))
        optimizer = shardwise.optim.gathering(kind(offloaded.parameters()))
        torch.manual_seed(7)
        train(offloaded, optimizer)
        check_same(offloaded, plainly(kind))


@on_ranks(2)
def test_closures_run_as_outside_the_step(rank, num_ranks):
    def run(model, optimizer):
        for step in range(2):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
        return model

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    plain = Model(is_scalar=False)
    run(plain, lbfgs(plain))
    for how in (fully_shard, lambda model: shardwise.shard(model, units=[])):
        model = Model(is_scalar=False)
        model = how(model) or model
        check_same(run(model, shardwise.optim.gathering(lbfgs(model))), plain)


@on_ranks(2)
def test_the_first_gathering_step_logs_its_cost_once(rank, num_ranks):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("shardwise").addHandler(handler)
    try:
        model = shardwise.shard(Model(), units=[])
        train(model, shardwise.optim.gathering(torch.optim.AdamW(model.parameters())))
        assert not records  # it needs nothing whole
        train(model, shardwise.optim.gathering(Distance(model.parameters())))
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    assert len(records) == (rank == 0)
    for record in records:
        assert "Distance needs whole tensors, first for flatten" in record.getMessage()
        assert record.args[2] > 0 and record.args[3] > 0


@on_ranks(2)
def test_without_gathering_the_error_names_it_and_matrices_only_where_they_help(rank, num_ranks):
    for kind, layout, has_matrices in (
        (Distance, "rows", False),  # asks for a convolution
        (torch.optim.Muon, "rows", True),
        (Distance, "matrices", False),
    ):
        model = shardwise.shard(Model(), units=[], layout=layout)
        params = [p for p in model.parameters() if p.ndim == 2 or kind is Distance]
        optimizer = kind(params)
        loss_of(model, 0).backward()
        with pytest.raises(ShardError, match=r"shardwise\.optim\.gathering\(\w+\(") as refused:
            optimizer.step()
        assert ("layout='matrices'" in str(refused.value)) is has_matrices
    optimizer = shardwise.optim.gathering(Distance(model.parameters()))
    with pytest.raises(ConfigError, match="this Distance gathers already"):
        shardwise.optim.gathering(optimizer)


def save_half_way(rank, num_ranks, kind, path):
    model = shardwise.shard(Model(), units=[])
    optimizer = shardwise.optim.gathering(kind(model.parameters()))
    train(model, optimizer, range(2))
    shardwise.save(path, model, optimizer)


def go_on(rank, num_ranks, kind, path):
    model = shardwise.shard(Model(), units=[], layout="flat")
    optimizer = shardwise.optim.gathering(kind(model.parameters()))
    shardwise.load(path, model, optimizer)
    train(model, optimizer, range(2, 4))
    check_same(model, plainly(kind, num_steps=4))


@pytest.mark.parametrize("kind", [Distance, Rotated, Projected])
def test_state_goes_on_over_other_ranks_and_layouts(kind, tmp_path):
    run_ranks(save_half_way, 2, kind, tmp_path / "saved")
    run_ranks(go_on, 3, kind, tmp_path / "saved")
