"""The program that scores the planner on published runs: it asks `plan`, and it reads any table."""

import csv
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.catalogue import make_cluster
from shardwise.plan.margins import UNSEEN_MEMORY
from shardwise.plan.model.presets import find_preset
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import plan

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import published

    yield published
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def cells(published) -> ModuleType:
    import _published_cells

    return _published_cells


@pytest.fixture(scope="module")
def report(published, cells) -> Any:
    return published.evaluate(published.read_rows(cells.TABLES[0]), with_time=False)


def row_of(cells: ModuleType, **given: str) -> Any:
    return cells.Row({"id": "R1", **given})


def test_a_row_is_predicted_by_the_plan_of_its_candidate(published, cells) -> None:
    """torchtitan's Llama-3-8B with 8-way ZeRO-3: memory and time are those of `plan`, unchanged."""
    row = next(r for r in published.read_rows(cells.TABLES[0]) if r.id == "R001")
    preset = find_preset("llama-3-8b")
    candidate = Candidate(num_shards=8, micro_batch=2, activation_checkpointing="per_op")
    cluster = make_cluster("H100-96GB", 8, gpus_per_node=8)
    made = plan(ShapedModel("llama", preset.shape, 8192), cluster, candidate)
    found = published.evaluate([row])
    in_device = made.memory.context_bytes + made.memory.communicator_bytes
    assert found.memory[0].predicted == made.memory.expected_bytes - in_device
    assert found.time[0].predicted == made.step_s
    assert found.ran == {"R001": made.verdict}


def test_memory_is_predicted_as_the_documentation_says(published, report) -> None:
    memory = published.summary(report)["memory"]
    assert memory["all"]["rows"] >= 90
    assert memory["all with fused attention"]["median_error"] < 0.10
    assert memory["all with fused attention"]["p95_error"] < 0.40
    assert memory["torchtune, allocated"]["median_error"] < 0.03


def test_verdicts_agree_with_what_ran(published, report) -> None:
    verdicts = published.summary(report)["verdicts"]
    assert verdicts["ran"]["rows"] > 380
    assert verdicts["ran"]["will not fit"] < 0.10 * verdicts["ran"]["rows"]


def test_every_row_that_is_left_out_has_a_reason(report) -> None:
    assert not [r for r in report.not_modelled if r.startswith("row not understood")]


def test_step_times_are_predicted_as_the_documentation_says(published) -> None:
    rows = [row for i, row in enumerate(published.read_rows()) if i % 8 == 3]
    figures = published.summary(published.evaluate(rows))["time_by_gpu"]
    assert figures["all with fused attention"]["mape_calibrated"] < 0.25
    for gpu in ("A100", "H100"):
        assert figures[gpu]["mape_calibrated"] < figures[gpu]["mape_uncalibrated"], gpu


def test_pairs_that_differ_in_one_knob_differ_as_published(report) -> None:
    by_id = {each.run.row.id: each for each in report.memory}
    for first, second, knob, slack in (
        ("R001", "R002", "compiled", 1.0),
        ("R002", "R006", "8 -> 128 ranks", 1.0),
        ("R051", "R052", "8-bit AdamW", 0.5),
        ("R052", "R054", "4-bit AdamW", 0.5),
        ("R291", "R292", "step in backward", 0.5),
        ("R292", "R293", "offloaded activations", 0.3),
    ):
        one, other = by_id[first], by_id[second]
        expected = (other.published - one.published) / GIB
        assert (other.predicted - one.predicted) / GIB == pytest.approx(expected, abs=slack), knob


def test_a_mangled_table_is_read_without_failing(published, cells, tmp_path) -> None:
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


def test_the_program_runs_and_writes_json(published, cells, tmp_path, capsys) -> None:
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
) -> None:
    seen = {row.cell("source") for row in published.read_rows(*cells.TABLES)}
    rows = published.read_rows(cells.UNSEEN)
    assert not seen & {row.cell("source") for row in rows}
    found = published.summary(published.evaluate(rows, with_time=False))
    quantiles = found["published_over_predicted"]["memory"]
    interval = UNSEEN_MEMORY.low, UNSEEN_MEMORY.expected, UNSEEN_MEMORY.high
    assert tuple(round(quantiles[key], 2) for key in ("p5", "median", "p95")) == interval
    assert found["memory"]["all"]["rows"] == 49
    assert found["verdicts"]["ran out of memory"]["rows"] == 100


def test_a_table_without_columns_has_no_rows_to_predict(published, tmp_path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("id,system\nR9,torchtitan\n,\n")
    assert published.main(["--rows", str(empty)]) == 0


# -- cells: for each meaning several ways to write it
CHECKPOINTING = {
    "none": ["no", "none", "off", "False", "No AC", "w/o activation checkpointing", "disabled",
             "no recompute", "selective []", "without grad checkpointing"],
    "full": ["full", "yes", "Full AC", "full activation checkpointing", "grad checkpointing",
             "gradient checkpointing", "act ckpt", "recompute", "every layer", "full recompute",
             "activation-checkpointing: on", "transformer blocks"],
    "selective": ["selective", "selective AC", "core_attn", "selective recompute",
                  "selective core_attn", "partial", "selective activation recomputation"],
    "per_op": ["per-op SAC", "SAC", "selective op", "per op", "op-level", "selective (op)",
               "selective per-op AC"],
}  # fmt: skip
COMMENTS = [
    "", " (recipe default)", " (script default, verify)", " (per the config)", " [see notes]",
    " (8K stage)",
]  # fmt: skip
CASES = [str, str.upper, str.title, lambda text: text.replace(" ", "  "), lambda text: f" {text}."]
OFFLOAD = {
    Offload(): ["", "no", "None", "off", "0% of optimizer->CPU", "no offload"],
    Offload("cpu", optimizer="cpu"): [
        "CPU offload", "FSDP CPU offload, fused optimizer", "full CPU offload", "all",
        "params -> CPU", "params+optimizer->CPU (cpu_adam)", "everything on host",
        "parameters, gradients and optimizer states to CPU RAM", "CPU (1.5 TB host)",
        "offload to the CPU", "all states in host RAM"],
    Offload(optimizer="cpu"): [
        "optimizer->CPU", "Optimizer states to host", "optim to NVMe",
        "optimizer → Grace CPU, speculative", "optimizer+grad->CPU",
        "gradients & optimizer to CPU"],
    Offload(optimizer="cpu", fraction=0.25): [
        "25% of optimizer->CPU", "25 % of the optimizer states to CPU"],
    Offload(optimizer="cpu", activations="cpu"): [
        "activations and optimizer in host memory where needed"],
}  # fmt: skip
STAGES = {
    3: ["ZeRO-3", "zero3", "FSDP2(ZeRO-3)", "FSDP FULL_SHARD + CPU offload", "FSDP2+TP", "HSDP"],
    2: ["ZeRO 2", "FSDP SHARD_GRAD_OP", "FSDP (ZeRO-2-like) + TP", "deepspeed stage 2"],
    1: ["ZeRO-1(dp2)+tp2+pp4", "distributed optimizer", "Dist-Opt", "sharded_ddp fp16"],
    0: ["DDP", "none", "FSDP NO_SHARD", "single GPU"],
    None: ["ZeRO stage not stated", "3D", "TP+PP, DP=1"],
}


def ways(table: dict[Any, list[str]]) -> st.SearchStrategy[tuple[Any, str]]:
    return st.sampled_from([(meaning, text) for meaning, texts in table.items() for text in texts])


def test_cells_mean_the_same_however_they_are_written(cells) -> None:
    @given(ways(CHECKPOINTING), st.sampled_from(COMMENTS), st.sampled_from(CASES))
    def check_checkpointing(way: tuple[str, str], comment: str, written: Any) -> None:
        assert cells.read_checkpointing(written(way[1]) + comment) == (way[0], ())

    @given(ways(OFFLOAD), st.sampled_from(CASES[:3]))
    def check_offload(way: tuple[Offload, str], written: Any) -> None:
        found, unknown = cells.read_offload(row_of(cells, sharding="FSDP", offload=written(way[1])))
        assert found == way[0] or found.fraction == 0
        assert unknown == ()

    check_checkpointing()
    check_offload()
    for stage, texts in STAGES.items():
        for text in texts:
            assert cells.read_stage(cells.normalized(text)) == stage, text
    for text, group in (("ZeRO-1 within 8 GPUs (hybrid)", 8), ("FSDP group 64", 64)):
        assert cells.read_group(cells.normalized(text)) == group
    assert cells.read_group("fsdp2") is None


def test_offload_under_stage_2_leaves_parameters_on_the_device(cells) -> None:
    found, _ = cells.read_offload(row_of(cells, sharding="ZeRO-2", offload="CPU offload"))
    assert (found.params, found.optimizer) == ("device", "cpu")
    row = row_of(cells, sharding="ZeRO-2", system="DeepSpeed ZeRO-2, no offload")
    assert cells.read_offload(row)[0] == Offload()


def test_a_ladder_has_all_that_comes_before_its_rung(cells) -> None:
    def rung(text: str) -> Any:
        notes = f"cumulative ladder: {text}"
        return cells.read_mechanisms(row_of(cells, system="torchtune", notes=notes))

    first, last = rung("+packed dataset").candidate, rung("+8-bit AdamW").candidate
    assert first == {"activation_checkpointing": "none", "offload": Offload()}
    assert (last["activation_checkpointing"], last["optimizer"]) == ("full", "adamw_8bit")
    assert last["step_in_backward"] and last["offload"].activations == "cpu"
    for adapters in (rung("LoRA"), rung("QLoRA")):
        assert adapters.has_adapters and "step_in_backward" not in adapters.candidate
        assert "optimizer" not in adapters.candidate


def test_adapters_are_known_by_the_system_the_model_or_the_notes(cells) -> None:
    for given_cells in (
        {"system": "fsdp_qlora", "model": "Llama-2-7B LoRA"},
        {"system": "litgpt LoRA"},
        {"system": "litgpt", "notes": "LoRA rank 64; no NVLink"},
    ):
        assert cells.read_mechanisms(row_of(cells, **given_cells)).has_adapters


def test_unknown_words_are_reported(cells) -> None:
    assert cells.read_checkpointing("selective frobnicate")[1] == ("frobnicate",)
    assert cells.read_offload(row_of(cells, offload="CPU, gizmo"))[1] == ("gizmo",)


def test_any_text_is_read_without_failing(cells) -> None:
    @given(st.text(max_size=40), st.text(max_size=40))
    def check(one: str, other: str) -> None:
        for name in ("act_ckpt", "offload", "precision", "compile", "notes", "system"):
            cells.read_mechanisms(row_of(cells, **{name: one, "sharding": other}))
        assert all(isinstance(value, int) for value in cells.parse_arch(one).values())

    check()


def test_an_arch_is_read_by_letter(cells) -> None:
    assert cells.parse_arch("L32 h4096 f14336 a32 kv8 V128256") == {
        "L": 32, "h": 4096, "f": 14336, "a": 32, "kv": 8, "V": 128256,
    }  # fmt: skip
    assert cells.parse_arch("L? h14400 a? V250k") == {"h": 14400, "V": 250_000}
    assert cells.parse_arch("L32 h4096 mlp_ratio 8/3 (swiglu) a32 V103168")["f"] == 11008
    assert cells.parse_arch("") == {}
