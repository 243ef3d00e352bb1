"""`save` and `load` as their caller sees them: what they refuse, what they restore, and how."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise
from ranks import on_ranks, run_ranks
from saving import (
    Net,
    Setting,
    adamw,
    build,
    differences,
    flip,
    full,
    take_step,
    truth_of,
    warns_on_rank_0,
)
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError

SIZES = (1, 3)


def message(kind, call):
    """Return the text of the error that a call must raise."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def steps(run, *numbers):
    return [take_step(run, number) for number in numbers]


def saved(path, world_size, *numbers):
    """Save a run after these steps; return it."""
    run = build(Setting(world_size))
    steps(run, *numbers)
    shardwise.save(path, run.model, run.optimizer)
    return run


# ---------------------------------------------------------------------------------- what is refused


@on_ranks(*SIZES)
def test_a_save_inside_an_accumulation_window_is_refused(world_size, tmp_path):
    texts = []
    for stage in range(4):
        run = build(Setting(world_size, stage))
        save = partial(shardwise.save, tmp_path / "c", run.model, run.optimizer, replace=True)
        with shardwise.accumulate(run.model, last=False):
            run.model(torch.zeros(4, 3, dtype=torch.int64)).sum().backward()
            texts.append(message(StateError, save))
        if stage < 2:  # those that reduce once a step hold the window's sum here
            texts.append(message(StateError, save))
        run.optimizer.zero_grad()
        save()
    assert len(texts) == 6
    assert all("accumulation window" in text and "zero_grad" in text for text in texts)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@on_ranks(*SIZES)
def test_a_checkpoint_that_exists_is_only_replaced_when_asked(world_size, tmp_path):
    path = tmp_path / "c"
    run = saved(path, world_size)
    steps(run, 0)
    text = message(CheckpointError, lambda: shardwise.save(path, run.model, run.optimizer))
    shardwise.save(path, run.model, run.optimizer, replace=True)
    other = build(Setting(world_size), seed=4)
    shardwise.load(path, other.model, other.optimizer, extra={})
    other.schedule, other.scaler = run.schedule, run.scaler
    assert "exists already" in text and "replace=True" in text
    assert not differences(truth_of(other), truth_of(run))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@on_ranks(*SIZES)
def test_a_missing_checkpoint_is_named(world_size, tmp_path):
    run = build(Setting(world_size))
    before = truth_of(run)
    for path, step, kind, said in (
        (
            tmp_path / "nowhere",
            None,
            CheckpointError,
            f"{tmp_path}/nowhere: there is no checkpoint",
        ),
        (tmp_path, None, CheckpointError, f"{tmp_path}: there is no checkpoint"),
        (tmp_path / "nowhere", 7, DamagedCheckpoint, "step-00000007"),
    ):
        load = lambda path=path, step=step: shardwise.load(path, run.model, step=step)  # noqa: E731
        assert said in message(kind, load)
    assert not differences(truth_of(run), before)
    steps(run, 0)  # it is not broken


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.few = nn.Parameter(torch.randn(4))


class More(Net):
    def __init__(self):
        super().__init__()
        self.further = nn.Linear(2, 2)
        self.register_buffer("ones", torch.ones(2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def groups(first, **options):
    """Return what makes an optimizer of two groups, the first of so many parameters."""

    def make(model):
        params = [p for p in model.parameters() if p.requires_grad]
        split = [{"params": params[:first], **options}, {"params": params[first:]}]
        return torch.optim.AdamW(split, lr=0.02)

    return make


@on_ranks(*SIZES)
def test_what_does_not_fit_is_refused_before_anything_changes(world_size, tmp_path):
    setting, path = Setting(world_size), tmp_path / "c"
    run = build(setting)
    steps(run, 0)
    shardwise.save(path, run.model, run.optimizer, extra={"a": 1})
    plain = tmp_path / "plain"
    shardwise.save(plain, run.model)

    def refused(folder, other, *parts, **more):
        before = truth_of(other)
        load = lambda: shardwise.load(folder, other.model, other.optimizer, **more)  # noqa: E731
        text = message(CheckpointError, load)
        assert all(part in text for part in parts), text
        assert not differences(truth_of(other), before), parts
        steps(other, 0)  # nothing was changed, so it runs on

    refused(path, build(setting, make_model=Wider), "'few' has shape (2,) there and (4,) here")
    refused(path, build(setting, make_model=More), "further.weight", "ones", "strict=False")
    refused(path, build(setting, make_optimizer=sgd), "AdamW there and SGD here")
    refused(path, build(setting, make_optimizer=groups(1, lr=0.5)), "1 groups there and 2 here")
    split = build(setting, make_optimizer=groups(2))
    shardwise.save(tmp_path / "split", split.model, split.optimizer)
    other = build(setting, make_optimizer=groups(1))
    refused(tmp_path / "split", other, "is in group 0 of the optimizer there, not here")
    refused(plain, build(setting), "optimizer=None")
    refused(path, build(setting), "no 'schedule'", extra={"schedule": run.schedule})


@on_ranks(*SIZES)
def test_an_optimizer_of_other_parameters_is_refused(world_size, tmp_path):
    run = build(Setting(world_size))
    stranger = torch.optim.SGD([*run.model.parameters(), nn.Parameter(torch.ones(3))], lr=1.0)
    text = message(ConfigError, lambda: shardwise.save(tmp_path / "c", run.model, stranger))
    assert "not one of the sharded model's" in text and not list(tmp_path.iterdir())


@on_ranks(3)
def test_state_that_one_rank_cannot_write_raises_on_all(rank, world_size, tmp_path):
    run = build(Setting(world_size))
    extra = {"fine": 1, "odd": (lambda: 0) if rank == 1 else 2}
    text = message(CheckpointError, lambda: shardwise.save(tmp_path / "c", run.model, extra=extra))
    assert text.startswith("rank 1: ") and "odd" in text
    shardwise.save(tmp_path / "c", run.model, extra={"fine": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@on_ranks(3)
def test_ranks_with_other_tensors_to_save_are_told(rank, world_size, tmp_path):
    path = tmp_path / "c"
    run = build(Setting(world_size, 0))
    if rank == 2:
        run.optimizer.zero_grad()
        for p in run.model.parameters():
            p.grad = torch.zeros_like(p)
        run.optimizer.step()
    text = message(CheckpointError, lambda: shardwise.save(path, run.model, run.optimizer))
    assert "rank 2 has other" in text and "stepped on some ranks only" in text


# ------------------------------------------------------------------------ what is loaded, and how


@on_ranks(*SIZES)
def test_without_strict_what_both_have_is_loaded(rank, world_size, tmp_path):
    path = tmp_path / "c"
    run = saved(path, world_size, 0)
    other = build(Setting(world_size), seed=3, make_model=More)
    steps(other, 1)
    before, there = truth_of(other), truth_of(run)
    with warns_on_rank_0(rank, "in part"):
        loaded = shardwise.load(path, other.model, other.optimizer, strict=False)
    assert loaded.missing and not loaded.unexpected
    after = truth_of(other)
    new = {key: value for key, value in after.items() if "further" in key or "ones" in key}
    shared = {k: v for k, v in after.items() if k in there and k.split()[0] in ("param", "state")}
    problems = differences(new, {key: before[key] for key in new})
    problems += differences(shared, {key: there[key] for key in shared})
    steps(other, 2)
    shardwise.save(tmp_path / "more", other.model, other.optimizer)
    with warns_on_rank_0(rank, "in part"):
        loaded = shardwise.load(tmp_path / "more", run.model, run.optimizer, strict=False)
    assert loaded.unexpected and not loaded.missing
    problems += differences(
        {k: v for k, v in truth_of(run).items() if k.startswith("param")},
        {k: v for k, v in truth_of(other).items() if k.startswith("param") and k in there},
    )
    assert len(new) == 3  # two parameters, a buffer; no state for a parameter without gradient
    assert not problems


@on_ranks(*SIZES)
def test_another_master_dtype_is_only_loaded_with_cast(world_size, tmp_path):
    path = tmp_path / "c"
    short = shardwise.Precision(torch.bfloat16, torch.bfloat16, torch.float32)

    def bf16(setting, seed):
        torch.manual_seed(seed)
        model = shardwise.shard(Net(), stage=setting.stage, layout="flat", precision=short)
        return model, adamw(model)

    run = saved(path, world_size, 0, 1)
    model, optimizer = bf16(Setting(world_size), 3)
    text = message(CheckpointError, lambda: shardwise.load(path, model, optimizer))
    shardwise.load(path, model, optimizer, cast=True)
    expected = {}
    for name, p in run.model.named_parameters():
        expected[name] = full(p).to(torch.bfloat16 if p.requires_grad else torch.float32)
    problems = differences({n: full(p) for n, p in model.named_parameters()}, expected)
    # and bf16 masters themselves are saved and loaded as they are
    loss = model(torch.ones(4, 3, dtype=torch.int64)).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    shardwise.save(tmp_path / "bf16", model, optimizer)
    other, other_optimizer = bf16(Setting(world_size, 1), 5)
    shardwise.load(tmp_path / "bf16", other, other_optimizer)
    problems += differences(
        {n: full(p) for n, p in other.named_parameters()},
        {n: full(p) for n, p in model.named_parameters()},
    )
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for name, p in ours.items():
        problems += differences(
            {k: full(v) for k, v in other_optimizer.state[theirs[name]].items()},
            {k: full(v) for k, v in optimizer.state[p].items()},
        )
    assert "torch.float32 there and torch.bfloat16 here" in text and "cast=True" in text
    assert not problems


@on_ranks(*SIZES)
def test_without_an_optimizer_parameters_and_buffers_alone_are_loaded(world_size, tmp_path):
    path = tmp_path / "c"
    run = saved(path, world_size, 0)
    other = build(Setting(world_size, 2, "flat"), seed=3)
    steps(other, 5)
    before = truth_of(other)
    shardwise.load(path, other.model)
    after, there = truth_of(other), truth_of(run)
    expected = {k: there[k] if k.split()[0] in ("param", "buffer") else before[k] for k in before}
    assert not differences(after, expected)


@on_ranks(*SIZES)
def test_a_save_before_the_first_step_takes_the_state_away(world_size, tmp_path):
    path = tmp_path / "c"
    run = build(Setting(world_size))
    shardwise.save(path, run.model, run.optimizer, extra=run.extra)
    straight = truth_of(run)
    problems = []
    for used in (False, True):
        other = build(Setting(world_size), seed=3)
        if used:
            steps(other, 7, 8)
        shardwise.load(path, other.model, other.optimizer, extra=other.extra)
        problems += differences(truth_of(other), straight)
        assert all(not state for state in other.optimizer.state.values())
    assert not problems and steps(other, 0) == steps(run, 0)


@on_ranks(*SIZES)
def test_memory_is_used_again_and_gradients_are_dropped(world_size, tmp_path):
    path = tmp_path / "c"
    saved(path, world_size, 0)
    other = build(Setting(world_size), seed=3)
    steps(other, 4, 5)
    loss = other.model(torch.ones(2, 3, dtype=torch.int64)).sum()
    loss.backward()
    params = list(other.model.parameters())
    assert any(p.grad is not None for p in params)

    def memory():
        tensors = [p.to_local() for p in params]
        states = [other.optimizer.state[p] for p in params if p in other.optimizer.state]
        tensors += [s[key].to_local() for s in states if s for key in ("exp_avg", "exp_avg_sq")]
        tensors += list(other.model.buffers())
        return [t.data_ptr() for t in tensors]

    before = memory()
    shardwise.load(path, other.model, other.optimizer)
    assert memory() == before and len(before) > len(params)
    assert all(p.grad is None for p in params)


class Counter(nn.Module):
    """Keeps a state that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen = None

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state

    def forward(self, x):
        return self.linear(x)


@on_ranks(*SIZES)
def test_a_modules_own_state_comes_back_to_each_rank(rank, tmp_path):
    path = tmp_path / "c"
    models = [shardwise.shard(nn.Sequential(Counter(), nn.Linear(3, 2))) for _ in range(2)]
    models[0][0].seen = {"rank": rank, "amax": torch.arange(3) + rank, (1, "x"): {2, 3}}
    shardwise.save(path, models[0])
    shardwise.load(path, models[1])
    seen = models[1][0].seen
    assert seen["rank"] == rank and seen["amax"].tolist() == [rank, rank + 1, rank + 2]
    assert seen[1, "x"] == {2, 3}


def draws():
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]


def save_generators(rank, world_size, path):
    run = build(Setting(world_size))
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    draws()
    shardwise.save(path, run.model)
    return draws()


def load_generators(rank, world_size, path):
    run = build(Setting(world_size))
    found = []
    for _ in range(2):
        shardwise.load(path, run.model)
        found.append(draws())
    assert found[0] == found[1]
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    shardwise.load(path, run.model, restore_generators=False)
    assert torch.equal(torch.rand(1), expected)
    return found[0]


def test_generators_go_on_where_they_were_or_are_derived(tmp_path):
    straight = run_ranks(save_generators, 2, tmp_path / "c")
    assert straight[0] != straight[1]
    assert run_ranks(load_generators, 2, tmp_path / "c") == straight
    derived = run_ranks(load_generators, 3, tmp_path / "c")
    for kind in range(3):
        assert len({str(of_rank[kind]) for of_rank in (*derived, *straight)}) == 5
    assert run_ranks(load_generators, 3, tmp_path / "c") == derived


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        inner = [nn.Linear(4, 5), nn.Linear(5, 4)]
        if wrap == "checkpoint":
            inner = [checkpoint_wrapper(layer) for layer in inner]
        elif wrap == "compile":
            inner = [torch.compile(layer, backend="eager") for layer in inner]
        self.layers = nn.ModuleList(inner)


@on_ranks(*SIZES)
def test_names_do_not_depend_on_wrappers(tmp_path):
    models = {}
    for number, wrap in enumerate(("plain", "checkpoint", "compile")):
        torch.manual_seed(number)
        models[wrap] = shardwise.shard(Wrapped(wrap), units=[nn.Linear])
    for wrap, model in models.items():
        shardwise.save(tmp_path / wrap, model)
        expected = {str(n): full(p) for n, p in enumerate(model.parameters())}
        for other in models.values():
            shardwise.load(tmp_path / wrap, other)
            actual = {str(n): full(p) for n, p in enumerate(other.parameters())}
            assert not differences(actual, expected)


@on_ranks(*SIZES)
def test_tied_weights_load_into_both_and_two_that_differ_are_never_taken_for_one(
    rank, world_size, tmp_path
):
    tied, untied = build(Setting(world_size)), build(Setting(world_size), 2, Untied)
    problems = []
    steps(tied, 0)
    shardwise.save(tmp_path / "tied", tied.model, tied.optimizer)
    steps(untied, 1)
    shardwise.load(tmp_path / "tied", untied.model, untied.optimizer)
    expected = truth_of(tied)
    for kind in ("param ", "state "):
        problems += differences(
            {k: v for k, v in truth_of(untied).items() if k.startswith(kind)},
            {k: v for k, v in expected.items() if k.startswith(kind)},
        )
    with torch.no_grad():
        untied.model.head.weight.mul_(2)
    shardwise.save(tmp_path / "untied", untied.model, untied.optimizer)
    other = build(Setting(world_size, 1), seed=4)
    before = truth_of(other)
    said = message(
        CheckpointError, lambda: shardwise.load(tmp_path / "untied", other.model, other.optimizer)
    )
    assert "'embedding.weight' and 'head.weight' are one parameter here, and two there" in said
    assert differences(truth_of(other), before) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = shardwise.load(tmp_path / "untied", other.model, other.optimizer, strict=False)
    assert loaded.unexpected == ("head.weight",)
    assert loaded.missing == ()
    assert rank or "unknown here (head.weight)" in str(caught[0].message)
    other.schedule, other.scaler = tied.schedule, tied.scaler
    problems += differences(truth_of(other), expected)
    with torch.no_grad():
        untied.model.head.weight.copy_(untied.model.embedding.weight.full_tensor())
    shardwise.save(tmp_path / "equal", untied.model, untied.optimizer)
    other = build(Setting(world_size, 1), seed=5)
    assert shardwise.load(tmp_path / "equal", other.model, other.optimizer).unexpected == ()
    other.schedule, other.scaler = tied.schedule, tied.scaler
    assert not [*problems, *differences(truth_of(other), expected)]


class Untied(Net):
    def __init__(self):
        super().__init__(tied=False)


# ----------------------------------------------------------- whether what was loaded is also used


@on_ranks(*SIZES)
def test_the_next_pass_uses_what_was_loaded(world_size, tmp_path):
    """Load while full copies are fresh; the next pass must use the values that were loaded."""
    problems = []
    tokens = torch.arange(9).view(3, 3)
    for number, precision in enumerate(("fp32", "bf16")):
        for stage in range(4):
            partitions = ("found", "few", "root")  # one in turn, and all where copies are freed
            for units in partitions if stage == 3 else [partitions[(stage + number) % 3]]:
                run = _with_units(world_size, stage, precision, units, seed=1)
                folder = tmp_path / f"{precision}{stage}{units}"
                shardwise.save(folder, run)
                run.eval()
                with torch.no_grad():
                    expected = run(tokens)
                other = _with_units(world_size, stage, precision, units, seed=2).eval()
                with torch.no_grad():
                    before = other(tokens)
                    shardwise.load(folder, other)
                    found = other(tokens)
                other(tokens).sum().backward()
                shardwise.load(folder, other)
                again = other(tokens)
                if not (torch.equal(found, expected) and torch.equal(again, expected)):
                    problems.append(f"{precision}, stage {stage}, {units}: old values")
                assert not torch.equal(before, expected)
    assert not problems


class Holder(nn.Module):
    """A unit with fewer elements than there are ranks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return x * self.weight.sum()


class Holding(Net):
    def __init__(self):
        super().__init__()
        self.holder = Holder()

    def forward(self, tokens, norm=True):
        return self.holder(super().forward(tokens, norm))


def _with_units(world_size, stage, precision, units, seed):
    torch.manual_seed(seed)
    chosen = {"found": None, "few": [Holder], "root": [Holding]}[units]
    return shardwise.shard(Holding(), stage=stage, precision=precision, units=chosen)


@pytest.mark.kernels
@on_ranks(*SIZES)
def test_the_next_pass_uses_what_was_cast(tmp_path):
    """Load with a cast while full copies are fresh; the last rank has no element of one unit.

    What comes has the bits of a plain model whose parameters were cast.
    """
    tokens = torch.arange(9).view(3, 3)
    bf16 = shardwise.Precision(torch.bfloat16, torch.bfloat16, torch.float32)
    for stage in (1, 2, 3):
        torch.manual_seed(stage)
        model = shardwise.shard(Holding(), units=[Holder])
        shardwise.save(tmp_path / str(stage), model)
        torch.manual_seed(7)
        other = shardwise.shard(Holding(), stage=stage, units=[Holder], precision=bf16).eval()
        with torch.no_grad():
            before = other(tokens)
            shardwise.load(tmp_path / str(stage), other, cast=True)
            after = other(tokens)
            torch.manual_seed(stage)
            plain = Holding().eval()
            for param in plain.parameters():
                param.data = param.data.bfloat16()
            expected = plain(tokens)
        assert torch.equal(after, expected) and not torch.equal(before, after)


@on_ranks(*SIZES)
def test_a_backward_pass_over_a_load_is_refused(world_size, tmp_path):
    path = tmp_path / "c"
    run = build(Setting(world_size))
    shardwise.save(path, run.model)
    loss = run.model(torch.ones(2, 3, dtype=torch.int64)).pow(2).sum()
    shardwise.load(path, run.model)
    with pytest.raises(RuntimeError):
        loss.backward()


@on_ranks(*SIZES)
def test_a_broken_load_stops_training_until_a_good_one(rank, world_size, tmp_path):
    run = build(Setting(world_size))
    steps(run, 0)
    for name in ("good", "bad"):
        shardwise.save(tmp_path / name, run.model, run.optimizer, extra=run.extra)
    truth = truth_of(run)
    if rank == 0:
        flip(tmp_path / "bad" / f"rank{world_size - 1:05d}-0.safetensors", -3)
    dist.barrier()
    other = build(Setting(world_size), seed=3)
    tokens = torch.ones(2, 3, dtype=torch.int64)

    def load(name):
        shardwise.load(tmp_path / name, other.model, other.optimizer, extra=other.extra)

    texts = [message(DamagedCheckpoint, lambda: load("bad"))]
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            texts.append(message(StateError, lambda: other.model(tokens)))
    load("good")
    assert f"rank{world_size - 1:05d}-0.safetensors" in texts[0] and "is damaged" in texts[0]
    assert "not to be used" in texts[1] and texts[1] == texts[2]
    assert not differences(truth_of(other), truth)
    assert steps(other, 1) == steps(run, 1)
