"""Paths that differ by rank: refused before anything is written or read, or one folder."""

import shutil
import warnings
from pathlib import Path

import pytest

import shardwise
from ranks import on_ranks
from saving import same_on_all_ranks
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.errors import CheckpointError, ConfigError
from stamped import build, count


def whole(model, optimizer):
    """Return which save the elements of this rank are of."""
    return dict(count(model, optimizer))


@on_ranks(2, 3)
def test_a_save_to_folders_that_differ_by_rank_is_refused_and_writes_nothing(
    tmp_path, rank, world_size
):
    model, optimizer = build(save="A")
    folder = tmp_path / ("other" if rank == 1 else "one")
    with pytest.raises(ConfigError, match="differ in the folder") as error:
        shardwise.save(folder, model, optimizer, step=4)
    same_on_all_ranks(str(error.value))
    assert f"rank 1 has {tmp_path / 'other'}/step-00000004" in str(error.value)
    assert f"rank 0 has {tmp_path / 'one'}/step-00000004" in str(error.value)
    with pytest.raises(ConfigError, match="differ in the folder"):
        Checkpoints(folder, model, optimizer)
    assert list(tmp_path.iterdir()) == []
    shardwise.save(tmp_path / "one", model, optimizer, step=4)  # the group is as it was


@on_ranks(2)
def test_a_background_save_of_steps_that_differ_by_rank_is_refused(tmp_path, rank):
    model, optimizer = build(save="A")
    with Checkpoints(tmp_path, model, optimizer) as checkpoints:
        with pytest.raises(ConfigError, match=r"rank 1 has .*step-00000008 where rank 0 has"):
            checkpoints.save(7 + rank)
        checkpoints.save(7, wait=True)
        with pytest.raises(ConfigError, match=r"rank 1 has .* where rank 0 has step=7 in"):
            checkpoints.load(step=7 if rank == 0 else None)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000007"]


@on_ranks(3)
def test_one_folder_by_a_link_and_a_relative_path_is_saved_to_and_loaded(
    tmp_path, rank, monkeypatch
):
    shared = tmp_path / "shared"
    if rank == 0:
        shared.mkdir()
        (tmp_path / "link").symlink_to(shared)
    model, optimizer = build(save="A")
    same_on_all_ranks(True)
    monkeypatch.chdir(tmp_path)
    folder = [shared, "link/..//link", Path("link")][rank]
    shardwise.save(folder, model, optimizer, step=1)
    with Checkpoints(folder, model, optimizer) as checkpoints:
        checkpoints.load()
        checkpoints.save(2, wait=True)
    model, optimizer = build(save="Z")
    assert shardwise.load(folder, model, optimizer).step == 2
    assert set(whole(model, optimizer)) == {"A"}


@on_ranks(2, 3)
def test_a_load_takes_copies_of_one_checkpoint_and_refuses_another(tmp_path, rank, world_size):
    ours = tmp_path / f"node{rank}"
    model, optimizer = build(save="A")
    shardwise.save(tmp_path / "all", model, optimizer, step=1)
    shutil.copytree(tmp_path / "all", ours)
    model, optimizer = build(save="Z")
    assert shardwise.load(ours, model, optimizer).step == 1
    assert set(whole(model, optimizer)) == {"A"}
    if rank == 1:
        shutil.rmtree(ours / "step-00000001")
    same_on_all_ranks(True)
    model, optimizer = build(save="B")
    shardwise.save(tmp_path / "others", model, optimizer, step=1)
    if rank == 1:
        shutil.copytree(tmp_path / "others", ours, dirs_exist_ok=True)
    model, optimizer = build(save="Z")
    with warnings.catch_warnings(), pytest.raises(CheckpointError) as error:
        warnings.simplefilter("error")
        shardwise.load(ours, model, optimizer)
    same_on_all_ranks(str(error.value))
    assert f"{tmp_path / 'node1'}/step-00000001 is not the checkpoint" in str(error.value)
    assert f"from {tmp_path / 'node0'}" in str(error.value)
    assert set(whole(model, optimizer)) == {"Z"}


@on_ranks(2)
def test_a_load_of_steps_that_differ_by_rank_is_refused(tmp_path, rank):
    model, optimizer = build(save="A")
    for step in (1, 2):
        shardwise.save(tmp_path, model, optimizer, step=step)
    for given in ((1, 2), (None, 1), (2, None)):
        with pytest.raises(ConfigError, match=r"rank 1 has .* where rank 0 has") as error:
            shardwise.load(tmp_path, model, optimizer, step=given[rank])
        same_on_all_ranks(str(error.value))
    assert shardwise.load(tmp_path, model, optimizer).step == 2
