"""Replicas that step separately are saved and loaded, each with its own state, at any moment."""

import re
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from models import Stack
from oracle import assert_same_bits
from ranks import agreed, on_ranks, run_ranks
from shardwise import Checkpoints, load, save, shard
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.read import Checkpoint
from shardwise.convert.export import export_dcp, export_huggingface
from shardwise.errors import CheckpointError
from shardwise.parallel import LocalSteps, Outer
from trainer import adamw, backward_all, full_parameters, full_state, make_steps, mean_square

STEPS = make_steps(4, 6, 1)


def build(world_size, replicas, local=True, stage=3, layout="rows", offload=None, **how):
    torch.manual_seed(1)
    mesh = init_device_mesh(
        "cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard")
    )
    model = shard(Stack(), mesh=mesh, stage=stage, layout=layout, offload=offload)
    steps = LocalSteps(model, **{"every": 3, "outer": Outer(), **how}) if local else None
    return model, adamw(list(model.parameters())), steps


def run(model, optimizer, steps, batches, place):
    """Train this rank on the batches of a place in the list."""
    for each in batches:
        backward_all(model, each, mean_square, place)
        optimizer.step()
        optimizer.zero_grad()
        if steps is not None:
            steps.step()


def result(model, optimizer):
    return full_parameters(model), full_state(model, optimizer)


def same(found, expected):
    assert_same_bits(found[0], expected[0])
    for name, state in expected[1].items():
        assert_same_bits(found[1][name], state)


@pytest.mark.parametrize("at", [2, 3, 4])
@on_ranks(4)
def test_a_run_goes_on_in_the_middle_of_a_window_as_if_never_stopped(rank, at, tmp_path):
    for number, how in enumerate(
        (
            {},
            {"outer": "average", "stage": 1},
            {"streams": 2, "stage": 0},
            {"outer": Outer(state="int8", send="int8"), "layout": "flat"},
        )
    ):
        first = build(4, 2, **how)
        run(*first, STEPS[:at], rank)
        save(tmp_path / str(number), first[0], first[1])
        run(*first, STEPS[at:], rank)
        again = build(4, 2, **how)
        run(*again, STEPS[:1], rank)  # other values, to be replaced
        load(tmp_path / str(number), again[0], again[1])
        assert again[2].num_steps == at
        run(*again, STEPS[at:], rank)
        same(result(*again[:2]), result(*first[:2]))


def _go_on(rank, world_size, folder, replicas):
    """Load on other ranks and take two steps with the same batches for each replica."""
    found = build(world_size, replicas, stage=2, layout="flat", offload="cpu")
    load(folder, found[0], found[1])
    shards = world_size // replicas
    run(*found, [[[b[0][rank // shards]] * world_size] for b in STEPS[4:]], rank)
    return rank // shards, result(*found[:2])


def _save_mid_window(rank, world_size, folder):
    model, optimizer, steps = build(4, 2)
    run(model, optimizer, steps, STEPS[:4], rank)
    save(folder, model, optimizer)
    run(model, optimizer, steps, [[[b[0][rank // 2]] * 4] for b in STEPS[4:]], rank)
    return rank // 2, result(model, optimizer)


def test_a_window_goes_on_with_other_shards_stage_and_home(tmp_path):
    expected = dict(run_ranks(_save_mid_window, 4, tmp_path / "a"))
    for replica, found in run_ranks(_go_on, 2, tmp_path / "a", 2):
        for name, tensor in expected[replica][0].items():  # sums of equal gradients may round
            assert torch.allclose(found[0][name], tensor, atol=1e-6), name


def _load_synchronized(rank, world_size, folder, replicas, local):
    model, optimizer, steps = build(world_size, replicas, local)
    load(folder, model, optimizer)
    assert not local or steps.is_synchronized
    return full_parameters(model), full_state(model, optimizer)


def _save_synchronized(rank, world_size, folder):
    model, optimizer, steps = build(4, 2)
    run(model, optimizer, steps, STEPS[:3], rank)
    assert steps.is_synchronized
    save(folder, model, optimizer)
    return result(model, optimizer)


def test_a_synchronized_checkpoint_loads_on_other_replicas_and_without(tmp_path):
    saved = run_ranks(_save_synchronized, 4, tmp_path / "a")
    for world_size, replicas, local in ((3, 3, True), (2, 1, True), (2, 1, False)):
        for rank, found in enumerate(
            run_ranks(_load_synchronized, world_size, tmp_path / "a", replicas, local)
        ):
            replica = rank // (world_size // replicas)
            same(found, saved[2 * (replica % 2)])
    plain = Stack()
    load(tmp_path / "a", plain)
    assert_same_bits({n: p.detach() for n, p in plain.named_parameters()}, saved[0][0])


@on_ranks(4)
def test_the_middle_of_a_window_is_refused_by_name_where_it_has_no_meaning(rank, tmp_path):
    model, optimizer, steps = build(4, 2)
    run(model, optimizer, steps, STEPS[:4], rank)
    save(tmp_path / "a", model, optimizer)
    for replicas, how, said in (
        (4, {}, "and the model 4 replicas, every=3"),
        (2, {"every": 4}, "and the model 2 replicas, every=4"),
        (2, {"outer": "average"}, "keeps nothing"),
        (2, {"local": False}, "and the model no LocalSteps"),
    ):
        model, optimizer, _ = build(4, replicas, **how)
        before = full_parameters(model)
        said = f"step 4.*{re.escape(said)}"
        with pytest.raises(CheckpointError, match=said) as error:
            load(tmp_path / "a", model, optimizer)
        agreed(str(error.value))
        assert_same_bits(full_parameters(model), before)
        model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(CheckpointError, match="middle of a window"):
        load(tmp_path / "a", Stack())


@on_ranks(2)
def test_a_checkpoint_of_synchronous_steps_begins_a_window(rank, tmp_path):
    model, optimizer, _ = build(2, 2, local=False)
    run(model, optimizer, None, STEPS[:2], rank)
    save(tmp_path / "a", model, optimizer)
    steps = LocalSteps(model, every=3, outer=Outer())
    run(model, optimizer, steps, STEPS[2:], rank)
    again = build(2, 2)
    run(*again, STEPS[:2], rank)
    load(tmp_path / "a", again[0], again[1])
    run(*again, STEPS[2:], rank)
    same(result(*again[:2]), result(model, optimizer))


def _copy_or_resume(rank, world_size, root, resumes):
    """Save in the background after step 2, copy to memory after step 4; or load the newest."""
    found = build(4, 2, streams=3)
    folders = {"memory_every": 1, "memory_folder": root / "memory"}
    with suppress(InterruptedError), Checkpoints(root / "run", *found[:2], **folders) as kept:
        if resumes:
            loaded = kept.load()
            assert (loaded.step, loaded.from_memory, found[2].num_steps) == (4, True, 4)
        else:
            run(*found, STEPS[:2], rank)
            kept.save(2)
            run(*found, STEPS[2:4], rank)
            kept.finish()
            kept.copy_to_memory(4)
            kept.finish()
        run(*found, STEPS[4:], rank)
        raise InterruptedError
    return result(*found[:2])


def test_copies_in_memory_have_every_replica(tmp_path):
    truths = run_ranks(_copy_or_resume, 4, tmp_path, False)
    for found, truth in zip(run_ranks(_copy_or_resume, 4, tmp_path, True), truths, strict=True):
        same(found, truth)


@on_ranks(2)
def test_values_that_no_save_writes_are_refused(rank, tmp_path):
    model, optimizer, steps = build(2, 2)
    steps.num_synced = [-1]
    save(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match="not as they are saved"):
        load(tmp_path / "a", model, optimizer)


def _save_both(rank, world_size, folder):
    model, optimizer, steps = build(2, 2)
    run(model, optimizer, steps, STEPS[:3], rank)
    save(folder / "synchronized", model, optimizer)
    expected = full_parameters(model)
    run(model, optimizer, steps, STEPS[3:4], rank)
    save(folder / "middle", model, optimizer)
    return expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_model_is_exported_and_the_middle_of_a_window_is_refused(tmp_path):
    expected = run_ranks(_save_both, 2, tmp_path)[0]
    source = Checkpoint(Files(), tmp_path / "synchronized")
    export_huggingface(source, tmp_path / "weights", files=Files())
    assert_same_bits(load_file(tmp_path / "weights" / "model.safetensors"), expected)
    export_dcp(source, tmp_path / "dcp")
    plain = Stack()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_bits(state["model"], expected)
    keys = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert not [key for key in keys if "replica" in key or "outer" in key]
    for export in (export_dcp, partial(export_huggingface, files=Files())):
        with pytest.raises(CheckpointError, match="each of 2 replicas had parameters of its own"):
            export(Checkpoint(Files(), tmp_path / "middle"), tmp_path / "no")
    assert not (tmp_path / "no").exists()
