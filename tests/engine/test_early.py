"""Steps that begin in backward: the plain bits, or an error where they could be others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap import assert_same, everything, make_optimizer
from torch import nn

from models import Stack
from ranks import run_ranks
from shardwise import Offload, accumulate, fully_shard, load, overlap, save, shard
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, ShardwiseError, StateError


def make(early: bool, name: str = "adamw", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = shard(Stack(), bucket_bytes=1, **options)  # each unit is reduced by itself
    optimizer = make_optimizer(name, model)
    return model, overlap(optimizer, in_backward=True) if early else optimizer


def num_begun(model: Any) -> int:
    """Count units that were stepped and not confirmed."""
    units = engine_of(model).units
    return sum(any(step._is_early for step in unit.steps) for unit in units)


def run(model: Any, step: int, batches: int = 2) -> list[Any]:
    found = []
    for number in range(batches):
        with accumulate(model, last=number == batches - 1):
            loss = model(torch.linspace(-1, step + 1, 24).view(3, 8)).square().mean()
            loss.backward()
            found.append(loss.detach())
            assert number == batches - 1 or not num_begun(model)
    return found


def train(model: Any, optimizer: Any, steps: int = 4, first: int = 0) -> list[Any]:
    """Train with two micro-batches and a schedule; return losses, and count what has begun."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    found: list[Any] = []
    for step in range(first, first + steps):
        found += run(model, step)
        found.append(torch.tensor(float(num_begun(model))))
        optimizer.step()
        assert not num_begun(model)
        schedule.step()
        optimizer.zero_grad()
    return found


def step_in_backward(rank: int, world_size: int, folder: Path) -> None:
    """Every stage, with state at every place, and a few optimizers."""
    one = f"nvme:{folder}"
    for stage, (name, place) in enumerate(
        [
            ("adamw", None),
            ("momentum", "cpu"),
            ("own in 8 bits", one),
            ("fused", Offload("cpu", "cpu", one, step_on="device")),
        ]
    ):
        runs = []
        for early in (False, True):
            options = {"stage": stage, "offload": place} if early else {"stage": stage}
            model, optimizer = make(early, name, **options)
            losses = train(model, optimizer)
            begun = losses[2::3]
            assert begun[0] == 0 and all((each > 0) == early for each in begun[1:]), begun
            del losses[2::3]
            runs.append(losses + everything(model, optimizer))
        assert_same(*runs)


@pytest.mark.parametrize("world_size", [1, 3])
def test_steps_in_backward_have_the_bits_of_plain_ones(world_size: int, tmp_path: Path) -> None:
    run_ranks(step_in_backward, world_size, tmp_path)


Use = Callable[[Any, Any], Any]


def change_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.step()


def replace_grad(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def drop_grads(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None
    optimizer.step()


def leave_out(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8))


def scale(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def unscale(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


USES: list[Use] = [
    *(change_rate, replace_grad, drop_grads, leave_out, scale, unscale),
    lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model, optimizer: model(torch.ones(2, 8)),
    lambda model, optimizer: [param.to_local() for param in model.parameters()],
    lambda model, optimizer: optimizer.state_dict(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: run(model, 1, 1),
]


def refuse(rank: int, world_size: int, folder: Path) -> None:
    """Whatever would differ raises, also when asked again, until a load; then all is as ever."""
    model, optimizer = make(True)
    train(model, optimizer, 2)
    save(folder, model, optimizer)
    expected = train(model, optimizer, 2, first=2) + everything(model, optimizer)
    for number, use in enumerate(USES):
        run(model, 2)
        assert num_begun(model)
        with pytest.raises(StateError, match=r"in_backward"):
            use(model, optimizer)
        if number < 3:
            with pytest.raises(ShardwiseError):
                model(torch.ones(2, 8))
        optimizer.zero_grad()
        load(folder, model, optimizer)
        found = train(model, optimizer, 2, first=2) + everything(model, optimizer)
        assert_same(found, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_could_not_have_the_plain_bits_is_refused_until_a_load(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(refuse, world_size, tmp_path / "saved")


def break_off(rank: int, world_size: int, folder: Path) -> None:
    """A backward pass raises after units were stepped, and a step that fails in the thread."""
    model, optimizer = make(True)
    train(model, optimizer, 2)
    save(folder, model, optimizer)
    engine_of(model).reductions.allow_in_flight(
        0
    )  # so that blocks[2] has begun when blocks[0] raises
    hidden = model.blocks[0].register_full_backward_pre_hook(_raise)
    with pytest.raises(ArithmeticError):
        run(model, 2, 1)
    hidden.remove()
    for use in (lambda: run(model, 2, 1), optimizer.step):
        with pytest.raises(ShardwiseError):
            use()
    optimizer.zero_grad()
    load(folder, model, optimizer)
    train(model, optimizer, 2, first=2)


def _raise(*_: Any) -> None:
    raise ArithmeticError("no more")


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_backward_pass_that_raises_after_steps_leaves_a_model_that_is_refused(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(break_off, world_size, tmp_path / "saved")


def ask_in_vain(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="in fp16, whose loss is scaled"):
        make(True, precision="fp16")
    with pytest.raises(ConfigError, match=r"not of a model of shard\(\)"):
        overlap(torch.optim.SGD(fully_shard(Stack()).parameters()), in_backward=True)


def test_models_whose_gradients_are_not_final_in_backward_are_refused() -> None:
    run_ranks(ask_in_vain, 1)
