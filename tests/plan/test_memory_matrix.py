"""Predicted against measured memory: six models, stages 0 to 3, with and without checkpointing.

Two real ranks; the oracle is the allocator's own trace of a whole step: forward, backward,
clipping, a fused AdamW. Lines that the engine owns and what it sends must agree exactly. Here each
model has one or two cells of the eight, so that every cell is some model's; `make soak` has all.
"""

import importlib.util
import itertools
from dataclasses import replace

import pytest

from memory_cells import MODELS, Cell, build, cells_of, measure_all, predict
from ranks import run_ranks
from shardwise import shard
from shardwise.config import Schedule
from shardwise.debug import stats

MIB = 1 << 20
NUM_RANKS = 2

pytestmark = [
    pytest.mark.slow,
    # Importing a model class pulls in packages that warn about each other.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def check(cells):
    measured = run_ranks(measure_all, NUM_RANKS, cells)[0]
    for cell, real in zip(cells, measured, strict=True):
        counts, played = predict(cell, NUM_RANKS)
        peak = real.pop("peak")
        assert counts == real, cell
        assert peak > 20 * MIB, cell
        assert abs(played.peak.ledger.total / peak - 1) <= 0.01, cell


def sample_of(model, precision):
    """Return a cell without checkpointing and one with it, at other stages for every model.

    In fp32 the first four models have all eight between them, and the others one each.
    """
    first = MODELS.index(model) + (precision == "bf16")
    stages = {False: first % 4, True: (first + 2) % 4}
    cells = [c for c in cells_of(model, precision) if c.stage == stages[c.checkpointed]]
    if precision == "fp32" and MODELS.index(model) >= 4:
        return cells[1:]
    return cells


def needs_transformers(model):
    if model != "decoder" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is in the test extra")


@pytest.mark.parametrize("model", MODELS)
def test_peaks_in_fp32_are_within_a_percent_and_the_engines_lines_exact(model):
    needs_transformers(model)
    check(sample_of(model, "fp32"))


@pytest.mark.parametrize(("model", "checkpointed"), [("decoder", True), ("gpt2", False)])
def test_peaks_in_bf16_are_within_a_percent_and_the_engines_lines_exact(model, checkpointed):
    """In one cell each, on few rows: most processors have no fast products in bf16."""
    needs_transformers(model)
    cells = [c for c in sample_of(model, "bf16") if c.checkpointed is checkpointed]
    check([replace(cell, micro_batch=1) for cell in cells])


def layer_by_layer(rank, world_size, model):
    """Return full parameters and reductions so far, when each layer's backward is over."""
    plain, loss_of = build(Cell(model, 3, True))
    sharded = shard(plain, stage=3, schedule=Schedule(0, 0))
    layers = sharded.blocks if model == "decoder" else sharded.model.layers
    seen = []

    hooked = set()

    def note(_):
        now = stats(sharded)
        seen.append((now.param_full_bytes, now.num_collectives.get("shard.reduce_scatter", 0)))

    def watch(layer, args):
        if layer not in hooked:  # else it is recomputed
            hooked.add(layer)
            args[0].register_hook(note)  # after the engine's, which was there first

    for layer in layers:
        layer.register_forward_pre_hook(watch)
    for _ in range(2):
        seen.clear()
        hooked.clear()
        loss_of(sharded).backward()
    return seen


@pytest.mark.parametrize("model", ["decoder", "llama"])
def test_a_checkpointed_layer_is_freed_and_reduced_when_its_backward_is_over(model):
    needs_transformers(model)
    seen = run_ranks(layer_by_layer, NUM_RANKS, model)[0]
    assert len(seen) == 3
    assert len({full for full, _ in seen}) == 1, "a layer stayed full"
    assert [after[1] - before[1] for before, after in itertools.pairwise(seen)] == [1, 1]
