"""Every cell of the matrices of which the suite has samples: `make soak CAMPAIGN=matrices`."""

import itertools
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = ("checkpoint", "engine", "interop", "parallel", "plan", "train")
sys.path[:0] = [str(TESTS), *(str(TESTS / folder) for folder in FOLDERS)]

import test_experts as experts  # noqa: E402
import test_offload_files as offload_files  # noqa: E402
import test_overlap as overlap  # noqa: E402
import test_pipelines as tied  # noqa: E402
import test_stream_order as streams  # noqa: E402

import scenarios  # noqa: E402
import shardwise.train.loop as gradients  # noqa: E402
import test_counted_traffic as traffic  # noqa: E402
import test_hostile as hostile  # noqa: E402
import test_memory_matrix as memory  # noqa: E402
import test_parallel_models as parallel  # noqa: E402
import test_pipeline_schedules as schedules  # noqa: E402
import test_rank_of_stages as stages  # noqa: E402
import test_shard_tensor_draws as draws  # noqa: E402
import test_shard_tensor_optimizers as optimizers  # noqa: E402
import test_shard_tensor_sweep as functions  # noqa: E402
from memory_cells import MODELS, cells_of  # noqa: E402
from ranks import on_ranks, run_ranks  # noqa: E402
from resumes import prepared, write_text  # noqa: E402
from shardwise.errors import GradientError  # noqa: E402
from trainer import LAYOUTS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_of_the_memory_matrix(model, precision):
    pytest.importorskip("transformers", reason="transformers is in the test extra")
    memory.check(cells_of(model, precision))


def test_every_function_of_torch_on_every_kind_of_tensor():
    trials = functions.calls_that_work_on_plain_tensors()
    functions.check_sweep([trials] * len(functions.WAYS))


def test_every_hostile_checkpoint_by_every_call(tmp_path):
    hostile.test_a_hostile_checkpoint_gives_an_error_and_nothing_else(
        hostile.attack(tmp_path, every=True)
    )


@pytest.mark.parametrize("size", parallel.WAYS)
def test_every_checkpoint_of_several_meshes_under_every_other(tmp_path_factory, size):
    saves = parallel.save_all(tmp_path_factory.mktemp("saves"))
    parallel.test_what_is_saved_over_any_meshes_loads_over_any_others(saves, size, every=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_at_every_stage_and_layout(world_size):
    run_ranks(optimizers.check_optimizers, world_size, every=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_draw_at_every_stage(world_size):
    run_ranks(draws.check_draws, world_size, every=True)


@pytest.mark.parametrize("name", streams.ON_ONE_AXIS)
def test_every_scenario_of_the_order_of_streams_has_the_bits_of_a_plain_run(name):
    for world_size in (1, 2):
        run_ranks(streams.check_scenario, world_size, name, True)


@pytest.mark.parametrize("name", scenarios.FAMILIES)
def test_every_model_of_the_families_at_every_stage_and_layout(name):
    run_ranks(scenarios.check, 3, name, LAYOUTS, steps=4)


def test_every_adapter_in_every_setting():
    peft = pytest.importorskip("test_peft", reason="peft is in the test extra")
    for name in sorted(peft.VARIANTS):
        run_ranks(peft.compare_with_ddp, 2, name, peft.SETTINGS)


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize("schedule", schedules.THERE)
def test_every_schedule_at_every_stage_and_precision(schedule, num_ranks):
    cases = [case for case in schedules.every_case() if case.schedule == schedule]
    run_ranks(schedules.matrix, num_ranks, cases)


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize("schedule", schedules.THERE)
def test_every_schedule_of_tied_stages_at_every_stage(schedule, num_ranks, tmp_path):
    cases = [(schedule, "shard", stage) for stage in range(4)] + [(schedule, "fully_shard", 3)]
    run_ranks(tied.tied_steps, num_ranks, tmp_path, cases)


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize("by", ["shard", "fully_shard"])
def test_several_stages_of_a_rank_are_one_model(num_ranks, by, tmp_path):
    stages.test_a_rank_saves_and_loads_its_stages_as_one_model(num_ranks, by, tmp_path)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_optimizer_in_every_setting_steps_in_the_background(world_size):
    every = {"world_size": world_size, "every": True}
    overlap.test_steps_in_the_background_have_the_bits_of_plain_ones(**every)
    overlap.test_offloaded_units_step_behind_from_the_second_step_on(**every)


@pytest.mark.parametrize("world_size", [1, 3])
def test_whatever_comes_after_a_step_in_the_background(world_size, tmp_path):
    every = {"world_size": world_size, "tmp_path": tmp_path, "every": True}
    overlap.test_whatever_comes_after_a_step_sees_it_whole(**every)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_kind_of_state_in_files_at_every_stage(world_size, tmp_path):
    every = {"world_size": world_size, "tmp_path": tmp_path, "every": True}
    offload_files.test_training_has_the_bits_of_training_without_files(**every)


def test_a_thousand_steps_with_delays_in_the_thread_that_steps():
    steps = {"world_size": 3, "steps": 1000}
    overlap.test_delays_in_the_thread_neither_change_a_bit_nor_hang(**steps)


def test_a_thousand_steps_with_delays_of_the_disk(tmp_path):
    offload_files.test_a_slow_disk_changes_no_bit(world_size=3, tmp_path=tmp_path, steps=1000)


@pytest.mark.parametrize("num_ranks", traffic.RUNS)
def test_every_plan_with_degrees_sends_what_its_run_does(num_ranks, tmp_path):
    traffic.check_runs(num_ranks, traffic.RUNS[num_ranks], tmp_path)


@pytest.mark.parametrize("num_ranks", experts.MORE_CELLS)
@on_ranks()
def test_every_cell_of_experts_over_any_axes(num_ranks):
    for cell in experts.MORE_CELLS[num_ranks]:
        experts.trains_as_one_process_does(cell)


DEGREES = ("dp_replicate", "cp", "tp", "pp", "ep")
SIZES = {
    **{"layers": 2, "dim": 32, "heads": 8, "seq": 16, "micro_batch": 1, "accumulation": 2},
    **{"expert_balance": 0.0, "eval_windows": 1, "sample_tokens": 0},
}


def composed_cells(num_ranks):
    """Return all degrees that fit the ranks, with what else varies dealt over them in turns."""
    found = []
    powers = [2**n for n in range(num_ranks.bit_length())]
    for degrees in itertools.product(powers, repeat=len(DEGREES)):
        replicas, cp, tp, pp, ep = degrees
        region, left = divmod(num_ranks, replicas * pp)
        if left or region % (cp * tp) or region % ep or pp > SIZES["layers"]:
            continue
        n = len(found)
        cell = dict(zip(DEGREES, degrees, strict=True))
        cell |= {"experts": 8} if ep > 1 or n % 5 == 0 else {}
        cell |= {"stage": n % 4, "tied_head": n % 3 == 0, "layout": ("rows", "flat")[n // 4 % 2]}
        cell |= {"layout": "rows"} if pp > 1 and cell["tied_head"] else {}
        cell |= {"activation_checkpointing": n % 7 < 3, "precision": ("fp32", "bf16")[n % 6 == 5]}
        cell |= {"cp_method": ("gather", "heads", "ring")[n % 3]} if cp > 1 else {}
        found.append(cell)
    return found


def has_the_gradients_of_one_process(rank, num_ranks, cells, folder):
    wrong = []
    for number, cell in enumerate(cells):
        output = {"output": folder / f"{num_ranks}-{number}", "data": folder / "text.txt"}
        run = prepared(rank, num_ranks, {**SIZES, **cell, **output})
        try:
            gradients.check_run_gradients(run)
        except GradientError as error:
            wrong.append(f"{cell}: {error}")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_product_of_degrees_has_the_gradients_of_one_process(num_ranks, tmp_path):
    write_text(tmp_path)
    cells = composed_cells(num_ranks)
    for lo in range(0, len(cells), 12):  # each cell makes groups of processes, which stay
        part = cells[lo : lo + 12]
        found = run_ranks(has_the_gradients_of_one_process, num_ranks, part, tmp_path, fresh=True)
        assert not any(found), "\n".join(found[0])
