"""`shardwise ckpt` on real checkpoints: what it prints, what it writes, and how it ends."""

import datetime
import io
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shardwise
from checkpoint.saving import Setting, build, flip, take_step
from commands import run_alone
from convert import fake_deepspeed
from convert.sources import MemorySource, all_bits, whole_tensors
from ranks import run_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import take_lock
from shardwise.checkpoint.manifest import seal, unseal
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.source import OptimizerInfo
from shardwise.cli.facts import checkpoint_facts, run_facts
from shardwise.cli.main import app
from shardwise.cli.tables import show_checkpoint, show_run
from shardwise.convert.deepspeed import open_deepspeed
from shardwise.convert.detect import open_any
from shardwise.convert.importing import import_source
from shardwise.errors import ConfigError

FILES = Files()
NEWEST = "step-00000003"
TENSORS = "rank00000-0.safetensors"


def command(*arguments):
    return CliRunner().invoke(app, ["ckpt", *map(str, arguments)])


def facts_of(*arguments, code=0):
    result = command(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def source_of(step):
    torch.manual_seed(step)
    groups = ({"lr": 0.25, "betas": (0.9, 0.99), "foreach": None, "params": ["up", "down"]},)
    source = MemorySource(
        {"up": torch.randn(30, 70), "down": torch.randn(70, 30)},
        tied={"head": "up"},
        optimizer=OptimizerInfo("AdamW", groups, {}),
    )
    for name in ("up", "down"):
        source.add("optimizer", name, torch.randn(30, 70), "exp_avg")
        source.add("optimizer", name, torch.tensor(float(step)), "step")
    source.add("buffer", "mean", torch.arange(3))
    source.extra = {"order": torch.randperm(11), "epoch": 1}
    return source


@pytest.fixture
def run(tmp_path):
    """A run's folder with the checkpoints of three steps."""
    for step in (1, 2, 3):
        import_source(source_of(step), tmp_path / "run", files=FILES, step=step)
    return tmp_path / "run"


def train_and_save(rank, _, path):
    run = build(Setting(3, 3, "flat"))
    take_step(run, 0)
    shardwise.save(path, run.model, run.optimizer, extra={"mine": torch.ones(5)})


@pytest.fixture
def locked(run):
    lock = take_lock(FILES, run, "abc")
    yield lock
    lock.release()


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def disk_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


# -- inspect --------------------------------------------------------------------------------------


def test_a_run_is_shown_newest_first_with_the_newest_that_passes_marked(run):
    cut(run / NEWEST / TENSORS)
    (run / ".tmp-step-00000004-0a1b2c3d").mkdir()
    facts = facts_of("inspect", run)
    rows = facts["checkpoints"]
    assert [row["step"] for row in rows] == [3, 2, 1]
    assert [row["is_newest"] for row in rows] == [False, True, False]
    assert [row["damage"] is None for row in rows] == [False, True, True]
    assert TENSORS in rows[0]["damage"]
    assert [row["num_bytes"] for row in rows[1:]] == [
        disk_bytes(run / "step-00000002"),
        disk_bytes(run / "step-00000001"),
    ]
    assert facts["leftovers"] == [".tmp-step-00000004-0a1b2c3d"]
    assert facts["lock_holder"] is None

    shown = command("inspect", run).stdout
    (line,) = [line for line in shown.splitlines() if "<- newest" in line]
    assert line.split()[0] == "2"
    assert ".tmp-step-00000004-0a1b2c3d" in shown


def test_a_run_whose_manifest_is_gone_is_shown_all_the_same(run):
    (run / NEWEST / "manifest.json").unlink()
    first, second, _ = facts_of("inspect", run)["checkpoints"]
    assert (first["step"], first["num_ranks"], second["is_newest"]) == (3, None, True)
    assert command("inspect", run).exit_code == 0
    assert command("inspect", run / NEWEST).exit_code == 1


def test_a_running_run_is_named_and_what_it_may_be_writing_is_no_leftover(run, locked):
    (run / ".tmp-step-00000004-0a1b2c3d").mkdir()
    assert f"process {os.getpid()}" in facts_of("inspect", run)["lock_holder"]
    shown = command("inspect", run).stdout
    assert f"process {os.getpid()}" in shown and "being written or removed now, or left" in shown
    locked.release()
    assert facts_of("inspect", run)["lock_holder"] is None
    assert "the next run in this folder removes them" in command("inspect", run).stdout


@pytest.mark.parametrize("width", [24, 50, 80])
def test_a_narrow_terminal_cuts_no_value(run, width):
    files, text = Files(), io.StringIO()
    console = Console(file=text, width=width)
    show_run(console, run_facts(files, run))
    show_checkpoint(console, checkpoint_facts(files, run / NEWEST), lists_tensors=True)
    shown = text.getvalue()
    assert "…" not in shown
    words = ("newest", "UTC", "up  exp_avg", "30 x 70", "own, 1 ranks", "indexes and values")
    assert width < 80 or all(word in shown for word in words)


def test_the_sizes_of_a_checkpoint_are_those_of_its_tensors(run):
    facts, source = facts_of("inspect", run / NEWEST, "--tensors"), source_of(3)
    for kind in ("param", "buffer", "optimizer"):
        tensors = [t for t in source.tensors if t.kind == kind]
        found = whole_tensors(source)
        assert facts[f"num_{kind}_tensors"] == len(tensors)
        assert facts[f"num_{kind}_elements"] == sum(t.numel for t in tensors)
        assert facts[f"{kind}_bytes"] == sum(found[t.key].nbytes for t in tensors)
    assert facts["extra_bytes"] == 11 * 8
    assert facts["num_bytes"] == disk_bytes(run / NEWEST)
    assert (facts["step"], facts["stage"], facts["num_ranks"]) == (3, 0, 1)
    assert (facts["tied"], facts["damage"]) == ({"head": "up"}, None)
    assert facts["torch"] == torch.__version__
    assert facts["optimizer"] == {
        "class_name": "AdamW",
        "groups": [{"lr": 0.25, "betas": [0.9, 0.99], "foreach": None, "num_params": 2}],
    }
    listed = {(t["name"], t["state"], t["dtype"], tuple(t["shape"])) for t in facts["tensors"]}
    named = {(t.name, t.state, t.dtype, t.shape) for t in source.tensors}
    assert listed == named | {("order", "", "I64", (11,))}
    assert "tensors" not in facts_of("inspect", run / NEWEST)


def test_how_tensors_are_cut_is_shown(tmp_path):
    run_ranks(train_and_save, 3, tmp_path / "ours")
    facts = facts_of("inspect", tmp_path / "ours", "--tensors")
    cuts = {(t["name"], t["layout"], t["num_parts"]) for t in facts["tensors"]}
    assert {("frozen", "flat", 3), ("counts", "whole", 1), ("mine", "own", 3)} <= cuts
    assert facts["extra_bytes"] == 3 * 5 * 4
    assert (facts["num_ranks"], facts["stage"], facts["step"]) == (3, 3, None)
    shown = command("inspect", tmp_path / "ours", "--all").stdout
    assert "flat, 3" in shown and "own, 3 ranks" in shown
    assert command("verify", tmp_path / "ours").exit_code == 0


def test_a_checkpoint_is_shown_for_people(run):
    shown = command("inspect", run / NEWEST).stdout
    for part in ("AdamW", "lr 0.25", "betas [0.9, 0.99]", "head = up", "16.4 KiB", "stage 0"):
        assert part in shown
    assert "foreach" not in shown  # what is not set is left out


def test_names_in_a_checkpoint_cannot_drive_the_terminal(tmp_path):
    source = MemorySource({"w\x1b[2Jx[bold]": torch.ones(2)}, tied={"a\nb": "w\x1b[2Jx[bold]"})
    import_source(source, tmp_path / "ours", files=FILES)
    shown = command("inspect", tmp_path / "ours", "--tensors").stdout
    assert "\x1b" not in shown
    assert r"w\x1b[2Jx[bold]" in shown
    flip(tmp_path / "ours" / TENSORS)
    shown = command("verify", tmp_path / "ours").stdout
    assert "\x1b" not in shown
    assert r"'w\x1b[2Jx[bold]'" in shown


@pytest.mark.parametrize("name", ["inspect", "verify", "export"])
def test_what_is_no_checkpoint_ends_with_code_2(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path in ("nowhere", "empty", "file"):
        rest = [tmp_path / "out"] if name == "export" else []
        result = command(name, tmp_path / path, *rest)
        assert result.exit_code == 2
        assert str(tmp_path / path) in result.stderr
        assert (result.stdout, (tmp_path / "out").exists()) == ("", False)


# -- verify ---------------------------------------------------------------------------------------


def test_all_checkpoints_of_a_run_are_verified(run):
    facts = facts_of("verify", run)
    assert [c["step"] for c in facts["checkpoints"]] == [3, 2, 1]
    assert facts["num_bytes"] == sum(disk_bytes(folder) for folder in run.glob("step-*"))
    assert (facts["ok"], facts["num_damaged"]) == (True, 0)
    result = command("verify", run)
    assert (result.exit_code, result.stdout.count("whole")) == (0, 3)
    assert "3 checkpoints" in result.stdout


def test_damage_is_printed_and_ends_with_code_1(run):
    flip(run / NEWEST / TENSORS)
    (run / "step-00000001" / "note.txt").write_text("x")
    facts = facts_of("verify", run, code=1)
    (finding,) = facts["checkpoints"][0]["findings"]
    assert (finding["file"], finding["tensor"]) == (TENSORS, "extra.order")
    assert [c["ok"] for c in facts["checkpoints"]] == [False, True, True]
    assert len(facts["checkpoints"][2]["notes"]) == 1

    result = command("verify", run / NEWEST)
    assert result.exit_code == 1
    assert f"{TENSORS}: tensor 'extra.order': damaged" in result.stdout
    assert "1 damaged" in result.stdout
    assert command("verify", run / "step-00000001").exit_code == 0


class Rotating(Files):
    """A disk from which a run removes its checkpoint of step 2 once it was listed so often."""

    def __init__(self, num_lists):
        self.num_lists = num_lists

    def list(self, path):
        if path.name == "step-00000002":
            self.num_lists -= 1
            if self.num_lists < 0 and path.exists():
                path.rename(path.parent / ".old-step-00000002-0a1b2c3d")
        return super().list(path)


@pytest.mark.parametrize(
    ("name", "num_lists"),
    [("inspect", 0), ("inspect", 1), *(("verify", n) for n in range(4)), ("verify", 99)],
)
def test_a_checkpoint_that_is_rotated_away_meanwhile_is_no_damage(
    run, monkeypatch, name, num_lists
):
    files = Rotating(num_lists)
    monkeypatch.setattr("shardwise.checkpoint.files.Files", lambda: files)
    if (name, num_lists) == ("verify", 1):  # all others are whole
        result = command("verify", run)
        assert result.exit_code == 0, result.stderr
        said = "step-00000002 was removed meanwhile", "2 checkpoints"
        assert all(words in result.stdout for words in said)
        return
    flip(run / "step-00000001" / "manifest.json")
    facts = facts_of(name, run, code=1 if name == "verify" else 0)
    steps = [Path(c["path"]).name for c in facts["checkpoints"]]
    gone = num_lists < 99
    assert steps == [NEWEST, *(["step-00000002"] if not gone else []), "step-00000001"]
    assert len(facts["removed_meanwhile"]) == gone


def test_a_checkpoint_that_cannot_be_judged_does_not_hide_the_others(run):
    path = run / NEWEST / "manifest.json"
    value = unseal(path.read_bytes(), "") | {"format": 9}
    path.write_bytes(seal(SimpleNamespace(model_dump=lambda **_: value)))
    flip(run / "step-00000001" / TENSORS)
    result = command("verify", run)
    assert (result.exit_code, "1 damaged" in result.stdout) == (1, True)
    assert "format 9" in result.stderr


def test_a_run_without_a_checkpoint_is_not_verified(tmp_path):
    take_lock(FILES, tmp_path, "abc").release()
    result = command("verify", tmp_path)
    assert (result.exit_code, "no checkpoint to verify" in result.stdout) == (1, True)


# -- export ---------------------------------------------------------------------------------------


def test_the_weights_of_the_newest_that_passes_are_exported(run, tmp_path):
    cut(run / NEWEST / TENSORS)
    result = command("export", run, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "passed over" in result.stderr and NEWEST in result.stderr
    assert "head" in result.stdout
    source = source_of(2)
    wanted = {k: t for k, t in whole_tensors(source).items() if k in ("up", "down", "mean")}
    assert all_bits(load_file(tmp_path / "out" / "model.safetensors")) == all_bits(wanted)


def test_a_step_a_dtype_and_a_size_can_be_chosen(run, tmp_path):
    options = ["--step", 1, "--dtype", "bf16", "--max-shard-size", "4.2KB"]
    result = command("export", run, tmp_path / "out", *options)
    assert result.exit_code == 0, result.stderr
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 3
    found = {}
    for file in files:
        found |= load_file(file)
    wanted = whole_tensors(source_of(1))
    assert torch.equal(found["up"], wanted["up"].bfloat16())
    assert torch.equal(found["mean"], wanted["mean"])


def test_a_damaged_tensor_is_never_exported(run, tmp_path):
    data = (run / NEWEST / TENSORS).read_bytes()
    flip(run / NEWEST / TENSORS, at=8 + int.from_bytes(data[:8], "little") + 30)
    result = command("export", run / NEWEST, tmp_path / "out", "--to", "dcp")
    assert result.exit_code == 1
    assert "is damaged" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--max-shard-size", "5 apples"], "5 apples"),
        (["--max-shard-size", "5iB"], "expected a size such as 5GB"),
        (["--max-shard-size", "-5GB"], "expected a size such as 5GB"),
        (["--max-shard-size", "0"], "max_shard_bytes"),
        (["--dtype", "int8"], "int8"),
        (["--to", "dcp", "--dtype", "bf16"], "--to hf only"),
        (["--to", "onnx"], "onnx"),
        (["--step", "9"], "no checkpoint of step 9"),
        (["--config-from", "nowhere"], "'--config-from': dir 'nowhere' does not exist"),
    ],
)
def test_wrong_options_of_an_export_end_with_code_2(run, tmp_path, options, part):
    result = command("export", run, tmp_path / "out", *options)
    assert (result.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert part in result.stderr


def test_a_target_that_is_there_stays_as_it_is(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for arguments in (["export", run], ["import", "--from", "hf", tmp_path / "weights"]):
        if arguments[0] == "import":
            assert command("export", run, tmp_path / "weights").exit_code == 0
        result = command(*arguments, tmp_path / "out")
        assert (result.exit_code, os.listdir(tmp_path / "out")) == (1, ["mine"])
        assert str(tmp_path / "out") in result.stderr


# -- import ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_what_was_exported_is_found_and_imported_to_the_bit(run, tmp_path, to):
    assert command("export", run, tmp_path / "out", "--to", to).exit_code == 0
    result = command("import", tmp_path / "out", tmp_path / "back", "--step", 7)
    assert result.exit_code == 0, result.stderr
    assert {"hf": "Hugging Face", "dcp": "torch DCP"}[to] in result.stdout
    wanted = whole_tensors(source_of(3))
    with closing(Checkpoint(FILES, tmp_path / "back" / "step-00000007")) as back:
        found = whole_tensors(back)
        assert back.step == 7
        if to == "dcp":
            assert back.optimizer.groups[0]["lr"] == 0.25
            wanted["head"] = wanted["up"]
        else:
            wanted = {key: wanted[key] for key in ("up", "down", "mean")}
    assert all_bits(found) == all_bits(wanted)
    assert command("verify", tmp_path / "back").exit_code == 0


@pytest.mark.parametrize("way", ["latest", "tag", "folder"])
def test_a_deepspeed_folder_is_found_and_imported_to_the_bit(tmp_path, way):
    wanted = fake_deepspeed.make_run()
    home = fake_deepspeed.write(tmp_path / "ds", wanted, stage=3, world=2, tag="step7")
    fake_deepspeed.write(tmp_path / "ds", fake_deepspeed.make_run(), 3, 2, tag="later")
    (tmp_path / "ds" / "latest").write_text("later" if way == "tag" else "step7")
    source = home if way == "folder" else tmp_path / "ds"
    tag = ["--tag", "step7"] if way == "tag" else []
    result = command("import", source, tmp_path / "back", *tag)
    assert result.exit_code == 0, result.stderr
    assert "DeepSpeed ZeRO" in result.stdout
    with closing(Checkpoint(FILES, tmp_path / "back")) as back:
        found = whole_tensors(back)
        assert back.step == open_deepspeed(home).step
    assert all_bits(found) == all_bits(whole_tensors(open_deepspeed(home)))
    assert command("verify", tmp_path / "back").exit_code == 0


@pytest.mark.parametrize("prefix", [(), ("--strip-prefix", "a")], ids=["as it is", "renamed"])
def test_an_import_prints_which_entries_of_the_users_state_it_left_out(tmp_path, prefix):
    run = fake_deepspeed.make_run()
    run.client = {"n": 1, "in": {"when": datetime.datetime(2026, 1, 1), "ok": 2}, "cls": Path}
    home = fake_deepspeed.write(tmp_path / "ds", run, 1, 1)
    prefix = ("--strip-prefix", open_deepspeed(home).tensors[0].name[:1]) if prefix else ()
    result = command("import", home, tmp_path / "back", *prefix)
    assert result.exit_code == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if line.startswith("left out")]
    assert len(said) == 2, result.stdout
    assert all(any(place in line for line in said) for place in ("when", "cls"))
    with closing(Checkpoint(FILES, tmp_path / "back")) as back:
        assert back.extra["n"] == 1
        assert back.extra["in"] == {"ok": 2}


@pytest.mark.parametrize(
    ("names", "options", "code", "part"),
    [
        ([], [], 2, "none of the formats"),
        (["model.safetensors", ".metadata"], [], 2, "Hugging Face safetensors and torch DCP"),
        (["manifest.json"], [], 2, "ours already"),
        (["step-00000001"], [], 2, "ours already"),
        (["model.safetensors"], ["--tag", "x"], 2, "is for DeepSpeed"),
        (["model.safetensors"], [], 1, "0 bytes are no safetensors file"),
        ([".metadata"], [], 1, ".metadata"),
        (["latest"], [], 1, "plain name"),
        (["latest"], ["--tag", "x"], 1, "no folder 'x'"),
        (["mp_rank_00_model_states.pt"], [], 1, "mp_rank_00"),
    ],
)
def test_what_cannot_be_imported_says_why(tmp_path, names, options, code, part):
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).touch()
    result = command("import", tmp_path / "in", tmp_path / "out", *options)
    assert (result.exit_code, part in result.stderr) == (code, True), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_prefix_is_stripped_and_one_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"module.w": torch.ones(3)}, tmp_path / "in" / "model.safetensors")
    result = command("import", tmp_path / "in", tmp_path / "out", "--strip-prefix", "model.")
    assert (result.exit_code, "begins with 'model.'" in result.stderr) == (2, True)
    result = command("import", tmp_path / "in", tmp_path / "out", "--strip-prefix", "module.")
    assert (result.exit_code, ": 1 tensor, " in result.stdout) == (0, True), result.stderr
    with closing(Checkpoint(FILES, tmp_path / "out")) as ours:
        assert [info.name for info in ours.tensors] == ["w"]


def test_nothing_is_imported_beside_a_running_run(run, locked, tmp_path):
    assert command("export", run, tmp_path / "out").exit_code == 0
    result = command("import", tmp_path / "out", run, "--step", 9)
    assert (result.exit_code, "(run abc) saves checkpoints there" in result.stderr) == (1, True)
    assert not (run / "step-00000009").exists()


@pytest.mark.parametrize(
    ("error", "part"),
    [(MemoryError(), "memory of this machine is not enough\n"), (RuntimeError("odd"), "odd\n")],
)
def test_errors_of_the_machine_are_messages_too(tmp_path, monkeypatch, error, part):
    def fail(*_):
        raise error

    monkeypatch.setattr("shardwise.convert.detect.open_any", fail)
    result = command("import", tmp_path, tmp_path / "out")
    assert (result.exit_code, result.stderr.endswith(part)) == (1, True)


# -- the process ----------------------------------------------------------------------------------


def test_inspect_imports_no_torch_and_shows_no_bar_in_a_pipe(run):
    inspects = ["inspect", run], ["inspect", run / NEWEST, "--all"]
    lines = [["--help"], *inspects]
    output, modules = run_alone(*(["ckpt", *line] for line in lines))
    assert all(name in output for name in ("inspect", "verify", "export", "import"))
    assert not modules & {"torch", "numpy"}


@pytest.mark.parametrize("line", [["report"], ["doctor"], ["plan"]])
def test_a_path_that_is_too_long_is_one_line(line):
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *line, "a" * 5000], capture_output=True, text=True
    )
    assert done.returncode and len(done.stderr.splitlines()) == 1 and len(done.stderr) < 300
    assert "each part of a path has at most 255" in done.stderr


@pytest.mark.parametrize("options", [{}, {"name": "hf"}, {"name": "dcp"}])
@pytest.mark.parametrize("given", ["", "actor", "actor/model_world_size_8_rank_0.pt"])
def test_files_of_verl_are_refused_by_name_with_the_command_that_joins_them(
    tmp_path, given, options
):
    (tmp_path / "actor").mkdir()
    for name in ("model_world_size_8_rank_0.pt", "extra_state_world_size_8_rank_0.pt"):
        (tmp_path / "actor" / name).write_bytes(b"")
    match = "model_world_size_8_rank_0.pt|extra_.*verl.model_merger merge .*--local_dir .*actor "
    with pytest.raises(ConfigError, match=match):
        open_any(tmp_path / given, **options)
