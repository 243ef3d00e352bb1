"""Units whose output is another unit's, as it came: two units then begin backward at one node."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Block, Stack
from ranks import on_ranks, run_ranks
from shardwise import fully_shard
from trainer import SPREAD, compare


class Skipped(Block):
    """A block that is left out in this step: it has parameters and hands its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Skipping(Stack):
    """The second of three blocks is left out; the first one's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Skipped(), Block()])


class Wrapped(nn.Module):
    """The usual wrapper: it returns what the model inside it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.model = Skipping()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make_model", [Skipping, Wrapped])
def test_a_unit_is_not_over_when_one_that_handed_its_output_on_begins(
    make_model: Any, world_size: int
) -> None:
    settings = [{**options, "units": ["Block", "Skipped", "Skipping"]} for options in SPREAD]
    settings = [s if make_model is Wrapped else {**s, "units": s["units"][:2]} for s in settings]
    run_ranks(compare, world_size, make_model, settings)


@on_ranks(1, 2)
def test_fully_shard_too_frees_no_unit_before_its_backward():
    for frees in (None, True, False):
        torch.manual_seed(0)
        plain, model = Wrapped(), Wrapped()
        model.load_state_dict(plain.state_dict())
        for module in (*model.model.blocks, model.model, model):
            fully_shard(module, reshard_after_forward=frees)
        x = torch.randn(4, 8)
        for each in (plain, model):
            each(x).square().mean().backward()
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert (param.grad is None) == (expected.grad is None), name
            if expected.grad is not None:  # alike on all ranks, so the mean has the same bits
                assert torch.equal(param.grad.full_tensor(), expected.grad), name
