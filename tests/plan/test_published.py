"""The program that scores the planner on published runs: it asks `plan`, and it reads any table."""

import csv
import json
import math
import random
import sys
from pathlib import Path

import pytest

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.margins import UNSEEN_MEMORY
from shardwise.plan.model.presets import find_preset
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import plan

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture(scope="module")
def published():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import published

    yield published
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def cells(published):
    import _published_cells

    return _published_cells


@pytest.fixture(scope="module")
def report(published, cells):
    return published.evaluate(published.read_rows(cells.TABLES[0]), with_time=False)


def test_a_row_is_predicted_by_the_plan_of_its_candidate(published, cells):
    """torchtitan's Llama-3-8B with 8-way ZeRO-3: memory and time are those of `plan`, unchanged."""
    row = next(r for r in published.read_rows(cells.TABLES[0]) if r.id == "R001")
    preset = find_preset("llama-3-8b")
    candidate = Candidate(num_shards=8, micro_batch=2, activation_checkpointing="per_op")
    cluster = make_cluster("H100-96GB", 8, gpus_per_node=8)
    made = plan(ShapedModel("llama", preset.shape, 8192), cluster, candidate)
    found = published.evaluate([row])
    margins = made.memory.margins
    in_device = margins["context of the device"] + margins["communicators"]
    assert found.memory[0].predicted == made.memory.expected_bytes - in_device
    assert found.time[0].predicted == made.step_s
    assert found.ran == {"R001": made.verdict}


def test_memory_is_predicted_as_the_documentation_says(published, report):
    memory = published.summary(report)["memory"]
    assert memory["all"]["rows"] >= 90
    assert memory["all with fused attention"]["median_error"] < 0.10
    assert memory["all with fused attention"]["p95_error"] < 0.40
    assert memory["torchtune, allocated"]["median_error"] < 0.03


def test_verdicts_agree_with_what_ran(published, report):
    verdicts = published.summary(report)["verdicts"]
    assert verdicts["ran"]["rows"] > 380
    assert verdicts["ran"]["will not fit"] < 0.10 * verdicts["ran"]["rows"]


def test_every_row_that_is_left_out_has_a_reason(report):
    assert not [r for r in report.not_modelled if r.startswith("row not understood")]


def test_step_times_are_predicted_as_the_documentation_says(published):
    rows = [row for i, row in enumerate(published.read_rows()) if i % 8 == 3]
    figures = published.summary(published.evaluate(rows))["time_by_gpu"]
    assert figures["all with fused attention"]["mape_calibrated"] < 0.25
    for gpu in ("A100", "H100"):
        assert figures[gpu]["mape_calibrated"] < figures[gpu]["mape_uncalibrated"], gpu


def test_pairs_that_differ_in_one_knob_differ_as_published(report):
    by_id = {each.run.row.id: each for each in report.memory}
    for first, second, knob, slack in (
        ("R001", "R002", "compiled", 1.0),
        ("R002", "R006", "8 -> 128 ranks", 1.0),
        ("R051", "R052", "8-bit AdamW", 0.5),
        ("R052", "R054", "4-bit AdamW", 0.5),
    ):
        one, other = by_id[first], by_id[second]
        expected = (other.published - one.published) / GIB
        assert (other.predicted - one.predicted) / GIB == pytest.approx(expected, abs=slack), knob


def test_a_mangled_table_is_read_without_failing(published, cells, tmp_path):
    """Cells are emptied, swapped and filled with noise: rows are left out, nothing fails."""
    rng = random.Random(7)
    with cells.TABLES[0].open(newline="") as lines:
        table = list(csv.DictReader(lines))
    noise = ["", "?", "-1", "0", "nan", "1e400", "12 GB", "Ω", "L h a", "L9 h0 a0", "999999999999"]
    for row in table:
        for name in rng.sample(sorted(row), 5):
            row[name] = rng.choice([*noise, rng.choice(table)[name]])
    mangled = tmp_path / "mangled.csv"
    with mangled.open("w", newline="") as out:
        writer = csv.DictWriter(out, table[0].keys())
        writer.writeheader()
        writer.writerows(table[::5])
    figures = published.summary(published.evaluate(published.read_rows(mangled)))
    assert math.isfinite(figures["memory"]["all"]["median_error"])


def test_the_program_runs_and_writes_json(published, cells, tmp_path, capsys):
    out = tmp_path / "out.json"
    rows = ["--rows", str(cells.TABLES[0]), "--system", "torchtitan"]
    assert published.main([*rows, "--verbose", "--json", str(out)]) == 0
    assert "R001   memory" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["memory"]["all"].keys() == {"rows", "median_error", "p95_error"}
    keys = {"rows", "mape_uncalibrated", "mape_calibrated"}
    assert figures["time_by_gpu"]["all"].keys() == figures["time_by_gpu"]["H100"].keys() == keys


def test_the_interval_that_plans_print_is_that_of_pages_that_nothing_was_fitted_to(
    published, cells
):
    seen = {row.cell("source") for row in published.read_rows(*cells.TABLES)}
    rows = published.read_rows(cells.UNSEEN)
    assert not seen & {row.cell("source") for row in rows}
    found = published.summary(published.evaluate(rows, with_time=False))
    quantiles = found["published_over_predicted"]["memory"]
    interval = UNSEEN_MEMORY.low, UNSEEN_MEMORY.expected, UNSEEN_MEMORY.high
    assert tuple(round(quantiles[key], 2) for key in ("p5", "median", "p95")) == interval
    assert found["memory"]["all"]["rows"] == 49
    assert found["verdicts"]["ran out of memory"]["rows"] == 100


def test_a_table_without_columns_has_no_rows_to_predict(published, tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("id,system\nR9,torchtitan\n,\n")
    assert published.main(["--rows", str(empty)]) == 0


# -- cells: for each meaning several ways to write it
def test_unknown_words_are_reported(cells):
    assert cells.read_checkpointing("selective frobnicate")[1] == ("frobnicate",)
    assert cells.read_offload(cells.Row({"id": "R1", "offload": "CPU, gizmo"}))[1] == ("gizmo",)
