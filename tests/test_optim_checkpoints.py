"""Checkpoints of shardwise.optim.AdamW: any cut and kind of moments to any other, and torch's."""

import pytest
import torch

import shardwise
from ranks import on_ranks, run_ranks
from shardwise.errors import CheckpointError
from shardwise.optim import AdamW
from test_optim_adamw import HOW, KINDS, Whole, assert_bits, everything, made, train, whole
from test_optim_moments import encode
from test_shard_tensor import WithEmpty

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
                f"{n} {key}": whole(value)
                for n, p in model.named_parameters()
                for key, value in saved_state(optimizer, p).items()
            }
            train(model, optimizer, AFTER)
            ends = {n: whole(p) for n, p in model.named_parameters()}
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
                    check(whole(value), expected, here, there, key, where)
            group = optimizer.param_groups[0]
            assert group["lr"] == 0.01 and ("moments" in group) == (here != "torch"), where
            assert group.get("moments", here) == here, where
            train(model, optimizer, AFTER)
            found = {n: whole(p) for n, p in model.named_parameters()}
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
    return {
        f"{name} {key}": whole(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.saved_state(param).items()
    }


def test_codes_come_back_on_other_ranks_where_no_block_is_cut(tmp_path):
    saved = run_ranks(check_codes, 3, tmp_path / "a", True)[0]
    assert_bits(run_ranks(check_codes, 2, tmp_path / "a", False)[0], saved, "3 to 2 ranks")


@on_ranks(2)
def test_steps_that_are_others_are_refused_before_anything_is_read(tmp_path):
    model = shardwise.shard(made(Whole))
    theirs = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, theirs, range(1))
    shardwise.save(tmp_path / "saved", model, theirs)
    before = {n: whole(p) for n, p in model.named_parameters()}
    train(model, theirs, range(1))
    changed = {n: whole(p) for n, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"amsgrad=True, which shardwise.optim.AdamW"):
        shardwise.load(tmp_path / "saved", model, AdamW(model.parameters()))
    assert_bits({n: whole(p) for n, p in model.named_parameters()}, changed, "nothing is read")
    shardwise.load(tmp_path / "saved", model)
    assert_bits({n: whole(p) for n, p in model.named_parameters()}, before, "the model alone")
