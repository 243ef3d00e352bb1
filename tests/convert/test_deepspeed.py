"""DeepSpeed's ZeRO folders: every element of known tensors, damage named, no code run."""

import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from convert import fake_deepspeed
from convert.fake_deepspeed import STATES, make_run, write
from convert.sources import Command, check_slices, infos_of
from shardwise.convert.deepspeed import open_deepspeed
from shardwise.errors import CheckpointError, DamagedCheckpoint

ALL = [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3)]


def expected_tensors(run):
    trained = {name: tensor for group in run.groups for name, tensor in group.items()}
    expected = {(n, ""): t for n, t in {**trained, **run.frozen, **run.buffers}.items()}
    if run.step is not None:
        expected |= {(n, "step"): torch.tensor(float(run.step)) for n in trained}
        expected |= {(n, key): run.states[key][n] for n in trained for key in STATES}
    return expected


@pytest.mark.parametrize(("stage", "world"), ALL)
@pytest.mark.parametrize("step", [7.0, 7, None])
def test_every_slice_is_that_of_the_known_tensors_and_what_is_no_tensor_comes_back_too(
    stage, world, step, tmp_path
):
    run = make_run()
    run.step = step
    write(tmp_path, run, stage, world)
    source = open_deepspeed(tmp_path)
    assert source.step == 7
    infos = infos_of(source)
    expected = expected_tensors(run)
    assert set(infos) == set(expected)
    for key, tensor in expected.items():
        check_slices(source, infos[key], tensor)
        name, state = key
        assert infos[key].kind == (
            "optimizer" if state else "buffer" if name in run.buffers else "param"
        )
    assert source.tied == {"head.weight": "emb.weight"}
    assert source.extra == {
        "note": "hello",
        "n": [1, 2.5],
        "lr_scheduler": {"last_batch_iteration": 2},
    }
    assert source.optimizer.class_name == "AdamW"
    assert source.optimizer.groups == tuple(
        {"lr": 0.5, "betas": (0.9, 0.999), "weight_decay": 0.1 * i, "params": list(group)}
        for i, group in enumerate(run.groups)
    )
    assert source.optimizer.state == {}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"optimizer": {"type": "Adam"}}, "AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "Adam"),
        ({"optimizer": {"type": "adamw", "params": {}}}, "AdamW"),
        ({"optimizer": {"type": "Lion"}}, "Lion"),
        ({}, ""),
    ],
)
def test_the_optimizers_class_is_torchs_name_for_it(config, expected, tmp_path):
    home = write(tmp_path, make_run(), 1, 1)
    edit(home / "mp_rank_00_model_states.pt", lambda saved: saved.update(ds_config=config))
    optimizer = open_deepspeed(home).optimizer
    assert optimizer.class_name == expected


def test_the_tag_is_the_one_asked_for_or_the_latest_or_the_folder_itself(tmp_path):
    first, second = make_run(), make_run()
    write(tmp_path, first, 2, 1, "one")
    write(tmp_path, second, 2, 1, "two")
    for found, run in (
        (open_deepspeed(tmp_path), second),
        (open_deepspeed(tmp_path, "one"), first),
        (open_deepspeed(tmp_path / "one"), first),
    ):
        check_slices(found, infos_of(found)["emb.weight", ""], run.groups[0]["emb.weight"])


@pytest.mark.parametrize("tag", ["..", "a/b", "/etc", ""])
def test_a_tag_never_leads_out_of_the_folder(tag, tmp_path):
    write(tmp_path / "f", make_run(), 1, 1)
    (tmp_path / "f" / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="no plain name"):
        open_deepspeed(tmp_path / "f")


def test_a_folder_that_is_none_is_refused_in_words(tmp_path):
    with pytest.raises(CheckpointError, match="neither 'latest' nor"):
        open_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_deepspeed(tmp_path / "x")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="no folder 'gone'"):
        open_deepspeed(tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_missing_file_is_named(stage, tmp_path):
    home = write(tmp_path, make_run(), stage, 3)
    for path in sorted(home.iterdir()):
        data = path.read_bytes()
        path.unlink()
        # What is missing at the end is known from the number of ranks, without its prefix.
        name = path.name.removeprefix("bf16_")
        if stage < 3 and "model" in name:
            name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
        with pytest.raises((DamagedCheckpoint, CheckpointError), match=f"{name}|neither"):
            open_deepspeed(home)
        path.write_bytes(data)
    open_deepspeed(home)


@pytest.mark.parametrize("stage", [2, 3])
def test_each_file_that_was_cut_short_is_named(stage, tmp_path):
    home = write(tmp_path, make_run(), stage, 2)
    for path in sorted(home.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(DamagedCheckpoint, match=path.name):
            open_deepspeed(home)
        path.write_bytes(data)


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_two_checkpoints_are_not_mixed(stage, tmp_path):
    run = make_run()
    home = write(tmp_path / "a", run, stage, 2)
    run.step = 8.0
    other = write(tmp_path / "b", run, stage, 2)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (home / name).write_bytes((other / name).read_bytes())
    with pytest.raises(
        DamagedCheckpoint, match=r"step 8\.0, .* of 7\.0: two checkpoints are mixed"
    ):
        open_deepspeed(home)


def test_files_of_two_numbers_of_ranks_are_not_mixed(tmp_path):
    home = write(tmp_path / "a", make_run(), 3, 2)
    other = write(tmp_path / "b", make_run(), 3, 3)
    for path in home.iterdir():
        if "_1_" in path.name:
            path.write_bytes((other / path.name).read_bytes())
    with pytest.raises(DamagedCheckpoint, match="rank_1_"):
        open_deepspeed(home)


def test_a_flipped_bit_in_a_partition_is_found_and_named(tmp_path):
    run = make_run()
    home = write(tmp_path, run, 3, 2)
    path = home / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    at = data.index(run.groups[0]["emb.weight"].flatten()[33:40].numpy().tobytes())
    data[at + 3] ^= 64
    path.write_bytes(data)
    source = open_deepspeed(home)
    info = infos_of(source)["emb.weight", ""]
    source.read(info, 0, 33)
    with pytest.raises(DamagedCheckpoint, match=path.name):
        source.read(info, 0, 34)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor, pipeline or expert"),
        ("mp_rank_01_model_states.pt", "tensor, pipeline or expert"),
        ("layer_00-model_states.pt", "tensor, pipeline or expert"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "tensor, pipeline or expert"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "several files"),
    ],
)
def test_what_is_not_read_is_refused_in_words(name, message, tmp_path):
    home = write(tmp_path, make_run(), 2, 1)
    (home / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        open_deepspeed(home)


def edit(path, change):
    with fake_deepspeed.deepspeed_names():
        saved = torch.load(path, weights_only=False)
        change(saved)
        torch.save(saved, path)


def optim(saved):
    return saved["optimizer_state_dict"]


LIES = [
    ("optim", lambda s: optim(s).update(zero_stage=9), "ZeRO stage 9"),
    ("optim", lambda s: optim(s).update(partition_count=[5, 5]), r"cut into \[5\] parts"),
    ("optim", lambda s: optim(s).update(base_optimizer_state=[]), "elastic_checkpoint"),
    ("optim", lambda s: optim(s).pop("param_slice_mappings"), "not as DeepSpeed writes it"),
    ("optim", lambda s: optim(s)["param_slice_mappings"][0].popitem(), "elements of 'one'"),
    (
        "optim",
        lambda s: setattr(optim(s)["param_slice_mappings"][0]["emb.weight"], "start", 1 << 40),
        "should end at element",
    ),
    (
        "optim",
        lambda s: setattr(optim(s)["param_slice_mappings"][0]["emb.weight"], "start", -1),
        "not as DeepSpeed writes it",
    ),
    (
        "optim",
        lambda s: optim(s)["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(3)),
        "are not there",
    ),
    ("optim", lambda s: optim(s)["single_partition_of_fp32_groups"].pop(), "not as DeepSpeed"),
    ("model", lambda s: s["param_shapes"].pop(), "parts each"),
    ("model", lambda s: s["param_shapes"][0].update({"emb.weight": (5, 5)}), "'emb.weight'"),
    ("model", lambda s: s["param_shapes"][0].update({"emb.weight": (-1, 5)}), "not as DeepSpeed"),
    ("model", lambda s: s.update(dp_world_size=4), r"cut into \[1\] parts"),
    ("model", lambda s: s.update(shared_params={"a": "b"}), "what 'a' shares"),
    ("model", lambda s: s.pop("global_steps"), "not as DeepSpeed writes it"),
]


@pytest.mark.parametrize(("where", "change", "message"), LIES)
def test_files_that_contradict_each_other_are_refused(where, change, message, tmp_path):
    home = write(tmp_path, make_run(), 2, 1)
    (path,) = home.glob(f"*{where}_states.pt")
    edit(path, change)
    with pytest.raises(CheckpointError, match=message):
        open_deepspeed(home)


@pytest.mark.parametrize("place", ["optim", "module"])
def test_code_in_a_file_is_refused_and_never_runs(place, tmp_path):
    marker = tmp_path / "ran"
    home = write(tmp_path, make_run(), 3, 2)
    path = sorted(home.glob("*optim_states.pt" if place == "optim" else "*model_states.pt"))[0]

    def change(saved):
        (saved if place == "optim" else saved["module"])["evil"] = Command(f"touch {marker}")

    edit(path, change)
    with pytest.raises(CheckpointError, match=rf"{path.name}: .*posix\.system"):
        open_deepspeed(home)
    assert not marker.exists()


def test_what_the_users_own_classes_made_is_left_out_named_and_never_run(tmp_path):
    marker = tmp_path / "ran"
    run = make_run()
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    state = np.random.RandomState(3).get_state()
    run.client = {"n": 1, "rng": state, "in": {"when": when, "list": [when], "ok": 2}, "cls": Path}
    home = write(tmp_path, run, 1, 1)
    edit(
        home / "mp_rank_00_model_states.pt",
        lambda saved: saved.update(evil=Command(f"touch {marker}")),
    )
    source = open_deepspeed(home)
    assert not marker.exists()
    assert source.extra["n"] == 1
    assert source.extra["in"] == {"ok": 2}
    assert source.extra["rng"][1].tolist() == state[1].tolist()
    assert not {"cls", "evil"} & set(source.extra)
    assert set(source.left_out) == {
        f"client_state.{key}" for key in ("'in'.'when'", "'in'.'list'", "'cls'", "'evil'")
    }
