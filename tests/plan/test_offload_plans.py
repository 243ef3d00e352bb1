"""Plans of state that rests elsewhere, against runs: bytes by place on every rank, and traffic."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from ranks import run_ranks
from shardwise import Offload, accumulate, shard
from shardwise.config import Schedule
from shardwise.debug import stats
from shardwise.offload import file_slices
from shardwise.offload.disk import Disk
from shardwise.offload.home import Home
from shardwise.offload.staging import DeviceLoad, StagingBuffers
from shardwise.optim import AdamW
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tracing import trace
from shardwise.plan.sizes import OPTIMIZERS as OPTIMIZER_ROWS
from shardwise.plan.step.play import bytes_between_steps, play
from shardwise.unit.storage import Storage
from step_counts import precision_of
from test_play_ranks import Net, Unused, freeze_some, loss_of, make_batch

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw_bf16_moments": lambda params: AdamW(params, moments="bf16"),
    "adamw_8bit": lambda params: AdamW(params, moments="8bit"),
}
F = "nvme"  # the folder is the test's own
PLACES = [
    Offload("cpu", "cpu", "cpu"),
    Offload("device", None, "cpu"),
    Offload("cpu", "cpu", F),
    Offload(F, F, F),
    Offload(F, None, "cpu"),
    Offload("device", F, F, step_on="device"),
    Offload("cpu", None, "cpu", step_on="device"),
    Offload("device", None, "cpu", step_on="device"),
]
FRACTIONS = (1.0, 0.5, 1.0, 0.7, 0.2)


def cases(num_ranks, every=False):
    """Every place at every stage, pairs in turns for one rank and three; what else, in turns."""
    # Slices that begin inside a block of codes may have one scale more than a plan counts.
    names = [*OPTIMIZERS][: None if num_ranks == 1 else -1]
    pairs = [(s, p) for s in range(4) for p in PLACES]
    if not every:
        pairs = [p for n, p in enumerate(pairs) if (n + n // len(PLACES) + num_ranks // 3) % 2]
    found = []
    for number, (stage, place) in enumerate(pairs):
        number += num_ranks  # other pairs for other numbers of ranks
        candidate = Candidate(
            stage=stage,
            num_shards=num_ranks,
            micro_batch=2,
            precision=("fp32", "bf16")[number % 2],
            layout=("rows", "flat")[number // 2 % 2],
            optimizer=names[number // 3 % len(names) if number % 3 else 0],
            offload=replace(place, fraction=FRACTIONS[number % 5]),
            transport="point_to_point",
        )
        found.append((("net", "frozen", "unused")[number % 3], candidate))
    return found


def in_folder(offload, folder):
    names = ("params", "grads", "optimizer")
    return replace(offload, **{n: f"nvme:{folder}" for n in names if getattr(offload, n) == F})


def make_model(name):
    model = Unused(33) if name == "unused" else Net(33, 67, 3)
    return freeze_some(model) if name == "frozen" else model


@cache
def make_tape(name, dtype):
    made = partial(make_batch, 2)
    return trace(make_model(name), made, loss_of, name=name, compute_dtype=dtype)


def tape_of(name, candidate):
    return make_tape(name, "float32" if candidate.precision == "fp32" else "bfloat16")


def make_run(name, candidate, folder):
    model = shard(
        make_model(name),
        stage=candidate.stage,
        precision=precision_of(candidate),
        layout=candidate.layout,
        schedule=Schedule(reduce_every=candidate.reduce_every),
        offload=in_folder(candidate.offload, folder),
    )
    return model, OPTIMIZERS[candidate.optimizer](model.parameters())


def step(model, optimizer, candidate):
    for number in range(candidate.accumulation):
        with accumulate(model, last=number == candidate.accumulation - 1):
            loss_of(model, make_batch(candidate.micro_batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


def matrices(num_ranks):
    """A third of the cases, with owners of matrices."""
    some = cases(num_ranks, every=True)[num_ranks % 3 :: 3]
    return [(name, replace(candidate, layout="matrices")) for name, candidate in some]


def rest(rank, num_ranks, folder, of):
    found = []
    for name, candidate in of(num_ranks):
        model, optimizer = make_run(name, candidate, folder)
        # Buffers of steps on the device have seen every load in the fourth step.
        for _ in range(4 if candidate.offload.step_on == "device" else 2):
            step(model, optimizer, candidate)
        optimizer.state_dict()  # waits
        found.append(dict(stats(model, optimizer).bytes_by_place))
    return found


@pytest.mark.parametrize(("num_ranks", "of"), [(1, cases), (3, cases), (3, matrices)])
def test_what_rests_where_is_a_runs_on_every_rank(num_ranks, of, tmp_path):
    by_rank = run_ranks(rest, num_ranks, tmp_path, of)
    for number, (name, candidate) in enumerate(of(num_ranks)):
        tape = tape_of(name, candidate)
        for rank in range(num_ranks):
            planned = bytes_between_steps(tape, candidate, rank)
            assert planned.bytes_by_place == by_rank[rank][number], (rank, name, candidate)
        if of is cases:  # of matrices another rank may have the most
            assert play(tape, candidate).bytes_by_place == by_rank[0][number]


@contextmanager
def counted():
    """Count what is copied between device, host and files, in bytes; nothing is in the cache."""
    found = Counter[str]()
    fetch, evict, run = Home.start_fetch, Home.start_evict, StagingBuffers.run
    plain_mirror, on_device = Storage.mirror, set()

    def mirror(storage, index):
        there = plain_mirror(storage, index)
        on_device.update([] if there is None else [there.untyped_storage().data_ptr()])
        return there

    def start_fetch(home, places, slices):
        found["to_device"] += sum(each.nbytes for each in slices)
        return fetch(home, places, slices)

    def start_evict(home, *args):
        brought, pending = evict(home, *args)
        found["to_host"] += brought.nbytes
        return brought, pending

    def run_load(lane, load):
        found["to_device"] += sum(tensor.nbytes for tensor in load.tensors)

        def work(tensors):
            copies = load.work(tensors)
            for source, place in copies:
                if place.untyped_storage().data_ptr() not in on_device:
                    found["to_host"] += source.nbytes
            return copies

        return run(lane, DeviceLoad(load.tensors, work))

    def transfer(name):
        plain = getattr(Disk, f"start_{name}")

        def start(disk, file, begin, tensor, *args):
            found[f"disk_{name}"] += tensor.nbytes
            return plain(disk, file, begin, tensor, *args)

        return start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_slices, "cached_share", lambda _: 0.0)
        patch.setattr(Home, "start_fetch", start_fetch)
        patch.setattr(Home, "start_evict", start_evict)
        patch.setattr(StagingBuffers, "run", run_load)
        patch.setattr(Storage, "mirror", mirror)
        for name in ("read", "write"):
            patch.setattr(Disk, f"start_{name}", transfer(name))
        yield found


WAYS = [
    {},
    {"accumulation": 2, "stage": 3, "reduce_every": "step"},
    {"accumulation": 2, "stage": 2},
    {"accumulation": 2, "stage": 1},
]


def traffic_cases(num_ranks):
    found = [(name, replace(c, **WAYS[n // 5 % 4])) for n, (name, c) in enumerate(cases(num_ranks))]
    for number, (name, candidate) in enumerate(found[::3]):
        kept = candidate.stage == 3 and candidate.offload.params == "device"
        if candidate.stage and not kept:  # encoded where slices rest
            candidate = replace(candidate, gather=("int8", "int4")[number % 2])
        found.append((name, replace(candidate, reduce=("int8-a2a", "bf16-a2a", None)[number % 3])))
    return found


def traffic(rank, num_ranks, folder):
    counts = []
    for name, candidate in traffic_cases(num_ranks):
        model, optimizer = make_run(name, candidate, folder)
        with counted() as found:
            for _ in range(2):
                found.clear()
                step(model, optimizer, candidate)
                optimizer.state_dict()
        counts.append(dict(found))
    return counts


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_a_step_copies_is_what_a_run_counts(num_ranks, tmp_path):
    """Files that are memory too are read and written by the system, which nobody counts."""
    counts = run_ranks(traffic, num_ranks, tmp_path)[0]
    exact = 0
    for (name, candidate), found in zip(traffic_cases(num_ranks), counts, strict=True):
        planned = play(tape_of(name, candidate), candidate).program.copied_bytes
        for link in ("to_device", "to_host"):
            assert planned[link] == found[link] > 0, (link, name, candidate)
        params, grads, state = candidate.offload.tiers[:3]
        is_counted = OPTIMIZER_ROWS[candidate.optimizer].by and state == "nvme"
        for link in ("disk_read", "disk_write"):
            if "nvme" in (params, grads) or not is_counted:
                assert planned.get(link, 0) >= found.get(link, 0), (link, name, candidate)
            else:
                assert planned.get(link, 0) == found.get(link, 0), (link, name, candidate)
                exact += link in planned
    assert exact
