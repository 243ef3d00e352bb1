"""Layout ``matrices``: optimizers that read whole matrices step as one process does."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from oracle import assert_same_bits, plain_loop
from ranks import on_ranks, run_ranks
from shardwise.errors import ConfigError

STEPS = 4


class Model(nn.Module):
    """Odd shapes: matrices of one row and one column, an empty one, vectors, a scalar, 3 dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.none = nn.Parameter(torch.randn(0, 6))
        self.cube = nn.Parameter(torch.randn(2, 3, 6))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x * self.row + (x @ self.column) * self.scale + self.cube.sum(dim=(0, 1))
        return x.square().mean() + self.none.sum()


def batch(rank, step, micro=0):
    generator = torch.Generator().manual_seed(97 * step + 11 * micro + rank)
    return torch.randint(0, 11, (3, 4), generator=generator)


def both(params):
    """Muon for the matrices, AdamW for the rest, as one optimizer."""
    params = list(params)
    muon = torch.optim.Muon([p for p in params if p.ndim == 2 and p.numel()], lr=0.05)
    rest = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01)
    return shardwise.optim.Mixed(muon, rest)


def sharded(stage, layout="matrices"):
    return shardwise.shard(Model(), stage=stage, layout=layout, units=[nn.Sequential])


def values(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def check_steps(rank, num_ranks, stage):
    model = sharded(stage)
    optimizer = both(model.parameters())
    for step in range(STEPS):
        for micro in range(2):
            with shardwise.accumulate(model, last=micro == 1):
                (model(batch(rank, step, micro)) / 2).backward()
        assert all(p.grad is not None for p in model.parameters())
        before = dict(shardwise.debug.stats(model).num_collectives)
        optimizer.step()
        assert dict(shardwise.debug.stats(model).num_collectives) == before
        optimizer.zero_grad()
    of_step = [[[batch(r, s, m) for r in range(num_ranks)] for m in range(2)] for s in range(STEPS)]
    truth = plain_loop(Model(), of_step, lambda m, b: m(b), both, None, stage >= 2)
    assert_same_bits(values(model), truth.parameters)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_muon_and_adamw_make_the_steps_of_one_process_and_send_nothing(num_ranks):
    for stage in range(4):
        run_ranks(check_steps, num_ranks, stage)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@on_ranks(2)
def test_axes_of_one_rank_neither_average_nor_add_twice(rank, num_ranks):
    """Groups of one rank neither average nor add twice (Megatron-LM#6660), nor send."""
    of_step = [[[batch(r, s, m) for r in range(num_ranks)] for m in range(2)] for s in range(STEPS)]
    for sizes in ((1, num_ranks), (num_ranks, 1)):
        truth = plain_loop(Model(), of_step, lambda m, b: m(b), both, None, True, sizes[0])
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        model = shardwise.shard(Model(), layout="matrices", units=[nn.Sequential], mesh=mesh)
        optimizer = both(model.parameters())
        for step in range(STEPS):
            for micro in range(2):
                with shardwise.accumulate(model, last=micro == 1):
                    (model(batch(rank, step, micro)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(values(model), truth.parameters)


class Whitens(torch.optim.Optimizer):
    """Reads whole matrices; keeps a list, a tensor of another shape, a count, and options."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "num_steps": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._step(p, self.state[p])
        return loss

    def _step(self, p, state):
        assert p.grad is not None
        if not state:
            state |= {"num": 0, "mean": torch.zeros_like(p), "sums": torch.zeros(p.shape[0])}
            state["squares"] = [torch.zeros(p.shape[0], p.shape[0])]
        state["num"] += 1
        state["mean"] = state["mean"].lerp(p.grad, 0.1)
        state["sums"] += p.grad.sum(1)
        state["squares"][0] += p.grad @ p.grad.T
        found, basis = torch.linalg.eigh(state["squares"][0] + torch.eye(p.shape[0]))
        p.add_(basis @ (found.rsqrt()[:, None] * (basis.T @ state["mean"])), alpha=-0.1)


def train(model, optimizer, steps, closes=False):
    """Take steps on the same batches on every rank, so that a power of two has the same means."""
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(batch(0, step))
            loss.backward()
            return loss

        if closes:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def whitens(model):
    return Whitens([p for p in model.parameters() if p.ndim == 2])


def plainly(steps):
    model = Model()
    train(model, whitens(model), steps)
    return {name: p.detach() for name, p in model.named_parameters()}


def check_any(rank, num_ranks, stage, closes):
    model = sharded(stage)
    optimizer = whitens(model)
    train(model, optimizer, range(3), closes)
    assert_same_bits(values(model), plainly(range(3)))
    assert optimizer.num_steps == optimizer.param_groups[0]["num_steps"] == 3
    shardwise.check.replicas(model, optimizer)
    return len(optimizer.state)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_an_optimizer_with_state_of_any_kind_steps_each_matrix_on_its_owner(num_ranks):
    for stage, closes in ((1, False), (3, True)):
        assert sum(run_ranks(check_any, num_ranks, stage, closes)) == 7  # the empty one has none


def save(rank, num_ranks, stage, path):
    model = sharded(stage)
    optimizer = whitens(model)
    train(model, optimizer, range(2))
    shardwise.save(path, model, optimizer, step=1)


def load(rank, num_ranks, stage, path):
    model = sharded(stage)
    optimizer = whitens(model)
    shardwise.load(path, model, optimizer)
    train(model, optimizer, range(2, 4))
    return values(model)


@pytest.mark.parametrize(("first", "then"), [((2, 3), (4, 1)), ((4, 1), (1, 3)), ((1, 3), (2, 2))])
def test_a_checkpoint_goes_on_over_other_ranks(first, then, tmp_path):
    run_ranks(save, *first, tmp_path / "saved")
    for found in run_ranks(load, *then, tmp_path / "saved"):
        assert_same_bits(found, plainly(range(4)))


def save_as(rank, num_ranks, layout, path):
    model = sharded(3, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    shardwise.save(path, model, optimizer, step=1)


def load_as(rank, num_ranks, layout, path):
    model = sharded(2, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shardwise.load(path, model, optimizer)
    moments = {
        f"{name}, {key}": optimizer.state[p][key].full_tensor()
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {**values(model), **moments}


@pytest.mark.parametrize("other", ["rows", "flat"])
def test_checkpoints_go_from_and_to_other_layouts(other, tmp_path):
    for number, (first, then) in enumerate((("matrices", other), (other, "matrices"))):
        path = tmp_path / str(number)
        run_ranks(save_as, 3, first, path)
        (truth,) = run_ranks(load_as, 1, first, path)
        for found in run_ranks(load_as, 2, then, path):
            assert_same_bits(found, truth)


def choose(name, p):
    return "flat" if "embed" in name else "matrices"


def check_choice(rank, num_ranks):
    model = sharded(3, choose)
    with pytest.raises(ConfigError, match="returned 'rows' for 'row'; expected 'matrices'"):
        sharded(3, lambda name, p: "rows")
    with pytest.raises(ConfigError, match="the function raised ZeroDivisionError for 'row'"):
        sharded(3, lambda name, p: "flat" if 1 / 0 else "")
    return tuple(p.to_local().numel() for p in model.parameters() if p.ndim == 2)


def test_a_function_chooses_which_matrices_are_whole():
    whole = [p.numel() for p in Model().parameters() if p.ndim == 2]
    held = run_ranks(check_choice, 2)
    spread = [p.ndim == 2 and p.shape == (11, 6) for p in Model().parameters() if p.ndim == 2]
    for numel, is_spread, *parts in zip(whole, spread, *held, strict=True):
        assert sum(parts) == numel
        assert is_spread or sorted(parts) == [0, numel]
