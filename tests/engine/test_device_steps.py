"""State on the host that is stepped on the device, in loads: the same bits, in bounded memory."""

import itertools
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models import Stack
from ranks import on_ranks
from same_runs import OPTIMIZERS, assert_same, everything, go_on, same_runs, train
from same_runs import make as make_of
from shardwise import Offload, describe, load, save, shard
from shardwise.debug import stats
from shardwise.device import HostTime
from shardwise.engine.api import engine_of
from shardwise.errors import ShardError
from shardwise.offload.home import Home
from shardwise.offload.loads import cut_into_loads
from shardwise.offload.staging import DeviceLoad, StagingBuffers
from shardwise.step import local_step as apart
from shardwise.step import unit_step

LOAD_BYTES = 4096


class Wide(Stack):
    """Blocks of which some are larger than a load."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in ((8, 64), (64, 64), (64, 8)))


@contextmanager
def small_loads():
    """Cut steps into small loads; count what each brings."""
    sizes = []
    plain = StagingBuffers.run

    def run(lane, load):
        sizes.append(sum(tensor.nbytes for tensor in load.tensors))
        return plain(lane, load)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_step, "LOAD_BYTES", LOAD_BYTES)
        patch.setattr(apart, "MULTIPLE", 128)
        patch.setattr(StagingBuffers, "run", run)
        yield sizes


def places(folder):
    return [
        Offload("cpu", "cpu", "cpu", step_on="device"),
        Offload(optimizer="cpu", step_on="device"),
        Offload(optimizer=f"nvme:{folder}", step_on="device"),
        Offload("cpu", optimizer="cpu", fraction=0.5, step_on="device"),
    ]


make = partial(make_of, kind=Wide)


@on_ranks(1, 3)
def test_steps_have_the_bits_of_steps_on_the_host(world_size, tmp_path):
    """Every place at two stages with AdamW, every other optimizer at one place."""
    kinds = places(tmp_path)
    cases = [("adamw", kind, stage) for stage in (3, 1) for kind in kinds]
    others = [name for name in OPTIMIZERS if name != "adamw"]
    cases += [
        (name, kinds[number % 3], (3, 0, 2)[number % 3]) for number, name in enumerate(others)
    ]

    def run(name, stage, precision, where):
        with small_loads() as sizes:
            found = go_on(*make(name, where, stage, precision), 3, first=0)
        assert bool(sizes) == (where is not None)
        return found

    for number, (name, place, stage) in enumerate(cases[world_size // 3 :: 2]):
        same_runs(partial(run, name, stage, ("fp32", "bf16")[number % 2]), (None, place))


@on_ranks(1)
def test_each_byte_is_brought_once_in_a_fixed_amount_of_memory():
    model, optimizer = make("adamw", Offload("cpu", "cpu", "cpu", step_on="device"))
    numel = sum(param.numel() for param in model.parameters())
    with small_loads() as sizes:
        train(model, optimizer, 1, clip=None)
        assert sum(sizes) == 8 * numel  # parameters and gradients; their state is made there
        sizes.clear()
        train(model, optimizer, 1, clip=None)
        optimizer.state_dict()
        assert sum(sizes) == 16 * numel  # and both moments
    assert max(sizes) <= LOAD_BYTES < sum(sizes) / 5
    staged = stats(model, optimizer).bytes_by_place["device"] - stats(model).bytes_by_place.get(
        "device", 0
    )
    assert 0 < staged <= 3 * (LOAD_BYTES + 20 * 256)  # what alignment takes
    assert "steps: device" in str(describe(model))
    places = stats(model, optimizer).bytes_by_place
    assert places["host"] >= 16 * numel - 4 * numel  # slices and moments; gradients are gone


def on_a_gpu(make_step, precision, halves, offload):
    """Train six layers on a GPU, of which all state may rest on the host."""
    made = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).cuda()
    model = shard(made, precision=precision, units=nn.Linear, offload=offload)
    optimizer = make_step(model.parameters())
    for _ in range(4):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 512, device="cuda"))
            for p in model.parameters() if halves else ():
                p.mul_(0.5)
    found = [each.cpu() for each in everything(model, optimizer)]
    for unit in engine_of(model).units:
        for storage in unit.storages if unit.home is not None else ():
            assert storage.master.device.type == "cpu"
            assert unit.home.time.is_page_locked(storage.master)
    return found


@pytest.mark.gpu
@on_ranks(1, fresh=True)
def test_steps_through_a_gpu_have_the_bits_of_steps_that_rest_there():
    """Kernels of one device give one result, however parameters are cut into loads.

    Steps of half the gradient have the same bits whichever processor takes them.
    """
    ways = [{"fused": True}, {"foreach": True}, {"fused": True, "amsgrad": True}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_step, "LOAD_BYTES", 1 << 20)
        for number, options in enumerate(ways):
            make_step = partial(torch.optim.AdamW, lr=0.01, **options)
            run = partial(on_a_gpu, make_step, ("fp32", "bf16")[number % 2], False)
            same_runs(run, (None, *places(Path())[:2]))
    for precision in ("fp32", "bf16"):
        halving = partial(on_a_gpu, partial(torch.optim.SGD, lr=0.5), precision, True)
        same_runs(halving, (None, "cpu"))


@on_ranks(1, 2)
def test_what_stays_on_the_device_gets_new_values_there(world_size):
    """With a copy on the device, slices are fetched before the first step, and when they change."""
    plain = Home.start_fetch
    for stage in (3, 1) if world_size > 1 else (3, 0):
        model, optimizer = make("adamw", Offload(optimizer="cpu", step_on="device"), stage)
        fetched = []

        def start_fetch(home, places, slices, f=fetched):
            f.append(sum(each.numel() for each in slices))
            return plain(home, places, slices)

        with small_loads(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Home, "start_fetch", start_fetch)
            train(model, optimizer, 3)
            optimizer.state_dict()
            owned = sum(
                storage.master.numel()
                for unit in engine_of(model).units
                for storage in unit.storages
            )
            stays = stage == 3 or world_size == 1
            assert sum(fetched) == owned * (1 if stays else 3)
            with torch.no_grad():
                model.head.weight.mul_(2)
            model(torch.ones(2, 8))
            assert sum(fetched) > owned * (1 if stays else 3)


@on_ranks(1, 3)
def test_checkpoints_move_state_between_device_and_host(tmp_path):
    """From the device to the host's steps and back, with a kill in between as far as it can be."""
    on_device = Offload("cpu", "cpu", "cpu", step_on="device")
    with small_loads():
        model, optimizer = make("fused", on_device)
        train(model, optimizer, 2)
        save(tmp_path / "saved", model, optimizer)
        expected = go_on(model, optimizer)
        for number, where in enumerate(("cpu", on_device, None)):
            other = make("fused", where, stage=(3, 1, 2)[number])
            load(tmp_path / "saved", *other)
            assert_same(go_on(*other), expected)


@on_ranks(1, 2)
def test_a_failed_step_is_told_with_rank_and_unit(rank, world_size):
    model, optimizer = make("adamw", Offload("cpu", "cpu", "cpu", step_on="device"))
    with small_loads(), pytest.MonkeyPatch.context() as patch:
        train(model, optimizer, 2)
        plain = StagingBuffers.run

        def run(lane, load):
            if rank == world_size - 1:
                raise RuntimeError("no more memory")
            return plain(lane, load)

        patch.setattr(StagingBuffers, "run", run)
        if rank == world_size - 1:
            with pytest.raises(ShardError, match=f"rank {rank}, unit .* failed.*no more memory"):
                train_alone(model, optimizer)
        else:
            train_alone(model, optimizer)


@on_ranks(1)
def test_state_that_is_none_and_a_failed_load_change_nothing():
    """State that is None, and a first load for which there was no memory; both step as ever."""

    def run(place):
        model, optimizer = make("momentum", place)
        for param in model.parameters():
            optimizer.state[param] = {"momentum_buffer": None}
        plain, tried = StagingBuffers._memory, []

        def memory(lane, num_bytes):
            tried.append(num_bytes)
            if len(tried) == 1:
                raise torch.OutOfMemoryError("no memory for the first load")
            return plain(lane, num_bytes)

        with small_loads(), pytest.MonkeyPatch.context() as patch:
            if place != "cpu":
                lane = StagingBuffers(torch.device("cpu"), HostTime())
                patch.setattr(StagingBuffers, "_memory", memory)
                with pytest.raises(torch.OutOfMemoryError):
                    lane.run(DeviceLoad([torch.ones(3)], lambda _: ()))
                lane.run(DeviceLoad([torch.ones(3)], lambda _: ())).wait()
            return go_on(model, optimizer, 3, first=0)

    same_runs(run, ("cpu", Offload("cpu", "cpu", "cpu", step_on="device")))


def train_alone(model, optimizer):
    """Step without a forward pass, as the other ranks would wait in one."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state_dict()


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(0, 50)), max_size=6),
    st.sampled_from((1, 16, 64)),
    st.integers(1, 2000),
)
def test_loads_have_every_element_once_in_order_and_begin_at_multiples(rows, multiple, num_bytes):
    loads = list(cut_into_loads(rows, multiple, num_bytes))
    pieces = [piece for each in loads for piece in each]
    for row, (numel, _, first) in enumerate(rows):
        mine = [(lo, hi) for which, lo, hi in pieces if which == row]
        assert mine[0][0] == 0 and mine[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
        assert all((first + lo) % multiple == 0 for lo, _ in mine[1:])
    assert [row for row, _, _ in pieces] == sorted(row for row, _, _ in pieces)
    for each in loads:
        bytes_of = [(hi - lo) * rows[row][1] for row, lo, hi in each]
        assert sum(bytes_of) <= num_bytes or len(each) == 1
