"""Blocks that torch.compile has compiled, by either spelling, are sharded like any other."""

from functools import partial
from typing import Any

import pytest
import torch

from models import Stack, stack_roundings
from ranks import on_ranks, run_ranks
from roundings import assert_all_rounded_alike
from shardwise import shard
from trainer import ENDS, compare, full_parameters, make_steps, mean_square, sgd, train


class CompiledInPlace(Stack):
    def __init__(self, backend: str) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend=backend)


class CompiledWrapped(Stack):
    def __init__(self, backend: str) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, backend=backend)


# torch's compiler warns about itself: parts of it are deprecated or experimental.
pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore::DeprecationWarning")


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [CompiledInPlace, CompiledWrapped])
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_blocks_take_the_same_steps(make_model: Any, world_size: int) -> None:
    run_ranks(compare, world_size, partial(make_model, "aot_eager"), ENDS)


@pytest.mark.slow
@on_ranks(2)
def test_blocks_compiled_by_inductor_train(world_size):
    """Inductor's kernels round as they like; SGD, by Note [Losses after steps of Adam]."""
    steps = make_steps(world_size, 3)
    torch.manual_seed(0)
    eager = train(Stack(), steps, mean_square, sgd, stage=3)
    torch.manual_seed(0)
    model = CompiledInPlace("inductor")
    compiled = train(model, steps, mean_square, sgd, stage=3)
    roundings = stack_roundings(rows=2 * 3)
    for ours, theirs in zip(compiled.grads, eager.grads, strict=True):
        assert_all_rounded_alike(ours, theirs, roundings)
    assert_all_rounded_alike(compiled.parameters, eager.parameters, roundings)
    assert full_parameters(model).keys() == eager.parameters.keys()


class Generating(Stack):
    def generate(self) -> None:
        """Make the model one that ranks generate with in step."""


def compile_around(rank: int, world_size: int) -> list[str]:
    """Compile a function that calls the model; return why the graph was broken."""
    from torch._dynamo.utils import counters

    counters.clear()
    model = shard(Generating(), stage=3)
    around = torch.compile(lambda batch: mean_square(model, batch), backend="eager")
    around(make_steps(world_size, 1)[0][0][rank]).backward()
    return list(counters["graph_break"])


@pytest.mark.slow
def test_a_model_that_generates_is_compiled_but_for_our_hooks() -> None:
    (reasons,) = run_ranks(compile_around, 1)
    assert reasons and all("_Hooks" in reason for reason in reasons), reasons
