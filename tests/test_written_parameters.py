"""Parameters that a forward pass, or code inside `gathered`, writes, replaces, moves or adds."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize, prune

import shardwise
from ranks import on_ranks
from shardwise import Precision, fully_shard, gathered, shard
from shardwise.errors import ShardError, StateError


class Codebook(nn.Module):
    """Halves its code in each forward pass, in one of several ways."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.linear = nn.Linear(4, 4)
        self.code = nn.Parameter(torch.ones(8, 4), requires_grad=False)

    def forward(self, x):
        self.write(self)
        return self.linear(x) + self.code.sum(0)


def in_place(module):
    module.code.data.mul_(0.5)


def through_a_view(module):
    module.code.data[:4].mul_(0.5)
    module.code.data.view(-1)[16:].mul_(0.5)


def assigned(module):
    module.code.data = module.code.data * 0.5


def replaced(module):
    module.code = nn.Parameter(module.code.detach() * 0.5, requires_grad=False)


def over_other_memory(module):
    with torch.no_grad():
        module.code.set_(module.code * 0.5)


def under_no_grad(module):
    with torch.no_grad():
        module.code.copy_(module.code * 0.5)


# Kept if the shards lie in the full parameter, else refused; and always refused.
KEPT = (in_place, through_a_view, assigned, replaced)
REFUSED = (over_other_memory, under_no_grad)
HOMES = {
    "stage 0": ({"stage": 0}, True),
    "stage 1": ({"stage": 1}, True),
    "stage 2 flat": ({"stage": 2, "layout": "flat"}, True),
    "stage 1 bf16": ({"stage": 1, "precision": "bf16"}, False),
    "stage 1 offload": ({"stage": 1, "offload": "cpu"}, False),
    "stage 3": ({"stage": 3}, False),
    "stage 3 flat": ({"stage": 3, "layout": "flat"}, False),
}


@pytest.mark.parametrize("home", HOMES)
@on_ranks(1, 2)
def test_a_write_to_a_frozen_parameter_in_forward_is_kept_or_refused_by_name(world_size, home):
    settings, lies_in_full = HOMES[home]
    lies_in_full |= world_size == 1 and settings["stage"] == 3
    for training in (True, False):
        for write in (*KEPT, *REFUSED):
            model = shard(nn.Sequential(Codebook(write), nn.Linear(4, 4)), units=[], **settings)
            model.train(training)
            if lies_in_full and write in KEPT:
                for _ in range(2):
                    model(torch.ones(2, 4)).sum().backward()
                assert model[0].code.full_tensor().eq(0.25).all(), write.__name__
                continue
            with pytest.raises(ShardError, match=r"'0\.code' was written") as error:
                model(torch.ones(2, 4))
            assert "inside the forward pass" in str(error.value)
            assert model[0].code.full_tensor().eq(1).all() or lies_in_full
            model[0].write = lambda module: None
            model(torch.ones(2, 4)).sum().backward()


def reads_before(module):
    module.read = module.code.data
    module.code.data = module.code.data * 0.5


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1, 2)
def test_tensors_over_old_data_keep_its_values_after_an_assignment_in_forward(world_size, stage):
    for write in (assigned, replaced, reads_before):
        model = shard(nn.Sequential(Codebook(write), nn.Linear(4, 4)), units=[], stage=stage)
        code = model[0].code
        held = [code.data, code.detach(), model.state_dict()["0.code"], code.data.view(-1)]
        model(torch.ones(2, 4)).sum().backward()
        if write is reads_before:
            assert model[0].read.eq(1).all()
        for each in held:
            old = each.full_tensor() if hasattr(each, "full_tensor") else each
            assert old.eq(1).all(), write.__name__
        assert model[0].code.full_tensor().eq(0.5).all()


@on_ranks(2)
def test_refused_assignment_in_forward_is_not_applied_by_the_next_pass(rank):
    model = shard(Codebook(assigned), stage=0)
    view = model.code.data.view(-1)[3:9]
    x = torch.ones(2, 4)
    with pytest.raises(ShardError, match="'code' was written or replaced"):
        model(x)
    model.write = lambda module: None
    for _ in range(2):
        model(x)
        assert torch.equal(model.code.full_tensor(), torch.ones(8, 4))
    assert torch.equal(view, torch.ones(6))


@on_ranks(2)
def test_a_trained_parameter_replaced_in_forward_is_refused():
    class Renewed(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(self.weight.detach().clone())
            return super().forward(x)

    for stage in (0, 3):
        model = shard(nn.Sequential(Renewed(4, 4)), stage=stage)
        with pytest.raises(ShardError, match=r"'0\.weight' was written or replaced.*no optimizer"):
            model(torch.ones(2, 4))


@on_ranks(2)
def test_reading_data_and_wrapping_the_parameter_anew_change_nothing():
    class Wrapped(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(self.weight.data, requires_grad=False)
            self.bias.data = self.bias.data
            return x @ self.weight.data.t() + self.bias

    for stage in (0, 1, 3):
        torch.manual_seed(0)
        plain = Wrapped(4, 4)
        plain.weight.requires_grad_(False)
        model = shard(nn.Sequential(copy.deepcopy(plain)), stage=stage)
        for _ in range(2):
            assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@pytest.mark.parametrize("write", [in_place, assigned, replaced, under_no_grad])
@on_ranks(2)
def test_fully_shard_warns_once_of_a_write_in_forward(write):
    model = fully_shard(nn.Sequential(Codebook(write), nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match=r"'0\.code' was written or replaced"):
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()


# -- what no version shows
class Unseen(nn.Linear):
    """Writes its weight through an array, on one rank, or not at all."""

    writes = "never"

    def forward(self, x):
        if self.writes == "always" or (self.writes == "on rank 1" and dist.get_rank() == 1):
            self.weight.detach().numpy()[0] += 1.0
        if self.writes == "known":
            self.weight.data[0] += 1.0
        return super().forward(x)


SHARDINGS = {
    "stage 0": lambda model: shard(model, stage=0),
    "stage 2": lambda model: shard(model, stage=2),
    "stage 3": lambda model: shard(model, stage=3),
    "fully_shard": fully_shard,
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.filterwarnings("ignore:.*a NumPy array was made")
@on_ranks(1, 3)
def test_writes_that_no_version_shows_are_found_by_their_values(world_size, sharding):
    model = SHARDINGS[sharding](nn.Sequential(Unseen(4, 4), nn.Linear(4, 4)))
    with shardwise.check.writes(model):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 4))
    model[0].writes = "always" if world_size == 1 else "on rank 1"
    where = "rank 0" if world_size == 1 else "rank 1"
    with (
        pytest.raises(ShardError, match=rf"no version shows it: '0\.weight' on {where}\."),
        shardwise.check.writes(model),
    ):
        model(torch.ones(2, 4)).sum().backward()
    with (
        pytest.raises(ShardError, match="no version shows it"),
        shardwise.check.writes(model),
    ):
        model[0].writes = "never"
        with shardwise.check.writes(model):
            model(torch.ones(2, 4))
        model[0].writes = "always"
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()  # outside nobody looks


@on_ranks(2)
def test_check_of_writes_passes_writes_that_are_kept_and_those_inside_gathered():
    model = shard(nn.Sequential(Unseen(4, 4), nn.Linear(4, 4)), stage=2)
    model[0].weight.requires_grad_(False)
    model[0].writes = "known"
    before = model[0].weight.full_tensor().clone()
    with shardwise.check.writes(model):
        model(torch.ones(2, 4)).sum().backward()
        with gathered(model, writeback=True):
            model[1].weight.detach().numpy()[:] = 2.0
    assert torch.equal(model[0].weight.full_tensor()[0], before[0] + 1.0)
    assert model[1].weight.full_tensor().eq(2.0).all()


# -- inside gathered


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2

    def right_inverse(self, x):
        return x * 0.5


def parametrized(model):
    parametrize.register_parametrization(model[0], "weight", Doubled())


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.5)


def pruned_for_good(model):
    pruned(model)
    prune.remove(model[0], "weight")


def renewed(model):
    model[2].weight = nn.Parameter(model[2].weight.detach() * 0.5)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(1, 2)
def test_what_code_in_gathered_moves_or_replaces_is_kept(stage):
    for change in (parametrized, pruned, pruned_for_good, renewed):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        model = shard(copy.deepcopy(plain), stage=stage, units=[nn.Linear])
        change(plain)
        with gathered(model, writeback=True):
            change(model)
        for each in (plain, model):
            train(each)
        with gathered(model):
            actual = {name: p.detach() for name, p in model.named_parameters()}
        expected = {name: p.detach() for name, p in plain.named_parameters()}
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=change.__name__)


def removed(model):
    del model[0].weight


def added(model):
    model[0].extra = nn.Parameter(torch.ones(3))


def reshaped(model):
    model[0].weight = nn.Parameter(torch.ones(2, 6))


def moved_away(model):
    model[2].other = model[0].weight
    del model[0]._parameters["weight"]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_what_gathered_cannot_keep_is_refused_and_the_values_stay(stage):
    wrong = {removed: "removed", added: r"'0\.extra' was added", reshaped: "another shape",
             moved_away: "out of its unit"}  # fmt: skip
    for change, text in wrong.items():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        shard(model, stage=stage, units=[nn.Linear])
        before = [p.full_tensor().clone() for p in model.parameters()]
        with pytest.raises(StateError, match=text), gathered(model, writeback=True):
            change(model)
        after = [p.full_tensor() for p in model.parameters()]
        assert all(map(torch.equal, before, after)), change.__name__
        train(model)
    with pytest.raises(StateError, match="without writeback"), gathered(model):
        renewed(model)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, 3)
def test_what_one_rank_alone_changes_in_gathered_is_refused_on_all(world_size, stage):
    for change in (parametrized, pruned, renewed, removed, added, moved_away):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        shard(model, stage=stage, units=[nn.Linear])
        before = [p.full_tensor().clone() for p in model.parameters()]
        with (
            pytest.raises(StateError, match="changed the model differently: rank"),
            gathered(model, writeback=True),
        ):
            if dist.get_rank() == world_size - 1:
                change(model)
        after = [p.full_tensor() for p in model.parameters()]
        assert all(map(torch.equal, before, after)), change.__name__
        train(model)
    with gathered(model, writeback=True, source=0):
        if dist.get_rank() == 0:
            model[2].weight = nn.Parameter(torch.full_like(model[2].weight, 7.0))
    assert model[2].weight.full_tensor().eq(7.0).all()


def unparametrized(model):
    parametrize.remove_parametrizations(model[0], "weight")
    added(model)


def parametrized_again(model):
    parametrize.register_parametrization(model[0], "bias", Doubled())
    added(model)


def normed(model):
    nn.utils.spectral_norm(model[2])
    added(model)


@pytest.mark.parametrize("change", [unparametrized, parametrized_again, normed])
@on_ranks(2)
def test_modules_are_as_before_where_a_change_in_gathered_is_refused(change):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    shard(model, stage=3, units=[nn.Linear])
    with gathered(model, writeback=True):
        parametrized(model)
    with gathered(model):
        before = copy.deepcopy(model.state_dict())
        out = model(torch.ones(2, 6))
    with pytest.raises(StateError, match="was added"), gathered(model, writeback=True):
        change(model)
    assert torch.equal(model(torch.ones(2, 6)), out)
    with gathered(model):
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@on_ranks(2)
def test_an_exception_inside_gathered_leaves_model_and_values_as_they_were():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    shard(model, stage=3, units=[nn.Linear])
    out = model(torch.ones(2, 6))
    for change in (parametrized, pruned, renewed, added):
        with pytest.raises(ValueError, match="inside"), gathered(model, writeback=True):
            if change is not added or dist.get_rank() == 1:
                change(model)
            raise ValueError("inside")
        assert torch.equal(model(torch.ones(2, 6)), out), change.__name__


@on_ranks(2)
def test_without_writeback_nothing_of_what_is_refused_is_kept():
    def both(model):
        parametrize.register_parametrization(model[2], "bias", Doubled(), unsafe=True)
        renewed(model)

    for source, change in ((None, both), (0, renewed)):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        shard(model, stage=3, units=[nn.Linear])
        out = model(torch.ones(2, 6))
        with pytest.raises(StateError), gathered(model, source=source):
            if source is None or dist.get_rank() == 1:
                change(model)
        assert torch.equal(model(torch.ones(2, 6)), out)


@on_ranks(2)
def test_a_second_name_given_inside_gathered_is_kept_as_a_tie():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    shard(model, stage=3, units=[nn.Linear])
    with gathered(model):
        model[0].alias = model[0].weight
    assert model[0].alias is model[0].weight
    train(model)
    assert model[0].alias is model[0].weight


# -- codes


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(1, 2)
def test_codes_in_float_storage_are_never_cast_or_encoded(storage):
    class Coded(nn.Module):
        """Reads the bits of a weight that lies in a float dtype, as bitsandbytes' layers do."""

        def __init__(self):
            super().__init__()
            codes = torch.arange(256, dtype=torch.uint8).repeat(4).view(storage)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.codes.quant_state = "a scale per block"
            self.scale = nn.Parameter(torch.full((4,), 0.5).to(storage), requires_grad=False)

        def forward(self, x):
            seen.append((self.codes.detach().view(torch.uint8).clone(), self.scale.dtype))
            return x * 2

    expected = torch.arange(256, dtype=torch.uint8).repeat(4)
    settings = ["fp32", "bf16", "fp16", Precision(torch.bfloat16, gather="int8")]
    for stage in (0, 1, 3):
        for precision in settings[: 4 if stage else 3]:
            seen = []
            model = nn.Sequential(Coded(), nn.Linear(4, 4))
            shard(model, stage=stage, precision=precision, units=[])(torch.ones(2, 4))
            assert torch.equal(seen[0][0], expected), (stage, precision)


@on_ranks(1, 2)
def test_full_parameters_are_copied_and_wrapped_as_ordinary_ones():
    class Copies(nn.Linear):
        def forward(self, x):
            copied = copy.deepcopy(self)
            copied.weight.data.mul_(2)
            wrapped = nn.Parameter(self.weight)
            assert type(copy.deepcopy(self.weight)) is nn.Parameter and wrapped.data is not None
            return super().forward(x) + copied.weight.sum() * 0 + wrapped.sum().detach() * 0

    for stage in (0, 3):
        torch.manual_seed(0)
        plain = Copies(4, 4)
        model = shard(nn.Sequential(copy.deepcopy(plain)), stage=stage)
        assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@on_ranks(2)
def test_a_write_is_seen_however_many_parameters_were_read():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            shape = torch.ones(2)
            self.all = nn.ParameterList(nn.Parameter(shape.clone()) for _ in range(70))

        def forward(self, x):
            read = [p.data for p in self.all]
            read[0].mul_(0.5)
            return sum(p.sum() for p in self.all) * x

    with pytest.raises(ShardError, match=r"'0\.all\.0' was written"):
        shard(nn.Sequential(Many()), stage=3)(torch.ones(1))
