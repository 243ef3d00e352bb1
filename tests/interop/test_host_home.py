"""Slices with a home on the host: other memory than the full copies, the same training."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import on_ranks
from shardwise import shard
from shardwise.device import HostTime
from shardwise.layout.segments import build_layout
from shardwise.offload.home import Home
from shardwise.stages import STAGES
from shardwise.trace import FullParamLedger
from shardwise.unit.storage import Storage

CPU = torch.device("cpu")
FP32 = (torch.float32, torch.float32)
HOME = Home(CPU, CPU, HostTime())
BF16 = (torch.float32, torch.bfloat16)


def make_storage(stage: int, num_ranks: int, dtypes: tuple[torch.dtype, torch.dtype]) -> Storage:
    layout = build_layout("rows", [(5, 3), (4,)], num_ranks)
    return Storage(layout, 0, STAGES[stage], dtypes, CPU, FullParamLedger(), HOME)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtypes", [FP32, BF16])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slices_at_home_share_no_memory_with_the_full_copy(
    stage: int, dtypes: tuple[torch.dtype, torch.dtype], num_ranks: int
) -> None:
    storage = make_storage(stage, num_ranks, dtypes)
    full = torch.arange(15.0).reshape(5, 3)
    storage.fill(0, full)
    assert not storage.memory.aliased
    assert storage.master.untyped_storage().data_ptr() != (
        storage.full.untyped_storage().data_ptr()
    )
    shape = (5, 3) if num_ranks == 1 or stage == 0 else (3, 3)
    local = storage.local(0, shape)
    assert torch.equal(local, full[: shape[0]])
    storage.prepare_gather()  # alone, this rank's own rows are all that it brings
    storage.finish_fetch()
    leaf = storage.view(0)
    assert torch.equal(leaf[: shape[0]], full[: shape[0]].to(dtypes[1]))
    with torch.no_grad():
        leaf.zero_()
    assert torch.equal(local, full[: shape[0]])  # the copy is not the value
    storage.free()
    assert torch.equal(local, full[: shape[0]])


def test_slices_with_a_storage_of_their_own_are_the_same_memory() -> None:
    layout = build_layout("rows", [(5, 3), (4,), (0, 2)], 2)
    for home in (None, HOME):
        storage = Storage(layout, 1, STAGES[3], FP32, CPU, FullParamLedger(), home)
        for index, shape in enumerate([(2, 3), (2,), (0, 2)]):
            apart, local = storage.local_apart(index, shape), storage.local(index, shape)
            apart.add_(index + 1)
            assert torch.equal(apart, local)
            assert apart.storage_offset() == 0
            assert apart.untyped_storage().nbytes() == apart.nbytes
        assert storage.master.sum() == 2 * 3 * 1 + 2 * 2


def gather(storages: list[Storage]) -> None:
    """Do what an all-gather does: every rank's shares go to their place on every rank."""
    items = [storage.prepare_gather() for storage in storages]
    for storage in storages:
        storage.finish_fetch()
    for storage_items in items:
        for number, item in enumerate(storage_items):
            share = item.segment.shard_numel
            for rank, of_rank in enumerate(items):
                item.full[rank * share : (rank + 1) * share].copy_(of_rank[number].source)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4),
    st.sampled_from(["rows", "flat"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([FP32, BF16]),
    st.sampled_from([None, HOME]),
)
def test_full_copies_follow_the_slices_wherever_those_live(
    shapes: list[tuple[int, ...]],
    kind: Any,
    num_ranks: int,
    stage: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    home: Home | None,
) -> None:
    layout = build_layout(kind, shapes, num_ranks)
    ledger = FullParamLedger()
    storages = [
        Storage(layout, r, STAGES[stage], dtypes, CPU, ledger, home) for r in range(num_ranks)
    ]
    values = [torch.arange(prod(s)).reshape(s).float() + 9 * i for i, s in enumerate(shapes)]
    for storage in storages:
        for index, value in enumerate(values):
            storage.fill(index, value)
    leaves = [[s.view(i) for i in range(len(shapes))] for s in storages]
    for added in (0, 1):
        for rank, storage in enumerate(storages):
            for index in range(len(shapes)):
                storage.local(index, (layout.piece(index, rank).numel,)).add_(added)
            storage.free()
        gather(storages)
        for of_rank in leaves:
            for leaf, value in zip(of_rank, values, strict=True):
                assert leaf.shape == value.shape
                assert torch.equal(leaf, (value + added).to(dtypes[1]))


def evicted(storage: Storage, means: Tensor) -> Tensor:
    brought, arrival = storage.means.start_evict(means)
    arrival.wait()
    return brought


def test_means_are_copied_home_in_the_dtype_of_the_slices() -> None:
    storage = make_storage(3, 2, BF16)
    means = torch.arange(8.0).to(torch.bfloat16)
    brought = evicted(storage, means)
    assert brought.dtype == torch.float32 and torch.equal(brought, means.float())
    storage = make_storage(3, 2, FP32)
    means = torch.arange(8.0)
    assert evicted(storage, means).data_ptr() != means.data_ptr()


def test_without_a_home_the_means_stay_where_they_are() -> None:
    layout = build_layout("rows", [(5, 3)], 2)
    means = torch.arange(9.0)
    storage = Storage(layout, 0, STAGES[3], FP32, CPU, FullParamLedger())
    assert evicted(storage, means) is means


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor], what: object) -> None:
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), (what, number)


@pytest.mark.gpu
@on_ranks(1, fresh=True)
def test_training_with_slices_at_home_gives_the_same_bits_on_a_gpu():
    """Steps of half the gradient: the same bits whichever processor takes them."""
    for precision in ("fp32", "bf16"):
        results = []
        for offload in (None, "cpu"):
            torch.manual_seed(0)
            made = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).cuda()
            model = shard(made, precision=precision, units=nn.Linear, offload=offload)
            assert all(p.to_local().is_cuda == (offload is None) for p in model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(4):
                model(torch.randn(64, 512, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(torch.ones(1, 512, device="cuda"))
                    for p in model.parameters():
                        p.mul_(0.5)
            results.append([p.full_tensor().detach().cpu() for p in model.parameters()])
        assert_same_bits(results[0], results[1], precision)
