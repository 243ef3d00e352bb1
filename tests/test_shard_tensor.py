"""ShardTensor: what the parameters are between steps, and that it never answers for a part only."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from ranks import run_ranks
from shardwise import ShardTensor, gathered, shard, stats
from shardwise.errors import ShardError, StateError

LAYOUTS = ("rows", "flat")
STAGES = (0, 1, 2, 3)
Rows = list[Any]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Shapes that divide by nothing: 7 x 3, 5 x 3, 3 x 5, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList(Block(3, 5) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class WithEmpty(Net):
    """The same and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.nothing.sum()


class Even(nn.Module):
    """Every slice of every parameter on 1, 2 or 3 ranks is a multiple of 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 64))
        self.bias = nn.Parameter(torch.randn(384))


def pair(layout: str, stage: int = 3, make: Callable[[], nn.Module] = Net) -> list[nn.Module]:
    """Return the same model twice, plain and sharded."""
    torch.manual_seed(1)
    plain = make()
    return [plain, shard(copy.deepcopy(plain), stage=stage, layout=layout)]


def named(models: Iterable[nn.Module]) -> list[tuple[str, Any, Any]]:
    plain, sharded = (dict(m.named_parameters()) for m in models)
    assert plain.keys() == sharded.keys()
    return [(name, plain[name], sharded[name]) for name in plain]


def give_grads(models: Iterable[nn.Module], seed: int) -> None:
    """Give both models the same gradients, as full tensors."""
    generator = torch.Generator().manual_seed(seed)
    for _, plain, sharded in named(models):
        grad = torch.randn(plain.shape, generator=generator)
        plain.grad, sharded.grad = grad, grad


def assert_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert type(actual) in (Tensor, nn.Parameter), f"{what}: a {type(actual).__name__}"
    assert actual.dtype == expected.dtype, what
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=what)


def both(rank: int, world_size: int, fn_name: str) -> None:
    """Run a check of this module for both layouts."""
    for layout in LAYOUTS:
        globals()[fn_name](layout)


def both_layouts(fn: Callable[[str], None], sizes: Iterable[int] = (1, 2, 3)) -> None:
    for world_size in sizes:
        run_ranks(both, world_size, fn.__name__)


# What it is.


def check_identity(layout: str) -> None:
    for stage in STAGES:
        plain, sharded = pair(layout, stage, WithEmpty)
        for name, expected, param in named([plain, sharded]):
            assert isinstance(param, ShardTensor) and isinstance(param, DTensor), name
            assert isinstance(param, nn.Parameter), name
            assert param.shape == expected.shape and param.size() == expected.size()
            assert param.dtype == expected.dtype and param.ndim == expected.ndim
            assert param.numel() == expected.numel() and param.requires_grad and param.is_leaf
            assert param.stride() == expected.stride() and param.device == expected.device
            assert_bits(param.full_tensor(), expected.data, name)
            assert param.to_local().data_ptr() == param._local_tensor.data_ptr()
            if stage == 0:
                assert param.placements == (Replicate(),)
            elif layout == "rows" and param.ndim:
                assert param.placements == (Shard(0),)
            else:
                assert repr(param.placements[0]).startswith("Ragged(")
                lo, hi = param.placements[0].lo, param.placements[0].hi  # type: ignore[attr-defined]
                assert_bits(param.to_local(), expected.data.reshape(-1)[lo:hi], name)


def test_a_parameter_is_a_dtensor_with_its_global_shape_and_its_values() -> None:
    both_layouts(check_identity)


def rows_like_torch(rank: int, world_size: int) -> None:
    for stage in (1, 2, 3):
        plain, sharded = pair("rows", stage, WithEmpty)
        for name, expected, param in named([plain, sharded]):
            if not param.ndim:
                continue
            mesh = param.device_mesh
            theirs = distribute_tensor(expected.data, mesh, [Shard(0)])
            assert_bits(param.to_local(), theirs.to_local(), name)
            assert param.to_local().shape == theirs.to_local().shape, name
            assert param.placements == theirs.placements and param.shape == theirs.shape


def test_rows_shards_are_the_shards_of_torch_uneven_ones_too() -> None:
    for world_size in (1, 2, 3, 4):
        run_ranks(rows_like_torch, world_size)


# Optimizers.


class Lion(torch.optim.Optimizer):
    """Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                update = (state["m"] * 0.9 + p.grad * 0.1).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])
                state["m"].lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, maximize=True),
    "adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "nadam foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "lion": Lion,
}
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the usual two groups: matrices decay, the rest does not and has another rate."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim >= 2]
    others = [p for p in params if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]


def train_both(models: list[nn.Module], make: Callable[[Any], torch.optim.Optimizer]) -> None:
    optimizers = [make(groups_of(m)) for m in models]
    schedulers = [LambdaLR(o, lambda step: 1 / (step + 1)) for o in optimizers]
    for step in range(3):
        give_grads(models, step)
        if step == 1:  # a parameter without a gradient keeps its value and its state
            for model in models:
                next(model.parameters()).grad = None
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    states = [
        {n: o.state[p] for n, p in m.named_parameters()}
        for m, o in zip(models, optimizers, strict=True)
    ]
    for name in states[0]:
        assert states[0][name].keys() == states[1][name].keys(), name
        for key, value in states[0][name].items():
            ours = states[1][name][key]
            if isinstance(value, Tensor) and value.shape:
                assert isinstance(ours, ShardTensor) and ours.shape == value.shape, (name, key)


def check_optimizers(layout: str) -> None:
    for stage in (0, 3):
        for label, make in OPTIMIZERS.items():
            models = pair(layout, stage, WithEmpty)
            train_both(models, make)
            for name, expected, param in named(models):
                what = f"{label}, stage {stage}, {layout}: {name}"
                assert_bits(param.full_tensor(), expected.data, what)


def test_elementwise_optimizers_make_the_steps_that_they_make_on_full_tensors() -> None:
    both_layouts(check_optimizers)


def check_fused_optimizers(layout: str) -> None:
    for label, make in FUSED.items():
        for stage in (0, 3):
            models = pair(layout, stage, Even)
            train_both(models, make)
            for name, expected, param in named(models):
                assert_bits(param.full_tensor(), expected.data, f"{label}, {layout}: {name}")
            # A slice that does not fill the vector registers takes the kernel's scalar tail, whose
            # multiply-adds round twice: one unit in the last place per operation.
            models = pair(layout, stage)
            train_both(models, make)
            for name, expected, param in named(models):
                torch.testing.assert_close(
                    param.full_tensor(), expected.data, rtol=1e-6, atol=1e-7, msg=name
                )


def test_fused_optimizers_make_the_same_steps() -> None:
    both_layouts(check_fused_optimizers)


def check_state_access(layout: str) -> None:
    models = pair(layout)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    give_grads(models, 0)
    for optimizer in optimizers:
        optimizer.step()
    for name, plain, param in named(models):
        assert_bits(param.grad.full_tensor(), plain.grad, name)
        for key in ("exp_avg", "exp_avg_sq"):
            expected, state = optimizers[0].state[plain][key], optimizers[1].state[param][key]
            assert_bits(state.full_tensor(), expected, f"{name} {key}")
            written = torch.arange(state.numel()).reshape(state.shape) * 0.5
            state.copy_(written)
            assert_bits(state.full_tensor(), written, f"{name} {key}")


def test_gradients_and_optimizer_state_are_read_whole_and_written_whole() -> None:
    both_layouts(check_state_access)


def check_scheduler_state(layout: str) -> None:
    models = pair(layout)
    made = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    cycles = [OneCycleLR(o, max_lr=0.2, total_steps=5) for o in made]
    for step in range(4):
        give_grads(models, step)
        for optimizer, cycle in zip(made, cycles, strict=True):
            optimizer.step()
            cycle.step()
    for name, plain, param in named(models):
        assert_bits(param.full_tensor(), plain.data, name)


def test_schedulers_that_change_momentum_too_work_as_before() -> None:
    both_layouts(check_scheduler_state, (3,))


# Norms and clipping.

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))


def clip_reports(rank: int, world_size: int) -> list[Any]:
    """Clip in every way; return (label, norm) of each."""
    found = []
    for layout in LAYOUTS:
        for stage in (0, 3):
            models = pair(layout, stage)
            plain, sharded = models
            for norm_type in NORM_TYPES:
                for foreach in (None, True, False):
                    give_grads(models, 3)
                    label = f"{layout}, stage {stage}, norm {norm_type}, foreach {foreach}"
                    before = stats(sharded).num_collectives.get("shard.scalars", 0)
                    norms = [
                        nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type, True, foreach)
                        for m in models
                    ]
                    torch.testing.assert_close(norms[1].item(), norms[0].item(), rtol=1e-6, atol=0)
                    sent = stats(sharded).num_collectives.get("shard.scalars", 0) - before
                    assert sent == (0 if stage == 0 or world_size == 1 else 1), (label, sent)
                    for name, expected, param in named(models):
                        scaled = param.grad.full_tensor()
                        torch.testing.assert_close(
                            scaled, expected.grad, rtol=1e-6, atol=1e-9, msg=f"{label}: {name}"
                        )
                    found.append((label, norms[1].item()))
                    grads = [p.grad for p in sharded.parameters()]
                    total = nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
                    found.append((f"{label}, again", float(total)))
                    assert abs(float(total) - 0.5) < 1e-3
    return found


def test_clipping_is_right_the_same_on_every_rank_and_one_collective() -> None:
    for world_size in (1, 2, 3):
        first, *others = run_ranks(clip_reports, world_size)
        assert all(other == first for other in others)


def check_clip_bits_on_one_rank(layout: str) -> None:
    models = pair(layout)
    for norm_type in NORM_TYPES:
        give_grads(models, 5)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type) for m in models]
        for name, expected, param in named(models):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, msg=name)
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-7)


def test_on_one_rank_clipping_differs_by_no_more_than_its_own_rounding() -> None:
    both_layouts(check_clip_bits_on_one_rank, (1,))


def check_clip_value_and_non_finite(layout: str) -> None:
    models = pair(layout)
    for foreach in (None, True, False):
        give_grads(models, 4)
        for model in models:
            nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
        for name, plain, param in named(models):
            assert_bits(param.grad.full_tensor(), plain.grad, name)
    param = models[1].embed.weight
    broken = torch.ones(param.shape)
    broken[-1, -1] = float("nan")  # on the last rank only
    param.grad = broken
    norm = nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
    assert torch.isnan(norm).item()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(models[1].parameters(), 1.0, error_if_nonfinite=True)


def test_clipping_by_value_is_exact_and_a_nan_of_one_rank_is_seen_by_all() -> None:
    both_layouts(check_clip_value_and_non_finite)


# Reading and writing.


def check_copies(layout: str) -> None:
    for stage in STAGES:
        models = pair(layout, stage)
        give_grads(models, 6)
        for name, plain, param in named(models):
            value = torch.randn(plain.shape, generator=torch.Generator().manual_seed(8))
            with torch.no_grad():
                param.copy_(value)
            assert_bits(param.full_tensor(), value, name)
            param.data = value + 1
            assert_bits(param.full_tensor(), value + 1, name)
            param.data.copy_(value)
            assert_bits(param.full_tensor(), value, name)
            param.grad.copy_(value * 2)
            assert_bits(param.grad.full_tensor(), value * 2, name)
            param.grad = value * 3
            assert_bits(param.grad.full_tensor(), value * 3, name)
            param.grad = param.grad.clone()
            assert_bits(param.grad.full_tensor(), value * 3, name)
            assert isinstance(param.grad, ShardTensor) and param.grad.shape == plain.shape
            with pytest.raises(StateError, match=r"expected .* got"):
                param.grad = value.double()
            with pytest.raises(ShardError, match="global shape"):
                param.grad = torch.ones(11, 13)
            assert_bits(param.grad.full_tensor(), value * 3, name)


def test_full_values_are_written_into_parameters_and_gradients_by_their_slices() -> None:
    both_layouts(check_copies)


def check_zero_grad(layout: str) -> None:
    models = pair(layout)
    optimizer = torch.optim.SGD(models[1].parameters())
    for zero in (optimizer.zero_grad, models[1].zero_grad):
        give_grads(models, 1)
        zero(set_to_none=False)
        for name, plain, param in named(models):
            assert_bits(param.grad.full_tensor(), torch.zeros(plain.shape), name)
        zero(set_to_none=True)
        assert all(p.grad is None for p in models[1].parameters())


def test_zero_grad_zeroes_or_drops_the_gradients() -> None:
    both_layouts(check_zero_grad)


INITS: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda t: nn.init.normal_(t, 1.0, 0.02),
    "uniform": lambda t: nn.init.uniform_(t, -1, 1),
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, std=0.02, a=-0.04, b=0.04),
    "kaiming_uniform": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal": lambda t: nn.init.kaiming_normal_(t),
    "xavier_uniform": lambda t: nn.init.xavier_uniform_(t),
    "xavier_normal": lambda t: nn.init.xavier_normal_(t),
    "orthogonal": lambda t: nn.init.orthogonal_(t),
    "zeros": lambda t: nn.init.zeros_(t),
    "ones": lambda t: nn.init.ones_(t),
    "constant": lambda t: nn.init.constant_(t, 0.25),
    "bernoulli": lambda t: t.detach().bernoulli_(0.3),
    "exponential": lambda t: t.detach().exponential_(),
}


def check_inits(layout: str) -> None:
    for stage in (1, 3):
        models = pair(layout, stage)
        for label, init in INITS.items():
            for name, plain, param in named(models):
                if plain.ndim != 2 or not plain.numel():
                    continue
                for tensor in (plain, param):
                    torch.manual_seed(11)
                    init(tensor)
                assert_bits(param.full_tensor(), plain.data, f"{label} of {name}")
                after = [torch.rand(())]
                torch.manual_seed(11)
                init(plain)
                assert after == [torch.rand(())], f"{label}: the generator went another way"


def test_initialisers_give_the_values_that_they_give_full_tensors() -> None:
    both_layouts(check_inits)


def check_inits_that_index(layout: str) -> None:
    """What cannot be done on slices is refused, and leaves the values alone."""
    models = pair(layout)
    param, plain = models[1].embed.weight, models[0].embed.weight  # type: ignore[union-attr]
    for init in (lambda t: nn.init.sparse_(t, 0.5), nn.init.eye_):
        param.data = plain.data
        try:
            torch.manual_seed(3)
            init(param)
        except ShardError:
            continue
        torch.manual_seed(3)
        expected = plain.data.clone()
        init(expected)
        assert_bits(param.full_tensor(), expected, "an initialiser that was not refused")


def test_initialisers_that_index_are_right_or_refused() -> None:
    both_layouts(check_inits_that_index, (2, 3))


def check_state_dict(layout: str) -> None:
    for stage in STAGES:
        plain, sharded = pair(layout, stage)
        assert list(sharded.state_dict()) == list(plain.state_dict())
        full = {name: torch.randn(t.shape) for name, t in plain.state_dict().items()}
        assert str(sharded.load_state_dict(full)) == "<All keys matched successfully>"
        for name, _, param in named([plain, sharded]):
            assert_bits(param.full_tensor(), full[name], name)
        shards = {name: t.clone() for name, t in sharded.state_dict().items()}
        nn.init.zeros_(sharded.embed.weight)  # type: ignore[union-attr]
        sharded.load_state_dict(shards)
        for name, value in sharded.state_dict().items():
            assert isinstance(value, ShardTensor)
            assert_bits(value.full_tensor(), full[name], name)
        with pytest.raises(RuntimeError, match="size mismatch"):
            sharded.load_state_dict(full | {"scale": torch.ones(3)})


def test_a_state_dict_has_the_same_keys_and_full_tensors_may_be_loaded() -> None:
    both_layouts(check_state_dict)


def check_optimizer_state_dict(layout: str) -> None:
    models = pair(layout)
    first, second = (torch.optim.AdamW(models[1].parameters(), lr=0.01) for _ in range(2))
    give_grads(models, 1)
    first.step()
    second.load_state_dict(first.state_dict())
    for param in models[1].parameters():
        assert isinstance(second.state[param]["exp_avg"], ShardTensor)
        for key in ("exp_avg", "exp_avg_sq"):
            expected = first.state[param][key].full_tensor()
            assert_bits(second.state[param][key].full_tensor(), expected, key)


def test_an_optimizer_state_dict_is_loaded_by_another_optimizer() -> None:
    both_layouts(check_optimizer_state_dict, (1, 2))


def check_copying(layout: str) -> None:
    models = pair(layout)
    give_grads(models, 1)
    for name, plain, param in named(models):
        copied = copy.deepcopy(param)
        assert isinstance(copied, ShardTensor) and isinstance(copied, nn.Parameter)
        with torch.no_grad():
            param.add_(1)
        assert_bits(copied.full_tensor(), plain.data, name)
        for thing in (param, param.grad):
            with pytest.raises(ShardError, match="cannot be pickled"):
                pickle.dumps(thing)
            with pytest.raises(ShardError, match="cannot be pickled"):
                torch.save(thing, io.BytesIO())
    for operation in (copy.deepcopy, copy.copy, pickle.dumps):
        if operation is not copy.copy:
            with pytest.raises((StateError, ShardError), match=r"deepcopy|pickl"):
                operation(models[1])
    with gathered(models[1]):
        plain_state = copy.deepcopy(models[1].state_dict())
        pickle.dumps(plain_state)
    assert all(type(t) is not ShardTensor for t in plain_state.values())


def test_a_parameter_is_copied_and_a_model_is_not_and_nothing_is_pickled() -> None:
    both_layouts(check_copying, (1, 2))


def check_repr(layout: str) -> None:
    models = pair(layout)
    give_grads(models, 1)
    before = stats(models[1])
    texts = [f"{repr(p)} {p} {p.grad}" for p in models[1].parameters()] + [repr(models[1])]
    assert "'embed.weight'" in texts[0] and "shape=(7, 3)" in texts[0]
    after = stats(models[1])
    assert (after.sent_bytes, after.num_collectives) == (before.sent_bytes, before.num_collectives)


def test_printing_a_parameter_sends_nothing() -> None:
    both_layouts(check_repr, (3,))


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "amin": lambda t: t.amin(),
    "all": lambda t: (t > -2.5).all(),
    "any": lambda t: (t > 2.5).any(),
    "isnan any": lambda t: t.isnan().any(),
    "count_nonzero": lambda t: t.count_nonzero(),
    "torch.sum": torch.sum,
    "torch.mean": torch.mean,
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm inf": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "square sum": lambda t: (t * t).sum(),
    "bool sum": lambda t: (t > 0).sum(),
    "integer max": lambda t: (t * 10).round().to(torch.int64).max(),
}


def check_reductions(layout: str) -> None:
    for stage in (0, 3):
        models = pair(layout, stage, WithEmpty)
        give_grads(models, 2)
        for name, plain, param in named(models):
            for label, reduce in REDUCTIONS.items():
                what = f"{label} of {name}, {layout}, stage {stage}"
                if not plain.numel() and "sum" not in label and "norm" not in label:
                    continue
                expected, ours = reduce(plain.grad), reduce(param.grad)
                assert not isinstance(ours, ShardTensor), what
                assert ours.dtype == expected.dtype and ours.shape == expected.shape, what
                torch.testing.assert_close(ours.item(), expected.item(), rtol=2e-6, atol=1e-6)


def test_reductions_of_the_whole_tensor_are_over_all_ranks() -> None:
    both_layouts(check_reductions)
