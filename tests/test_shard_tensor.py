"""ShardTensor: what the parameters are between steps, and that it never answers for a part only."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import handle_torch_function

from models import Block
from ranks import on_ranks
from roundings import assert_rounded_alike
from shardwise import ShardTensor, gathered, shard
from shardwise.debug import stats
from shardwise.errors import ShardError, StateError

LAYOUTS = ("rows", "flat", "matrices")
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Shapes that 3 does not divide: 7 x 4, 4 x 7, vectors, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class WithEmpty(Net):
    """The same and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 2))

    def forward(self, tokens):
        return super().forward(tokens) + self.nothing.sum()


def pair(layout, stage=3, make=Net):
    """Return the same model twice, plain and sharded."""
    torch.manual_seed(1)
    plain = make()
    return [plain, shard(copy.deepcopy(plain), stage=stage, layout=layout)]


def named(models):
    plain, sharded = (dict(m.named_parameters()) for m in models)
    assert plain.keys() == sharded.keys()
    return [(name, plain[name], sharded[name]) for name in plain]


def give_grads(models, seed):
    """Give both models the same gradients, as full tensors."""
    generator = torch.Generator().manual_seed(seed)
    for _, plain, sharded in named(models):
        grad = torch.randn(plain.shape, generator=generator)
        plain.grad, sharded.grad = grad, grad


def assert_bits(actual, expected, what):
    assert type(actual) in (Tensor, nn.Parameter), f"{what}: a {type(actual).__name__}"
    assert actual.dtype == expected.dtype, what
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=what)


def in_layouts(*sizes):
    """Make a test of a check that ranks do for every layout, at every world size."""
    return lambda check: pytest.mark.parametrize("layout", LAYOUTS)(on_ranks(*sizes)(check))


# What it is.


@in_layouts(1, 3)
def test_a_parameter_is_a_dtensor_with_its_global_shape_and_its_values(layout):
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
                theirs = distribute_tensor(expected.data, param.device_mesh, [Shard(0)])
                assert param.placements == theirs.placements == (Shard(0),)
                assert_bits(param.to_local(), theirs.to_local(), name)
            else:
                assert repr(param.placements[0]).startswith("Ragged(")
                lo, hi = param.placements[0].lo, param.placements[0].hi
                own = expected.data.reshape(-1)[lo:hi]
                is_whole = layout == "matrices" and param.ndim == 2
                own = own.view(-1, param.shape[1]) if is_whole and param.numel() else own
                assert_bits(param.to_local(), own.view_as(param.to_local()), name)
                assert not is_whole or len(own) in (0, len(expected))


# Reading and writing.


@in_layouts(1, 3)
def test_gradients_and_optimizer_state_are_read_whole_and_written_whole(layout):
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


@in_layouts(1, 3)
def test_full_values_are_written_into_parameters_and_gradients_by_their_slices(layout):
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


@in_layouts(1, 3)
def test_a_gradient_that_is_kept_over_the_next_step_keeps_its_values(layout):
    for stage in STAGES:
        sharded = pair(layout, stage)[1]
        tokens = torch.tensor([[0, 2, 6], [1, 3, 5]])
        sharded(tokens).square().sum().backward()
        kept = [p.grad for p in sharded.parameters()]
        values = [g.full_tensor() for g in kept]
        for _ in range(2):
            sharded.zero_grad()
            (sharded(tokens) * 3).square().sum().backward()
            for param, grad, value in zip(sharded.parameters(), kept, values, strict=True):
                assert_bits(grad.full_tensor(), value, f"stage {stage}, {layout}")
                assert not torch.equal(param.grad.full_tensor(), value)


@in_layouts(1, 3)
def test_a_state_dict_has_the_same_keys_and_full_tensors_may_be_loaded(layout):
    for stage in STAGES:
        plain, sharded = pair(layout, stage)
        assert list(sharded.state_dict()) == list(plain.state_dict())
        full = {name: torch.randn(t.shape) for name, t in plain.state_dict().items()}
        assert str(sharded.load_state_dict(full)) == "<All keys matched successfully>"
        for name, _, param in named([plain, sharded]):
            assert_bits(param.full_tensor(), full[name], name)
        shards = {name: t.clone() for name, t in sharded.state_dict().items()}
        nn.init.zeros_(sharded.embed.weight)
        sharded.load_state_dict(shards)
        for name, value in sharded.state_dict().items():
            assert isinstance(value, ShardTensor)
            assert_bits(value.full_tensor(), full[name], name)
        with pytest.raises(RuntimeError, match="size mismatch"):
            sharded.load_state_dict(full | {"scale": torch.ones(3)})


@in_layouts(1, 2)
def test_a_parameter_is_copied_and_nothing_is_pickled(layout):
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
    with pytest.raises((StateError, ShardError), match="pickl"):
        pickle.dumps(models[1])
    with gathered(models[1]):
        plain_state = copy.deepcopy(models[1].state_dict())
        pickle.dumps(plain_state)
    assert all(type(t) is not ShardTensor for t in plain_state.values())


@in_layouts(3)
def test_printing_a_parameter_sends_nothing(layout):
    models = pair(layout)
    give_grads(models, 1)
    before = stats(models[1])
    texts = [f"{p!r} {p} {p.grad}" for p in models[1].parameters()] + [repr(models[1])]
    assert any("'embed.weight'" in text and "shape=(7, 4)" in text for text in texts)
    after = stats(models[1])
    assert (after.sent_bytes, after.num_collectives) == (before.sent_bytes, before.num_collectives)


REDUCTIONS = {
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


@in_layouts(1, 3)
def test_reductions_of_the_whole_tensor_are_over_all_ranks(layout):
    for stage in (0, 3):
        models = pair(layout, stage, WithEmpty)
        give_grads(models, 2)
        for name, plain, param in named(models):
            for label, reduce in REDUCTIONS.items():
                what = f"{label} of {name}, {layout}, stage {stage}"
                if not plain.numel() and label not in ("sum", "torch.sum", "norm", "norm 1"):
                    continue  # torch has no maximum of nothing
                expected, ours = reduce(plain.grad), reduce(param.grad)
                assert not isinstance(ours, ShardTensor), what
                assert ours.dtype == expected.dtype and ours.shape == expected.shape, what
                # Sums of signed terms: measured against what all terms come to.
                scale = max(plain.grad.abs().sum().item(), (plain.grad**2).sum().item(), 1.0)
                assert_rounded_alike(
                    *(float(ours), float(expected), plain.numel() + 2, what), scale=scale
                )


@on_ranks(3)
def test_what_is_refused_is_refused_on_every_rank():
    """Rank 2 has no element of either gradient, and refuses as the others do."""
    model = nn.ParameterDict({n: torch.ones(size) for n, size in (("a", 12), ("b", 12), ("c", 24))})
    sharded = shard(nn.Sequential(model), layout="flat")
    params = list(sharded.parameters())
    for param in params:
        param.grad = torch.ones(param.shape)
    with pytest.raises(ShardError, match="have different cuts"):
        params[0].grad + params[1].grad
    for use in (lambda t: t @ t, lambda t: t[0], lambda t: t.numpy(), list):
        for tensor in (params[0].grad, params[0].grad.clone()):
            with pytest.raises(ShardError, match=r"Use t\.full_tensor\(\)"):
                use(tensor)


def _foreach_unheard_of_(tensors):
    return handle_torch_function(_foreach_unheard_of_, tensors, tensors)


def _fused_unheard_of_(tensors):
    return handle_torch_function(_fused_unheard_of_, tensors, tensors)


@on_ranks(2)
def test_a_function_of_lists_that_is_not_known_to_be_elementwise_is_refused():
    model = shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    for function in (_foreach_unheard_of_, _fused_unheard_of_):
        with pytest.raises(ShardError, match=function.__name__):
            function(grads)
