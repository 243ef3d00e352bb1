"""Planned against measured memory of composed runs: tensor, pipeline, context, expert degrees.

The oracle is the allocator's own trace of whole steps on real ranks, on each stage of a pipeline.
Here every degree has a cell or two, traced on the first rank of each stage;
``tests/campaigns/composed.py`` has all pairs, on all ranks.
"""

from functools import partial

import pytest

from composed_cells import ComposedCell, measure_all, predict
from ranks import run_ranks

MIB = 1 << 20
CELLS = {
    2: [
        ComposedCell({"tp": 2, "stage": 1}),
        ComposedCell({"pp": 2, "accumulation": 3, "stage": 2}),
        ComposedCell({"cp": 2, "cp_method": "heads", "kv_heads": 2, "vocab": 64}),
    ],
    4: [
        ComposedCell(
            {"pp": 2, "tp": 2, "accumulation": 3, "precision": "bf16", "pp_schedule": "gpipe"}
        ),
        ComposedCell({"pp": 2, "ep": 2, "accumulation": 2, "layers": 2, "dense_layers": 0}, True),
        ComposedCell(
            {"pp": 2, "cp": 2, "accumulation": 3, "activation_checkpointing": True}, mixed=True
        ),
    ],
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_ranks", CELLS)
def test_peaks_of_composed_runs_are_within_a_percent(num_ranks):
    measure = partial(measure_all, traces_all=False)
    for cell in CELLS[num_ranks]:  # by itself, as groups are kept from call to call
        found = [rank[0] for rank in run_ranks(measure, num_ranks, [cell])]
        for stage, planned in enumerate(predict(cell, num_ranks)):
            peaks = [measured.peak for measured in found if measured.stage == stage]
            assert max(peaks) > 20 * MIB, cell
            assert abs(planned.peak.ledger.total / max(peaks) - 1) <= 0.01, (cell, stage)
