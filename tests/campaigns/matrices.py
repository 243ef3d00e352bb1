"""Every cell of five matrices of which the suite has samples: `make soak CAMPAIGN=matrices`."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "checkpoint"), str(TESTS / "plan")]

import test_hostile as hostile  # noqa: E402
import test_memory_matrix as memory  # noqa: E402
import test_shard_tensor_draws as draws  # noqa: E402
import test_shard_tensor_optimizers as optimizers  # noqa: E402
import test_shard_tensor_sweep as functions  # noqa: E402
from memory_cells import MODELS, cells_of  # noqa: E402
from ranks import run_ranks  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_of_the_memory_matrix(model: str, precision: str) -> None:
    memory.needs_transformers(model)
    memory.check(cells_of(model, precision))


def test_every_function_of_torch_on_every_kind_of_tensor() -> None:
    trials = functions.calls_that_work_on_plain_tensors()
    functions.check_sweep([trials] * len(functions.WAYS))


def test_every_hostile_checkpoint_by_every_call(tmp_path: Path) -> None:
    hostile.test_a_hostile_checkpoint_gives_an_error_and_nothing_else(
        hostile.attack(tmp_path, every=True)
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_at_every_stage_and_layout(world_size: int) -> None:
    run_ranks(optimizers.check_optimizers, world_size, every=True)
    run_ranks(optimizers.check_l_bfgs, world_size, every=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_draw_at_every_stage(world_size: int) -> None:
    run_ranks(draws.check_draws, world_size, every=True)
