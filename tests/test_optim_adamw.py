"""shardwise.optim.AdamW: torch's steps, alike on slices of any cut; its bytes; its checkpoints.

Gradients are given, not computed, so parameters of every rank must have the bits of one process.
"""

import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise
from ranks import on_ranks, run_ranks, run_sizes
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.optim import AdamW
from shardwise.optim.moments import kind_of
from shardwise.optim.slices import slice_of
from shardwise.optim.step import Settings, Work, update
from test_optim_moments import encode
from test_shard_tensor import LAYOUTS, STAGES, WithEmpty
from trainer import full, full_parameters

KINDS = ("fp32", "bf16", "8bit")
HOW = {"lr": 0.01, "weight_decay": 0.1, "block": 16}
STEPS = 3


class Whole(nn.Module):
    """Matrices whose rows are whole blocks of 16."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.head = nn.Linear(32, 7, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(cls):
    torch.manual_seed(3)
    return cls()


def give(params, step):
    """Give parameters, whatever they are, the same gradients."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator)
        if isinstance(param, DTensor) and not isinstance(param, shardwise.ShardTensor):
            cut = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = cut
        else:
            param.grad = grad


def train(model, optimizer, steps):
    for step in steps:
        give(model.parameters(), step)
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """Return parameters and their state, whole, moments decoded."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = full(param)
        for key, value in optimizer.saved_state(param).items():
            found[f"{name} {key}"] = full(value)
    return found


def assert_bits(found, expected, where):
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{where}: {name}")


# One process.


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_moments_in_fp32_make_the_steps_of_torchs_fused_adamw(lr):
    torch.manual_seed(0)
    shapes = [(64, 64), (7,), (1003,), (), (0, 3), (3, 5, 2)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]

    def groups(params):
        return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "eps": 1e-6}]

    one = AdamW(groups(ours), lr=lr, betas=(0.8, 0.95))
    two = torch.optim.AdamW(groups(theirs), lr=lr, betas=(0.8, 0.95), fused=True)
    curves = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (one, two)]
    for step in range(12):
        for params in (ours, theirs):
            give(params, step)
            params[1].grad = None if step == 3 else params[1].grad
        for each in (one, two, *curves):
            each.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for key, value in two.state[q].items():
            assert torch.equal(one.state[p][key], value), key
    assert one.state[ours[1]]["step"] == 11


@pytest.mark.parametrize("kind", KINDS)
def test_state_takes_the_bytes_of_the_formula(kind):
    per_element = {"fp32": 8, "bf16": 4, "8bit": 2}[kind]
    for shape, block in (((64, 48), 256), ((5,), 64), ((1000, 3), 16), ((), 256), ((0, 4), 256)):
        param = nn.Parameter(torch.zeros(shape))
        optimizer = AdamW([param], moments=kind, block=block)
        give([param], 0)
        optimizer.step()
        numel = param.numel()
        scales = 2 * 4 * -(-numel // block) if kind == "8bit" else 0
        state = optimizer.state[param].values()
        assert sum(t.nbytes for t in state) == per_element * numel + scales + 4
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in state)


def drop(model, optimizer):
    """Return the losses of a small regression."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, 32, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(32, 7, generator=generator))
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_small_moments_train_as_fp32_does(kind):
    losses = {}
    for each in ("fp32", kind):
        model = made(Whole)
        losses[each] = drop(model, AdamW(model.parameters(), lr=3e-3, moments=each))
    assert losses["fp32"][-1] < 0.15 * losses["fp32"][0]
    assert losses[kind][-1] == pytest.approx(losses["fp32"][-1], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_memory_formats_change_no_bit(kind):
    found = []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            flat = nn.Parameter(torch.randn(100_003, generator=generator))
            image = torch.randn(4, 3, 5, 6, generator=generator)
            if threads == 3:
                image = image.contiguous(memory_format=torch.channels_last)
            params = [flat, nn.Parameter(image)]
            optimizer = AdamW(params, moments=kind)
            for step in range(3):
                give(params, step)
                optimizer.step()
            found.append([p.detach() for p in params])
    finally:
        torch.set_num_threads(num_threads)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_gradients_and_parameters_are_computed_with_in_fp32(kind):
    for dtype in (torch.float32, torch.bfloat16):
        start = torch.randn(40_001, generator=torch.Generator().manual_seed(0)).to(dtype)
        params = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
        one, two = (AdamW([p], lr=0.01, moments=kind) for p in params)
        grad = torch.randn(40_001, generator=torch.Generator().manual_seed(1)).bfloat16()
        params[1].grad = grad.float()
        held = slice_of(params[0], grad)
        copy_of = torch.empty(40_001, dtype=torch.bfloat16)
        params[0].grad = grad.to(dtype)
        one.step()  # which makes the state; the step below is taken once more on both
        two.step()
        state = one.state[params[0]]
        moments = [
            {e: state[name + e].view(-1) for e in kind_of(kind, 256).endings}
            for name in ("exp_avg", "exp_avg_sq")
        ]
        with torch.no_grad():
            params[1].copy_(params[0])
            state["step"] += 1
            how = Settings(0.01, 0.9, 0.999, 1e-8, 0.01)
            work = Work(held, (moments[0], moments[1]), state["step"], copy_of)
            update([work], kind_of(kind, 256), how)
        two.step()
        assert torch.equal(params[0], params[1].to(dtype))
        assert torch.equal(copy_of, params[1].bfloat16())
        for name in ("exp_avg", "exp_avg_sq"):
            values = (o.saved_state(p)[name] for o, p in zip((one, two), params, strict=True))
            assert torch.equal(*values)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_adamw_takes_our_state_dict_and_we_take_its(kind):
    model = made(Whole)
    optimizer = AdamW(model.parameters(), moments=kind, **HOW)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    theirs = torch.optim.AdamW(model.parameters(), lr=7.0)
    theirs.load_state_dict(saved["optimizer"])
    for param in model.parameters():
        for key, value in theirs.state[param].items():
            assert torch.equal(value, optimizer.saved_state(param)[key].float()), key
    assert theirs.param_groups[0]["lr"] == 0.01
    again = made(Whole)
    again.load_state_dict(saved["model"])
    resumed = AdamW(again.parameters(), moments=kind, block=16)
    resumed.load_state_dict(theirs.state_dict())
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()
    train(model, optimizer, range(2, 4))
    train(again, resumed, range(2, 4))
    assert_bits(everything(again, resumed), everything(model, optimizer), kind)


def test_a_group_may_be_given_other_moments_between_steps():
    model = made(Whole)
    blocks = {"params": model.blocks.parameters(), "moments": "8bit"}
    optimizer = AdamW([blocks, {"params": [model.head.weight]}])
    train(model, optimizer, range(1))
    states = [optimizer.state[p] for p in model.parameters()]
    assert ["exp_avg" in s for s in states] == [False, False, True]
    before = everything(model, optimizer)
    optimizer.param_groups[0]["moments"] = "fp32"
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    after = everything(model, optimizer)
    for name in ("head.weight exp_avg", "blocks.0.weight exp_avg"):
        torch.testing.assert_close(after[name], before[name] * 0.9, rtol=2**-22, atol=0)
    assert "exp_avg_codes" not in optimizer.state[next(iter(model.parameters()))]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"lr": -1.0}, r"^lr=-1.0: expected a number of 0 or more"),
        ({"eps": float("nan")}, r"^eps=nan: expected"),
        ({"betas": (0.9, 1.0)}, r"^betas=\(0.9, 1.0\): expected"),
        ({"moments": "fp8"}, r"^moments='fp8': expected one of 'fp32', 'bf16', '8bit'"),
        ({"moments": "8bit", "block": 100}, r"^block=100: expected a power of two"),
    ],
)
def test_wrong_settings_are_refused_for_a_group_too(how, match):
    with pytest.raises(ConfigError, match=match):
        AdamW([nn.Parameter(torch.zeros(2))], **how)
    optimizer = AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ConfigError, match=match):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **how})
    assert len(optimizer.param_groups) == 1


def test_what_the_step_cannot_update_is_refused():
    for param in (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), nn.Embedding(3, 2).weight):
        param.grad = torch.ones_like(param)
        if param.ndim == 2:
            param.grad = param.grad.to_sparse()
        with pytest.raises(
            ConfigError, match=r"is a torch.complex64|is sparse; use torch.optim.Sp"
        ):
            AdamW([param]).step()
    theirs = torch.optim.AdamW([param], amsgrad=True)
    with pytest.raises(ConfigError, match=r"amsgrad=True, which shardwise.optim.AdamW does"):
        AdamW([param]).load_state_dict(theirs.state_dict())


# Ranks.


def plain(cls, kind):
    model = made(cls)
    optimizer = AdamW(model.parameters(), moments=kind, **HOW)
    train(model, optimizer, range(STEPS))
    return everything(model, optimizer)


def check_cuts(rank, world_size, truth):
    for stage in STAGES if world_size > 1 else (3,):
        for layout in LAYOUTS:
            for (name, kind), expected in truth.items():
                if stage < 3 and (name, kind) not in (("WithEmpty", "bf16"), ("Whole", "8bit")):
                    continue
                model = made(Whole if name == "Whole" else WithEmpty)
                home = "cpu" if (stage, layout) == (3, "flat") else None
                shardwise.shard(model, stage=stage, layout=layout, offload=home)
                optimizer = AdamW(model.parameters(), moments=kind, **HOW)
                train(model, optimizer, range(STEPS))
                found = everything(model, optimizer)
                cuts_blocks = kind == "8bit" and stage > 0 and world_size > 1
                if cuts_blocks and (name, layout) != ("Whole", "rows"):
                    assert found.keys() == expected.keys()
                    continue
                assert_bits(found, expected, f"stage {stage}, {layout}, {name}, {kind}")
                numel = sum(p.to_local().numel() for p in model.parameters())
                state = [t for s in optimizer.state.values() for t in s.values()]
                local = [t.to_local() if isinstance(t, DTensor) else t for t in state]
                per_element = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / 16}[kind]
                if name == "Whole":
                    assert sum(t.nbytes for t in local) == per_element * numel + 4 * 3


def test_steps_have_the_bits_of_one_process_at_every_stage_and_cut():
    """Of 8 bits, where no block is cut."""
    models = (Whole, WithEmpty)
    truth = {(m.__name__, kind): plain(m, kind) for m in models for kind in KINDS}
    run_sizes(check_cuts, dict.fromkeys((1, 3), (truth,)))


def check_fully_shard(rank, world_size, truth, offloads):
    how = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}
    for kind, expected in truth.items():
        model = made(Whole)
        for block in model.blocks:
            shardwise.fully_shard(block, **how)
        shardwise.fully_shard(model, **how)
        optimizer = AdamW(model.parameters(), moments=kind, **HOW)
        train(model, optimizer, range(STEPS))
        assert_bits(everything(model, optimizer), expected, kind)
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(rank))
        one, two = (model(x).sum() for _ in range(2))
        assert torch.equal(one, two)
        before = full(model.head.weight)
        (one + two).backward()
        optimizer.step()
        assert not torch.equal(full(model.head.weight), before)
        assert not torch.equal(model(x).sum(), one)  # what was gathered is stale


def test_dtensors_of_fully_shard_take_the_same_steps():
    truth = {kind: plain(Whole, kind) for kind in KINDS}
    run_sizes(check_fully_shard, {2: (truth, False), 3: (truth, True)})


@on_ranks(1)
def test_torchs_own_calls_for_whole_state_dicts_give_and_take_values(rank):
    options = StateDictOptions(full_state_dict=True)
    for kind in KINDS:
        models = [made(Whole), made(Whole)]
        runs = []
        for model in models:
            shardwise.fully_shard(model)
            runs.append(AdamW(model.parameters(), moments=kind, **HOW))
        train(models[0], runs[0], range(2))
        saved = [
            get_model_state_dict(models[0], options=options),
            get_optimizer_state_dict(models[0], runs[0], options=options),
        ]
        if rank == 0:
            for name, state in saved[1]["state"].items():
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                assert state["exp_avg"].shape == saved[0][name].shape
        set_model_state_dict(models[1], saved[0], options=options)
        set_optimizer_state_dict(models[1], runs[1], saved[1], options=options)
        for model, optimizer in zip(models, runs, strict=True):
            train(model, optimizer, range(2, 4))
        assert_bits(everything(models[1], runs[1]), everything(models[0], runs[0]), kind)


@on_ranks(2)
def test_an_optimizer_with_state_is_adopted_and_frozen_parameters_stay():
    for kind in KINDS:
        right, model = made(Whole), made(Whole)
        runs = []
        for each in (right, model):
            each.head.weight.requires_grad_(False)
            optimizer = AdamW(
                [{"params": each.blocks.parameters()}, {"params": [each.head.weight], "lr": 9.0}],
                moments=kind,
                **HOW,
            )
            runs.append(optimizer)
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones_like(param) * param
            optimizer.step()
            optimizer.zero_grad()
        shardwise.shard(model, stage=3, optimizer=runs[1])
        for step in range(2):
            for optimizer in runs:
                give(optimizer.param_groups[0]["params"], step)
                optimizer.step()
        assert_bits(everything(model, runs[1]), everything(right, runs[0]), kind)
        assert right.head.weight not in runs[0].state
    late = AdamW((model := made(Whole)).parameters())
    shardwise.shard(model)
    model(torch.ones(1, 32)).sum().backward()
    with pytest.raises(StateError, match=r"AdamW was built before shard\(\)"):
        late.step()


# Checkpoints: any cut and kind of moments to any other, and torch's.

MODELS = {"Whole": Whole, "WithEmpty": WithEmpty}
BEFORE, AFTER = range(2), range(2, 4)


def optimizer_of(model, kind):
    if kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=7.0, fused=True)
    return AdamW(model.parameters(), moments=kind, **HOW)


def saved_state(optimizer, param):
    found = optimizer.saved_state(param) if isinstance(optimizer, AdamW) else optimizer.state[param]
    return dict(found)


def save_all(rank, world_size, folder, how):
    """Save every model with every kind; return where each run is then, and where it goes to."""
    found = {}
    for name, cls in MODELS.items():
        for kind in (*KINDS, "torch"):
            model = shardwise.shard(made(cls), **how)
            optimizer = optimizer_of(model, kind)
            for group in optimizer.param_groups:
                group.update(lr=0.01, weight_decay=0.1)
            train(model, optimizer, BEFORE)
            shardwise.save(folder / f"{name}-{kind}", model, optimizer)
            states = {
                f"{n} {key}": full(value)
                for n, p in model.named_parameters()
                for key, value in saved_state(optimizer, p).items()
            }
            train(model, optimizer, AFTER)
            ends = full_parameters(model)
            found[f"{name}-{kind}"] = states, ends
    return found


def load_all(rank, world_size, folder, how, saved):
    """Load every checkpoint into every kind; without ``how`` into a plain model."""
    for case, (states, ends) in saved.items():
        name, _, there = case.partition("-")
        for here in (*KINDS, "torch"):
            if name == "WithEmpty" and here not in (there, "fp32"):
                continue
            model = made(MODELS[name])
            model = model if how is None else shardwise.shard(model, **how)
            optimizer = optimizer_of(model, here)
            shardwise.load(folder / case, model, optimizer)
            where = f"{name}, {there} to {here}, {how}"
            for n, param in model.named_parameters():
                for key, value in saved_state(optimizer, param).items():
                    expected = states[f"{n} {key}"]
                    check(full(value), expected, here, there, key, where)
            group = optimizer.param_groups[0]
            assert group["lr"] == 0.01 and ("moments" in group) == (here != "torch"), where
            assert group.get("moments", here) == here, where
            train(model, optimizer, AFTER)
            found = full_parameters(model)
            # torch's own kernel rounds the ends of slices otherwise, where groups of 16 are cut.
            are_fp32 = name == "Whole" and {here, there} <= {"fp32", "torch"}
            if are_fp32 or (here == there and here in ("fp32", "bf16")):
                assert_bits(found, ends, where)
            for n, value in found.items():
                torch.testing.assert_close(value, ends[n], rtol=0, atol=0.02, msg=f"{where}: {n}")


def check(value, expected, here, there, key, where):
    """Check what a load gave: the same values, or as near as the form allows."""
    if key == "step" or here in ("fp32", "torch") or here == there == "bf16":
        assert torch.equal(value.float(), expected.float()), (where, key)
        assert value.dtype == (
            torch.bfloat16 if here == "bf16" and key != "step" else torch.float32
        )
    elif here == "bf16":
        assert torch.equal(value, expected.bfloat16()), (where, key)
    elif expected.numel():
        error = (value - expected).abs().max()
        assert error <= expected.abs().max() / 100, (where, key)


@pytest.mark.parametrize(
    ("ranks_there", "there", "ranks_here", "here"),
    [
        (3, {"stage": 3}, 2, {"stage": 2, "layout": "flat"}),
        (2, {"stage": 1, "layout": "flat"}, 1, None),
        (1, {"stage": 0}, 3, {"stage": 3}),
    ],
)
def test_any_kind_of_moments_loads_into_any_other_on_any_ranks(
    tmp_path, ranks_there, there, ranks_here, here
):
    saved = run_ranks(save_all, ranks_there, tmp_path, there)[0]
    run_ranks(load_all, ranks_here, tmp_path, here, saved)


@on_ranks(1, 3)
def test_a_resume_on_as_many_ranks_goes_on_with_the_same_bits(tmp_path):
    for layout in ("rows", "flat"):
        for kind in KINDS:
            model = shardwise.shard(made(WithEmpty), stage=3, layout=layout)
            optimizer = optimizer_of(model, kind)
            train(model, optimizer, BEFORE)
            path = tmp_path / f"{layout}-{kind}"
            with shardwise.Checkpoints(path, model, optimizer) as checkpoints:
                checkpoints.save(2)
            again = shardwise.shard(made(WithEmpty), stage=3, layout=layout)
            resumed = optimizer_of(again, kind)
            train(again, resumed, range(1))  # memory that is there is used again
            held = [t.data_ptr() for s in resumed.state.values() for t in locals_of(s)]
            with shardwise.Checkpoints(path, again, resumed) as checkpoints:
                loaded = checkpoints.load()
                assert loaded is not None and loaded.step == 2
            assert held == [t.data_ptr() for s in resumed.state.values() for t in locals_of(s)]
            for one, two in zip(model.parameters(), again.parameters(), strict=True):
                states = optimizer.state[one], resumed.state[two]
                assert states[0].keys() == states[1].keys()
                for key in states[0]:  # codes and scales too
                    assert torch.equal(*(local_of(s[key]) for s in states)), (kind, key)
            train(model, optimizer, AFTER)
            train(again, resumed, AFTER)
            assert_bits(everything(again, resumed), everything(model, optimizer), kind)


def local_of(value):
    return value.to_local() if hasattr(value, "to_local") else value


def locals_of(state):
    return [local_of(value) for key, value in state.items() if key != "step"]


def check_codes(rank, world_size, folder, saves):
    model = shardwise.shard(made(Whole), stage=3)
    optimizer = optimizer_of(model, "8bit")
    if saves:
        train(model, optimizer, BEFORE)
        shardwise.save(folder, model, optimizer)
    else:
        shardwise.load(folder, model, optimizer)
    for param in model.parameters():
        state, values = optimizer.state[param], optimizer.saved_state(param)
        again = encode(local_of(values["exp_avg"]).view(-1, 16), is_signed=True)
        assert torch.equal(again[0].view(-1), state["exp_avg_codes"])
        assert torch.equal(again[1], state["exp_avg_scales"])
    return everything(model, optimizer)


def test_codes_come_back_on_other_ranks_where_no_block_is_cut(tmp_path):
    saved = run_ranks(check_codes, 3, tmp_path / "a", True)[0]
    assert_bits(run_ranks(check_codes, 2, tmp_path / "a", False)[0], saved, "3 to 2 ranks")


@on_ranks(2)
def test_steps_that_are_others_are_refused_before_anything_is_read(tmp_path):
    model = shardwise.shard(made(Whole))
    theirs = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, theirs, range(1))
    shardwise.save(tmp_path / "saved", model, theirs)
    before = full_parameters(model)
    train(model, theirs, range(1))
    changed = full_parameters(model)
    with pytest.raises(CheckpointError, match=r"amsgrad=True, which shardwise.optim.AdamW"):
        shardwise.load(tmp_path / "saved", model, AdamW(model.parameters()))
    assert_bits(full_parameters(model), changed, "nothing is read")
    shardwise.load(tmp_path / "saved", model)
    assert_bits(full_parameters(model), before, "the model alone")
