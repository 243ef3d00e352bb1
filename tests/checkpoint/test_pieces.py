"""Tensors in pieces, over several meshes: what is saved so is read back as it was, by anybody."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disk import SimulatedDisk
from saving import bits
from shardwise.checkpoint.folder import check_quickly
from shardwise.checkpoint.pieces import whole_of
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.verify import verify
from shardwise.checkpoint.write import Written
from worlds import World, regions, save_world, slices, worlds

PLACE = Path("/run/step-00000003")


def saved(world: World) -> tuple[SimulatedDisk, Checkpoint]:
    disk = SimulatedDisk()
    results = save_world(disk, PLACE, [world.table_of(rank) for rank in range(world.num_ranks)])
    assert all(isinstance(result, Written) for result in results), results
    manifest, _ = check_quickly(disk, PLACE)
    return disk, Checkpoint(disk, PLACE, manifest)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    packed = torch.empty(expected.numel(), dtype=expected.dtype).copy_(expected.reshape(-1))
    return found.dtype == expected.dtype and torch.equal(bits(found), bits(packed))


@settings(max_examples=60)
@given(worlds(), st.data())
def test_every_element_of_every_piece_is_read_back_whole_and_in_any_other_piece(
    world: World, data: Any
) -> None:
    disk, source = saved(world)
    with closing(source):
        expected = world.expected()
        assert {info.key for info in source.tensors} == expected.keys()
        assert source.manifest.format == 2 and source.manifest.num_ranks == world.num_ranks
        for info in source.tensors:
            truth = expected[info.key]
            assert info.shape == tuple(truth.shape)
            assert same(source.read(info, 0, info.numel), truth)
            lo = data.draw(st.integers(0, info.numel))
            hi = data.draw(st.integers(lo, info.numel))
            assert same(source.read(info, lo, hi), truth.reshape(-1)[lo:hi])
            region = data.draw(regions(info.shape))
            lo = data.draw(st.integers(0, region.numel))
            hi = data.draw(st.integers(lo, region.numel))
            piece = truth[slices(region)].reshape(-1)
            assert same(source.read(info, lo, hi, region), piece[lo:hi]), region
        assert [source.values_of(r)["extra"] for r in range(world.num_ranks)] == [
            {"rank": r} for r in range(world.num_ranks)
        ]
        for rank in range(world.num_ranks):
            with closing(Checkpoint(disk, PLACE, source.manifest, rank)) as own:
                for item in world.table_of(rank).whole:
                    region = item.piece or whole_of(item.info.shape)
                    assert same(own.read(item.info, 0, region.numel, region), item.data)
    found = verify(disk, PLACE)
    assert found.ok, found.findings
