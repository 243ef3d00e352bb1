"""`shardwise plan` and `shardwise simulate`: what they print, write, refuse and return."""

import argparse
import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from commands import call_command
from programs import run_program
from shardwise.plan.machine.calibration import write_calibration
from shardwise.train.config import load_config
from shardwise.train.decoder import Decoder
from test_calibration import a_calibration

run_plan = partial(call_command, "plan")
run_simulate = partial(call_command, "simulate")

TINY = "dim: 32\nlayers: 2\nheads: 2\nseq: 16\nmicro_batch: 2\nranks: 2\nvocab: 300\n"
Refused = Callable[..., str]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    write_calibration(a_calibration(), path)
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return what runs a command that must fail with code 2 and print nothing but its reason."""

    def run(command: Callable[[list[str]], int], *arguments: object) -> str:
        assert command([str(a) for a in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(("shardwise plan: ", "shardwise simulate: "))
        return err

    return run


def words(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.split())


# -- a plan
def test_bars_of_memory_follow_each_other_to_what_the_verdict_says(tiny, capsys):
    for rows in (1_000_000, 500_000):
        run_plan([str(tiny), "--micro-batch", str(rows)])
        lines = capsys.readouterr().out.splitlines()
        table = [line for line in lines if "│" in line]
        edge = table[0].index("│")
        bars = [[at for at, sign in enumerate(line) if sign in "█░"] for line in table]
        drawn = [at for bar in bars[:-2] for at in bar]
        low, high = bars[-2][0], bars[-2][-1]
        assert drawn == sorted(drawn) and low - 1 <= drawn[-1] <= high + 1 and bars[-1] == []
        (verdict,) = (line.split(":")[0] for line in lines if "a rank (" in line)
        assert verdict == "will not fit" if low > edge else "fits" if high < edge else "tight"


def test_names_are_listed(capsys):
    assert run_plan(["--list"]) == 0
    text = words(capsys)
    for name in ("llama-3-8b", "H100-80GB", "nvlink4", "adamw", "bf16"):
        assert name in text


@pytest.mark.parametrize("command", [run_plan, run_simulate])
def test_help_shows_every_flag_and_is_no_error(command, capsys):
    assert command(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--tokens-per-step" in text
    assert "--calibration" in text


# -- accounting
def test_an_accounting_of_a_model_or_with_a_search_is_refused(refused):
    assert "demo" in refused(run_plan, "demo", "--params", "7e9")
    assert "--search" in refused(run_plan, "--params", "7e9", "--search")
    assert "'bf17'" in refused(run_plan, "--params", "7e9", "--precision", "bf17")


# -- a search
def test_a_search_shows_the_winner_the_front_and_each_reason_once(tiny, capsys):
    flags = ["--search", "--layout", "rows", "--bucket-bytes", "1048576"]
    flags += ["--tokens-per-step", "256", "--micro-batch", "2"]
    assert run_plan([str(tiny), *flags]) == 0
    text = words(capsys)
    assert "candidates" in text
    assert "nothing is both faster and smaller" in text
    assert "why others lost" in text
    assert run_plan([str(tiny), *flags, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["winner"]["candidate"]["accumulation"] == 4
    assert facts["num_candidates"] == len(facts["pareto"]) + len(facts["rejected"])


def test_a_search_shows_winners_and_five_reasons_and_the_flags_that_make_the_winner(capsys):
    flags = ["demo", "--ranks", "2", "--gpu", "rtx4090", "--tp", "1", "--pp", "1", "--cp", "1"]
    assert run_plan([*flags, "--search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 45
    assert "compared at 196,608 tokens a step" in " ".join(lines)
    start = next(n for n, line in enumerate(lines) if "in full, with" in line)
    said = " ".join(lines[start : lines.index("", start)]).partition("--search: ")[2]
    winner = lines[lines.index("") + 2]
    assert run_plan([*flags[:-2], *shlex.split(said)]) == 0
    made = capsys.readouterr().out.splitlines()
    assert made[1] == winner
    assert made[3:5] == lines[lines.index("") + 4 : lines.index("") + 6]


def test_a_search_in_which_nothing_fits_has_code_1_and_says_why(tiny, capsys):
    assert run_plan([str(tiny), "--search", "--max-memory", "10KiB"]) == 1
    text = words(capsys)
    assert "no candidate keeps the limits" in text
    assert "alone are" in text
    assert "more)" in text


# -- a file for `shardwise train`
def test_a_preset_is_written_as_a_decoder_with_as_many_parameters(tmp_path, capsys):
    path = tmp_path / "train.yaml"
    assert run_plan(["demo", "--ranks", "2", "--write", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = load_config(path, {})
    assert config.vocab is not None
    with torch.device("meta"):
        decoder = Decoder(config, config.vocab)
    assert sum(p.numel() for p in decoder.parameters()) == facts["num_params"]
    assert config.precision == "bf16"
    assert config.predicted_step_s == facts["time"]["step_s"]
    assert config.predicted_peak_bytes == facts["memory"]["peak"]["total_bytes"]


def test_the_winner_of_a_search_is_written_and_never_offloads(tiny, tmp_path, capsys):
    path = tmp_path / "train.yaml"
    flags = ["--search", "--layout", "rows", "--micro-batch", "2", "--bucket-bytes", "0"]
    assert run_plan([str(tiny), *flags, "--write", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    met = [each["candidate"] for each in facts["pareto"] + facts["rejected"]]
    assert {c["offload"]["optimizer"] for c in met} == {"device"}
    assert load_config(path, {}).stage == facts["winner"]["candidate"]["stage"]


@pytest.mark.parametrize(
    ("key", "last"), [("gather", "int4"), ("reduce", "int4-a2a"), ("optimizer", "sgd")]
)
def test_a_format_or_an_optimizer_is_planned_written_and_read_again(key, last, tmp_path, capsys):
    path = tmp_path / "train.yaml"
    assert run_plan(["demo", "--ranks", "2", f"--{key}", last, "--write", str(path)]) == 0
    assert getattr(load_config(path, {}), key) == last
    capsys.readouterr()
    assert run_plan([str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["candidate"][key] == last
    assert last in again["label"]


def test_gathers_are_encoded_only_where_there_is_something_to_gather(refused):
    coded = (run_plan, "demo", "--gather", "int8")
    assert "nothing is gathered at stage 0" in refused(*coded, "--stage", "0")
    assert "params='device'" in refused(*coded, "--offload", "{optimizer: cpu}")


def test_blocks_that_a_plan_does_not_count_are_refused(tiny, tmp_path, refused):
    path = tmp_path / "train.yaml"
    path.write_text(tiny.read_text() + "\noptimizer_options: {moments: 8bit, block: 128}")
    assert "a plan counts blocks of 256; got 128" in refused(run_plan, path)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["gpt2"], "gpt2"),
        (["demo", "--offload", "{optimizer: nvme}"], "--offload nvme:/local/ssd"),
        (["demo", "--activation-checkpointing", "selective"], "selective"),
        (["demo", "--optimizer", "lion"], "'lion'"),
        (["demo", "--precision", "pure_bf16"], "'bf16'"),
    ],
)
def test_what_the_engine_cannot_do_is_not_written(flags, reason, tmp_path, refused):
    path = tmp_path / "train.yaml"
    told = refused(run_plan, *flags, "--write", path)
    assert "write: " in told
    assert reason in told
    assert not path.exists()


def test_degrees_that_a_run_refuses_are_not_written(tmp_path, refused):
    run, path = tmp_path / "run.yaml", tmp_path / "train.yaml"
    run.write_text("dim: 64\nheads: 8\nkv_heads: 2\nffn_multiple: 4\nvocab: 256\nlayers: 2\n")
    asked = (run_plan, run, "--ranks", "4", "--write", path)
    assert "tp: expected a divisor of kv_heads 2, got 4" in refused(*asked, "--tp", "4")
    assert "accumulation: expected at least pp 2" in refused(*asked, "--pp", "2")
    search = (*asked, "--search", "--tp", "4")
    assert "tp: expected a divisor of kv_heads 2, got 4" in refused(*search)
    assert not path.exists()


# -- files that cannot be written
@pytest.mark.parametrize(("command", "flag"), [(run_plan, "--write"), (run_simulate, "--trace")])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    command, flag, tmp_path, refused
):
    told = refused(command, "no-model", flag, tmp_path / "none" / "x")
    assert flag in told
    assert "none" in told
    assert "folder" in refused(command, "no-model", flag, tmp_path)


# -- calibrations
def test_a_calibration_prices_a_plan_and_stands_for_the_machine(tiny, calibration, capsys):
    assert run_plan([str(tiny), "--calibration", str(calibration), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cluster"]["accelerator"] == "processor"
    assert facts["candidate"]["transport"] == "point_to_point"
    assert any("measured" in line for line in facts["assumptions"])

    # A CPU does not offload to itself.
    flags = ["--search", "--micro-batch", "2", "--layout", "rows", "--bucket-bytes", "0"]
    assert run_plan([str(tiny), "--calibration", str(calibration), *flags, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {r["candidate"]["offload"]["optimizer"] for r in facts["rejected"]} == {"device"}


def test_a_calibration_of_other_ranks_or_beside_a_device_is_refused(tiny, calibration, refused):
    told = refused(run_plan, tiny, "--calibration", calibration, "--ranks", 3)
    assert "measured with 2 ranks" in told
    assert "--ranks 3" in told
    told = refused(run_plan, tiny, "--calibration", calibration, "--gpu", "h100")
    assert "gpu" in told
    told = refused(run_simulate, tiny, "--calibration", calibration, "--sweep", "2,4")
    assert "sweep" in told


# -- simulate
def test_a_simulation_shows_scaling_and_goodput_and_writes_its_trace(tiny, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    flags = "--ranks 8 --straggler 1.5 --slow-link 2 --sweep 4,8 --mtbf-hours 5000"
    flags += " --accumulation 16"
    arguments = [str(tiny), *flags.split(), "--trace", str(trace)]
    assert run_simulate(arguments) == 0
    text = words(capsys)
    for part in ("computing", "what decides the step", "efficiency", "goodput"):
        assert part in text
    assert "of 3 of the 16 micro-batches" in text
    about = json.loads(trace.read_text())["otherData"]
    assert (about["num_simulated_micro_batches"], about["num_micro_batches"]) == (3, 16)
    assert run_simulate([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["num_ranks"] for row in facts["scaling"]] == [4, 8]
    assert 0 < facts["goodput"]["kept_fraction"] < 1
    assert facts["kind"] == "simulation"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--straggler", "3:2"], "--straggler"),
        (["--straggler", "0.5"], "--straggler"),
        (["--straggler", "nan"], "--straggler"),
        (["--slow-link", "x"], "--slow-link"),
        (["--sweep", "8,x"], "sweep: expected a valid integer"),
        (["--sweep", "0"], "sweep"),
        (["--sweep", "3", "--dp-replicate", "2"], "sweep: 3 ranks"),
        (["--mtbf-hours", "0"], "--mtbf-hours"),
        (["--mtbf-hours", "inf"], "--mtbf-hours"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_told_by_its_flag(flags, reason, tiny, refused):
    assert reason in refused(run_simulate, tiny, *flags)


# -- plan, then train
@pytest.mark.slow
def test_a_written_plan_trains_and_its_state_is_predicted_to_the_byte(tmp_path):
    start, planned = tmp_path / "start.yaml", tmp_path / "planned.yaml"
    start.write_text(
        TINY + f"stage: 2\nsteps: 3\nsample_tokens: 2\neval_windows: 1\nthreads: 1\n"
        f"data: {argparse.__file__}\noutput: {tmp_path / 'run'}\n"
    )
    assert run_plan([str(start), "--write", str(planned), "--accumulation", "2"]) == 0
    predicted = yaml.safe_load(planned.read_text())["predicted_state_bytes"]
    run = run_program("shardwise", "train", planned, num_ranks=2)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if ", measured " in line]
    assert [word in " ".join(lines) for word in ("step time", "state", "peak")] == [True] * 3
    state = next(line for line in lines if "state" in line)
    assert "(+0.0%)" in state
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    measured = [row["state_bytes"] for row in map(json.loads, steps) if "state_bytes" in row]
    assert measured
    assert set(measured) == {predicted}


@pytest.mark.parametrize("what", [["llama-3-8b"], ["--params", "8e9"]])
def test_assumed_ranks_are_said_first_with_their_flag(capsys, what):
    run_plan(what)
    assert words(capsys).startswith("assumed: 8 ranks, as none are given; --ranks sets them")
    run_plan([*what, "--json"])
    assert json.loads(capsys.readouterr().out)["assumptions"][0].startswith("assumed: 8 ranks")
    run_plan([*what, "--ranks", "8"])
    assert "as none are given" not in words(capsys)


def test_ranks_of_a_file_are_not_assumed(tiny, capsys):
    run_plan([str(tiny)])
    assert "as none are given" not in words(capsys)


def test_the_root_unit_has_a_plain_name(capsys):
    run_plan(["llama-3-8b", "--ranks", "8"])
    out = words(capsys)
    assert "in (root)" in out and "((root))" not in out
