"""State in files: the same bits, bounded memory, checkpoints, and failures that name the file."""

import ctypes
import errno
import itertools
import os
import random
import resource
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from models import Stack
from ranks import on_ranks
from same_runs import assert_same, everything, go_on, loss_of, make, same_runs, train
from shardwise import Checkpoints, Offload, describe, load, save, shard
from shardwise.comm.collectives import Comm
from shardwise.debug import stats
from shardwise.device import HostTime
from shardwise.engine import agreement
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, StateError, StorageError
from shardwise.host import available_host_bytes
from shardwise.offload import file_slices
from shardwise.offload.disk import Disk
from shardwise.offload.files import System
from shardwise.offload.home import Home
from shardwise.step.state_files import StateFile
from shardwise.tensor.elements import elements_of
from trainer import logged

OPTIMIZERS = ("adamw", "fused", "momentum", "own", "own in 8 bits", "sgd")


def kinds(folder):
    """Return every kind of state in files, in one folder or two, and a part of it."""
    one, two = f"nvme:{folder}", f"nvme:{folder / 'a'},{folder / 'b'}"
    return [
        one,
        Offload(params=two, grads=one, optimizer=two),
        Offload(optimizer=one),
        Offload(params=one, optimizer="cpu"),
        Offload(params="cpu", grads=one, optimizer=one, fraction=0.5),
    ]


@on_ranks(1, 3)
def test_training_has_the_bits_of_training_without_files(world_size, tmp_path, every=False):
    """Every kind at one of the stages on several ranks, at the others on one; or at all in each.

    Several ranks cost ten times as much.
    """
    for name in ("a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)

    def run(name, stage, precision, offload):
        return go_on(*make(name, offload, stage, precision), 4, first=0)

    for stage, (number, offload) in itertools.product(range(4), enumerate(kinds(tmp_path))):
        if not every and ((number + stage) % 4 == 3) is not (world_size > 1):
            continue
        precision = ("fp32", "bf16")[(number + stage) % 2 if every else stage // 2]
        optimizer = OPTIMIZERS[(number + 2 * stage) % len(OPTIMIZERS)]
        same_runs(partial(run, optimizer, stage, precision), (None, offload))


@on_ranks(1, 2)
def test_steps_with_closures_have_their_state_in_files_too(rank, tmp_path):
    """A loop that always passes a closure; each rank has a tmp_path of its own."""
    own = tmp_path / str(rank)
    own.mkdir()

    def run(place):
        model, optimizer = make("fused", place)
        losses = []
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss.detach()

            losses.append(optimizer.step(closure))
        assert (stats(model, optimizer).bytes_by_place.get("files", 0) > 0) == (place is not None)
        return losses + everything(model, optimizer)

    same_runs(run, (None, f"nvme:{own}"))


class OfMyOwn(torch.optim.AdamW):
    pass


@on_ranks(1)
def test_state_that_cannot_be_in_files_is_told_once(tmp_path):
    with logged() as said:
        model = shard(Stack(), offload=f"nvme:{tmp_path}")
        optimizer = OfMyOwn(model.parameters())
        train(model, optimizer, 2)
    (text,) = [text for text in said if "OfMyOwn" in text]
    assert "host memory and not in files" in text
    assert "files" not in stats(model, optimizer).bytes_by_place


@on_ranks(1, 3)
def test_a_slow_disk_changes_no_bit(rank, tmp_path, steps=8):
    """Reads and writes take random times; what is read meanwhile is what was written last."""
    rng = random.Random(rank)

    def run(place):
        model, optimizer = make("adamw", place)
        found = []
        for step in range(0, steps, 2):
            found += train(model, optimizer, 2, first=step)
            some = [*optimizer.state.values()][step % len(optimizer.state)]
            found.append(some["exp_avg"].full_tensor())  # right behind the step
        return found + everything(model, optimizer)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            patch.setattr(System, name, _delayed(getattr(System, name), rng))
        same_runs(run, (None, Offload(f"nvme:{tmp_path}", f"nvme:{tmp_path}", f"nvme:{tmp_path}")))


def _delayed(call, rng):
    def delayed(*args):
        time.sleep(rng.random() * 0.003)
        return call(*args)

    return delayed


@contextmanager
def counted():
    """Count the reads and writes of disks."""
    counts = {"read": 0, "write": 0}

    def counting(name, plain):
        def start(*args):
            counts[name] += 1
            return plain(*args)

        return start

    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(Disk, f"start_{name}", counting(name, getattr(Disk, f"start_{name}")))
        yield counts


@on_ranks(1, 2)
def test_a_step_reads_and_writes_the_state_of_each_unit_once(tmp_path):
    """AdamW steps through buffers: after the first step each unit is read and written once."""
    model, optimizer = make("fused", f"nvme:{tmp_path}")
    num_units = len(engine_of(model).units)
    with counted() as counts:
        train(model, optimizer, 1)
        optimizer.state_dict()
        moments = [m for state in states(model, optimizer) for m in state]
        num_tensors = sum(elements_of(moment).numel() > 0 for moment in moments)
        assert counts == {"read": 0, "write": num_tensors}  # one by one, as the state was made
        places = [elements_of(moment).data_ptr() for moment in moments]
        train(model, optimizer, 3, first=1)
        optimizer.state_dict()
        assert counts == {"read": 3 * num_units, "write": num_tensors + 3 * num_units}
        moments = [m for state in states(model, optimizer) for m in state]
        assert [elements_of(moment).data_ptr() for moment in moments] == places


@on_ranks(1, 3)
def test_codes_of_moments_rest_in_files_and_pass_the_ring(tmp_path):
    """Codes and scales rest in files, are read and written once a step, and get every bit."""

    def run(place):
        model, optimizer = make("own in 8 bits", place)
        with counted() as counts:
            found = train(model, optimizer, 3)
            optimizer.state_dict()
        for first, moments in ((3, "bf16"), (6, "8bit")):  # decoded, and stored anew
            for group in optimizer.param_groups:
                group["moments"] = moments
            found += train(model, optimizer, 3, first=first)
        if place != "cpu":
            check_files(model, optimizer, counts)
        return found + everything(model, optimizer)

    same_runs(
        run, ("cpu", f"nvme:{tmp_path}", Offload(optimizer=f"nvme:{tmp_path}", step_on="device"))
    )


def check_files(model, optimizer, counts):
    units = [unit for unit in engine_of(model).units if any(map(_has_elements, unit.params))]
    assert counts["read"] == 2 * len(engine_of(model).units)  # and in the first step none
    kept = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert stats(model, optimizer).bytes_by_place["files"] == sum(v.nbytes for v in kept)
    mapped = [vars(optimizer)["_shardwise_overlap"]._stored._files[unit] for unit in units]
    memory = [(f._mapped.data_ptr(), f._mapped.data_ptr() + f.num_bytes) for f in mapped]
    places = [v.data_ptr() for v in kept if v.numel()]
    assert all(any(lo <= place < hi for lo, hi in memory) for place in places)


def _has_elements(param):
    return elements_of(param.sharded).numel() > 0


def states(model, optimizer):
    of = [optimizer.state[param] for param in model.parameters()]
    return [(state["exp_avg"], state["exp_avg_sq"]) for state in of]


@on_ranks(1)
def test_a_read_ahead_that_fails_is_told_and_a_load_mends_it(tmp_path):
    """One read that fails is told in the pass that needs it; after a load all is as ever."""
    place = Offload(f"nvme:{tmp_path}", optimizer="cpu")
    model, optimizer = make("adamw", place)
    plain, failed = System.read, []

    def read(system, *args):
        if not failed:
            failed.append(1)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(system, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_slices, "cached_share", lambda _: 0.0)
        train(model, optimizer, 2)
        save(tmp_path / "saved", model, optimizer)
        expected = go_on(model, optimizer)
        patch.setattr(System, "read", read)
        with pytest.raises(StorageError, match="Input/output error"):
            train(model, optimizer, 1, first=4)
        optimizer.zero_grad()
        load(tmp_path / "saved", model, optimizer)
        assert_same(go_on(model, optimizer), expected)
        disks = {unit.home.files.params for unit in engine_of(model).units}
        assert all(disk.pool.num_free for disk in disks)


@on_ranks(1, 2)
def test_parameters_trained_in_turns_have_all_state_in_files(tmp_path):
    """Weights get gradients in one step, biases in the next: all their state is in files."""

    def run(place):
        model, optimizer = make("adamw", place)
        for step in range(4):
            loss_of(model, step).backward()
            for name, param in model.named_parameters():
                if ("bias" in name) == (step % 2 == 0):
                    param.grad = None
            optimizer.step(None)  # as accelerate calls it
            optimizer.zero_grad()
        local = sum(elements_of(param).nbytes for param in model.parameters())
        in_files = stats(model, optimizer).bytes_by_place.get("files", 0)
        assert in_files == (2 * local if place else 0)
        return everything(model, optimizer)

    same_runs(run, (None, f"nvme:{tmp_path}"))


@on_ranks(1, 3)
def test_a_step_begins_from_state_that_the_caller_has_put_in_the_place_of_that_in_files(tmp_path):
    def run(place):
        model, optimizer = make("adamw", place)
        go_on(model, optimizer, 2, first=0)
        for state in optimizer.state.values():
            state["exp_avg"] = 3 * state["exp_avg"]
        return go_on(model, optimizer, 2, first=2)

    same_runs(run, (None, f"nvme:{tmp_path}"))


@on_ranks(1, 3)
def test_slices_that_memory_has_lost_are_read_ahead(tmp_path):
    """Slices that are not in memory come by reads; some change in between, by steps and by hand."""
    in_files = Offload(f"nvme:{tmp_path}", optimizer="cpu")

    def run(setting):
        place, cached = setting
        with pytest.MonkeyPatch.context() as patch, counted() as counts:
            patch.setattr(file_slices, "cached_share", lambda _: cached)
            model, optimizer = make("adamw", place, precision="bf16")
            found = train(model, optimizer, 2)
            with torch.no_grad():
                model(torch.ones(2, 8))  # the gathers' order is known, so slices were read ahead
                model.head.weight.mul_(2)
                model.blocks[1].up.weight.mul_(2)
            found += go_on(model, optimizer)
        assert bool(counts["read"]) == (cached == 0)
        return found

    same_runs(run, ((None, 1.0), (in_files, 1.0), (in_files, 0.0)))


@on_ranks(1, 3)
def test_host_memory_is_taken_once_before_values_are_sent():
    """All that lasts is one piece, made before any values are sent; a step needs no more."""
    sizes = []
    made = []
    locked, memory, broadcast = HostTime.locked_memory, Home.allocate, Comm.broadcast

    def locked_memory(time, num_bytes):
        sizes.append(num_bytes)
        return locked(time, num_bytes)

    def make_memory(home, numel, dtype):
        made.append(numel)
        return memory(home, numel, dtype)

    def check_order(comm, tensor, collective, **kwargs):
        assert sizes or collective.unit == "(number)", collective  # which tells models apart
        return broadcast(comm, tensor, collective, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTime, "locked_memory", locked_memory)
        patch.setattr(Home, "allocate", make_memory)
        patch.setattr(Comm, "broadcast", check_order)
        for stage, offload in ((3, "cpu"), (1, Offload(optimizer="cpu", fraction=0.5))):
            sizes.clear()
            model, optimizer = make("adamw", offload, stage)
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            away = [s for unit in engine_of(model).units if unit.home for s in unit.storages]
            aligned = sum(-(-storage.memory.shard_bytes // 4096) * 4096 for storage in away)
            assert sizes == [2 * aligned]  # slices, and reduced gradients
            assert stats(model).bytes_by_place["host"] == 2 * sum(
                s.memory.shard_bytes for s in away
            )
    assert not made


@pytest.mark.parametrize(("world_size", "name"), [(1, "adamw"), (3, "adamw"), (3, "own in 8 bits")])
@on_ranks()
def test_checkpoints_move_state_between_files_and_memory(world_size, tmp_path, name):
    """From files to files, to host memory and back, in the foreground and behind training."""
    # Codes are made anew with other bits where other elements share a block.
    stages = (3, 3, 3, 3) if "8 bits" in name else (3, 1, 2, 0)
    place = Offload(params=f"nvme:{tmp_path}", optimizer=f"nvme:{tmp_path}")
    model, optimizer = make(name, place, precision="bf16")
    train(model, optimizer, 2)
    save(tmp_path / "saved", model, optimizer)
    with Checkpoints(tmp_path / "kept", model, optimizer) as checkpoints:
        checkpoints.save(2)
        expected = go_on(model, optimizer)
    for number, where in enumerate((place, None, f"nvme:{tmp_path}")):
        other = make(name, where, stages[number], "bf16")
        load(tmp_path / ("saved" if number else "kept/step-00000002"), *other)
        assert_same(go_on(*other), expected)
        if number == 0:
            save(tmp_path / "again", *other)  # what was loaded, and stepped, since
    last = make(name, None, stages[3], "bf16")
    load(tmp_path / "again", *last)
    found = everything(*last)
    assert_same(found, expected[-len(found) :])


@on_ranks(2)
def test_a_first_step_that_fails_midway_is_refused_until_a_load(rank, tmp_path):
    """The third unit's state cannot be written: refused until a load, then as ever."""
    place = f"nvme:{tmp_path}"
    model, optimizer = make("adamw", place)
    save(tmp_path / "saved", model, optimizer)
    expected = train(*make("adamw", place), 2)
    store, stored = StateFile.store, []

    def fail(self, held):
        if len(stored) == 2:
            raise StorageError("rank 0: writing failed: Input/output error")
        stored.append(held)
        store(self, held)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError, match="writing failed"):
        patch.setattr(StateFile, "store", fail)
        train(model, optimizer, 1)
    with pytest.raises(StateError, match=r"failed part of the way: rank .* writing failed"):
        model(torch.ones(3, 8))
    optimizer.zero_grad()
    load(tmp_path / "saved", model, optimizer)
    assert_same(train(model, optimizer, 2), expected)


@on_ranks(1, 3)
def test_redrawn_parameters_are_those_of_the_next_pass(tmp_path):
    """Parameters that are drawn anew are those of the next forward pass."""

    def run(setting):
        model, _ = make("adamw", *setting, "bf16")
        model(torch.ones(3, 8))
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
        return [model(torch.ones(3, 8)).detach()]

    same_runs(run, ((None, 3), (None, 1), (Offload(optimizer=f"nvme:{tmp_path}"), 3)))


@on_ranks(1, 2)
def test_a_host_without_room_is_told_before_anything_changes(rank, world_size, tmp_path):
    """The sum of all ranks counts, padding apart; what rests in files does not."""
    one, total = f"nvme:{tmp_path}", 8 * 4 + 4 + 4 * 8
    for offload, needed in (
        ("cpu", 8 * total),
        (Offload(params=one, optimizer="cpu"), 4 * total),
        (Offload(params="cpu", grads=one, optimizer=one), 4 * total),
        (Offload(one, one, one), 0),
    ):
        for free, fits in ((needed // world_size * world_size + 64, True), (needed - 1, False)):
            model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8, bias=False))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(agreement, "available_host_bytes", partial(max, free, 0))
                if fits or not needed:
                    shard(model, units=nn.Linear, offload=offload)
                    continue
                said = rf"the {world_size} ranks on the host of rank 0 need .* are free there"
                with pytest.raises(ConfigError, match=said):
                    shard(model, units=nn.Linear, offload=offload)
                assert type(model[0].weight) is nn.Parameter


def test_free_memory_of_the_host_is_what_the_system_says_or_less():
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal")) * 1024
    assert 0 < available_host_bytes() <= total


@on_ranks(1)
def test_stats_and_describe_tell_where_bytes_rest(tmp_path):
    one, numel = f"nvme:{tmp_path}", 8 * 4 + 4 + 4 * 8
    for offload, on_host, in_files in (  # bytes of each element: slices, means, two moments
        ("cpu", 16, 0),
        (one, 8, 8),
        (Offload(one, one, one), 0, 16),
        (Offload(params=one, optimizer="cpu"), 12, 4),
        (None, 0, 0),
    ):
        layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8, bias=False))
        model = shard(layers, stage=1, units=nn.Linear, offload=offload)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        found = stats(model, optimizer).bytes_by_place
        counts = 4 * 3 if offload else 0  # of the steps of each parameter, in host memory
        assert found.get("files", 0) == in_files * numel
        assert found.get("host", 0) == on_host * numel + counts
        said = str(describe(model))
        assert (str(tmp_path) in said) == (in_files > 0) and ("host" in said) == (on_host > 0)


MIB = 1 << 20
WIDTH, DEPTH = 1024, 24  # 4 MiB of parameters a block, 96 in all


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


@on_ranks(1)
def test_a_model_trains_whose_state_is_four_times_the_memory(tmp_path):
    """Parameters, gradients and moments take four times what the process may have more."""
    torch.set_num_threads(1)
    # Blocks of memory that are freed go back to the system, as far as the C library has a say.
    ctypes.CDLL(None).mallopt(ctypes.c_int(-3), ctypes.c_int(1 << 18))  # M_MMAP_THRESHOLD
    stack_bytes = threading.stack_size(1 << 20)  # they count, used or not
    place = f"nvme:{tmp_path}"
    limit = DEPTH * WIDTH * WIDTH * 16 // 4
    in_use = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + limit, before[1]))
    try:
        for offload in (Offload(place, place, place), None):
            try:
                with torch.device("meta"):
                    model = Deep()
                model = shard(model, units=nn.Linear, offload=offload)
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                losses = []
                for _ in range(2):
                    loss = model(torch.ones(4, WIDTH)).square().mean()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                assert offload is not None, "all of it fits: the limit does not hold"
                assert losses[0] > losses[1]
            except (RuntimeError, MemoryError) as error:
                assert offload is None, error
                assert "alloc" in str(error) or isinstance(error, MemoryError)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        threading.stack_size(stack_bytes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("disk", "expected 'cpu'"),
        ("nvme:", "'nvme:FOLDER'"),
        ("nvme:/a,,/b", "'nvme:FOLDER'"),
        (3, "a shardwise.Offload or None"),
        ({"params": "gpu"}, "params='gpu': expected 'device', 'cpu'"),
        ({"optimizer": "cpu", "fraction": 1.5}, "fraction=1.5: expected a number from 0 to 1"),
        ({"params": "cpu"}, "state rests where its parameters do"),
        ({"optimizer": "cpu", "grads": "device"}, "use 'cpu' or 'nvme:FOLDER'"),
        ({"grads": "cpu"}, "leave it out, or use 'device'"),
        ({"step_on": "host"}, "the step is where its state is"),
        ({"activations": "nvme:/a"}, "activations='nvme:/a': expected 'device' or 'cpu'"),
        ({"optimizer": "cpu", "step_on": "gpu"}, "expected 'host' or 'device'"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_with_what_could(asked, said):
    with pytest.raises(ConfigError) as refusal:
        shard(nn.Linear(2, 2), offload=Offload(**asked) if isinstance(asked, dict) else asked)
    assert said in str(refusal.value)
