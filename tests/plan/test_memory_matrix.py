"""Predicted against measured memory: six models, stages 0 to 3, with and without checkpointing.

Two real ranks; the oracle is the allocator's own trace of a whole step: forward, backward,
clipping, a fused AdamW. Lines that the engine owns and what it sends must agree exactly. Here each
of the eight cells is some model's; `make soak` has all.
"""

import pytest

from memory_cells import Cell, measure_all, predict
from ranks import run_ranks

MIB = 1 << 20
NUM_RANKS = 2
# On few rows in bf16: most processors have no fast products in it.
CELLS = [
    *(Cell("decoder", 0, False), Cell("decoder", 3, True, "bf16", micro_batch=1)),
    *(Cell("llama", 1, False), Cell("llama", 3, True)),
    *(Cell("qwen3", 0, True), Cell("gemma", 3, False), Cell("mistral", 1, True)),
    *(Cell("gpt2", 2, True), Cell("gpt2", 2, False, "bf16", micro_batch=1)),
]

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


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_peaks_are_within_a_percent_and_the_engines_lines_exact(cell):
    if cell.model != "decoder":
        pytest.importorskip("transformers", reason="transformers is in the test extra")
    check([cell])
