"""Ten thousand ranks: what they say to each other, what they write about boxes, what they open.

Real ranks are few on one machine; a run of many is a manifest, and files of the ranks one asks for.
"""

from dataclasses import replace
from math import prod
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from ranks import run_ranks
from scaling import expected_bytes, llama_shapes, manifest_of, wanted_by, write_all
from shardwise.checkpoint.assemble import assemble
from shardwise.checkpoint.container import CHUNK_BYTES, DIGEST_CHARS
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.manifest import (
    MANIFEST,
    IndexRow,
    index_name,
    parse_index,
    parse_manifest,
    seal,
)
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.source import TensorInfo
from shardwise.checkpoint.state import Item, Table
from shardwise.checkpoint.write import Part, write_checkpoint, write_rank
from shardwise.layout import boxes
from shardwise.layout.boxes import owners_of
from shardwise.strict_json import dumps

MANY = 10_000
FILES = Files()


class Recording:
    """The exchanges of rank 0 of many ranks that all say the same."""

    rank = 0

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.members = range(num_ranks)
        self.sizes = []

    def exchange(self, row, about=""):
        self.sizes.append(len(row))
        return [row] * self.num_ranks

    def exchange_after(self, work, row_bytes):
        return self.exchange(work())

    def broadcast(self, data, source=0):
        raise AssertionError("a save needs no broadcast of what grows")


def table_of(num_ranks):
    """Return rank 0's state of a run: its slices of a thousand parameters, and their steps."""
    units = llama_shapes(width=64, hidden=176)
    manifest = manifest_of(units, num_ranks, "rows")
    sharded, whole = [], []
    for row in manifest.tensors:
        if row.layout is None:
            whole.append(Item(row, torch.zeros(1)))
        else:
            piece = manifest.built_layouts[row.layout].piece(row.index or 0, 0)
            sharded.append(Item(row, torch.zeros(piece.numel), piece.lo))
    mesh = (tuple(range(num_ranks)),)
    return Table(
        3, (mesh,), manifest.layouts, tuple(sharded), tuple(whole), {}, None, (), {}
    )  # fmt: skip


class Alike(Files):
    """Files in which every other rank seems to have written what rank 0 wrote."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks

    def list(self, path):
        found = super().list(path)
        mine = [entry for entry in found if entry.name.startswith("rank00000")]
        return found + [
            replace(entry, name=entry.name.replace("rank00000", f"rank{rank:05d}"))
            for rank in range(1, self.num_ranks)
            for entry in mine
        ]


@pytest.mark.parametrize("num_ranks", [1, 3, MANY])
def test_ranks_exchange_a_few_bytes_and_no_objects(tmp_path, num_ranks):
    control = Recording(num_ranks)
    manifest, part = assemble(control, table_of(num_ranks), "0" * 16, 3)
    files = Alike(num_ranks)
    write_checkpoint(files, control, tmp_path / "c", bytes(4), manifest, part)
    assert control.sizes == [1 + 32, 1 + 4, 1 + 24 + 16, 1]
    back = parse_manifest((tmp_path / "c" / MANIFEST).read_bytes(), "x")
    assert len(back.ranks) == num_ranks and len(back.tensors) == 4 * 1002
    assert {row.rank for row in back.tensors if row.state == "step"} == {
        0
    }  # one file, not a thousand


def llama(num_ranks, layout):
    return manifest_of(llama_shapes(), num_ranks, layout)


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_the_manifest_does_not_grow_by_tensors_times_ranks(layout):
    row = IndexRow(index_bytes=10**6, digest="f" * 32, num_files=3, file_bytes=10**12)
    sizes = {}
    for num_ranks in (1, MANY):
        whole = llama(num_ranks, layout).model_copy(update={"ranks": (row,) * num_ranks})
        data = seal(whole)
        assert parse_manifest(data, "x") == whole
        sizes[num_ranks] = len(data)
    assert sizes[1] < 256 * 4 * 1002
    assert sizes[MANY] - sizes[1] < 128 * MANY


@pytest.mark.parametrize(("layout", "at_most"), [("rows", 1), ("flat", 5)])
def test_one_ranks_boxes_are_found_without_looking_at_others(layout, at_most):
    with mock.patch.object(boxes, "_longest_box", wraps=boxes._longest_box) as longest:
        found = list(llama(MANY, layout).all_boxes(5))
    assert longest.call_count <= len(found) <= at_most * 3 * 1002


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_box_costs_at_most_256_bytes_and_22_for_each_further_chunk(tmp_path, layout):
    """Real names and sizes: a Llama of 25 billion parameters on ten thousand ranks."""
    zeros = memoryview(bytes(64 << 20))
    part = Part(5, lambda _, box: zeros[: 4 * (box.hi - box.lo)], (), {})
    write_rank(FILES, tmp_path, llama(MANY, layout), part)
    index = parse_index((tmp_path / index_name(5)).read_bytes(), "x")
    num_chunks = sum(len(row[-1]) for row in index.boxes) // DIGEST_CHARS
    data_bytes = metadata_bytes = 0
    for path in tmp_path.iterdir():
        size = path.stat().st_size
        with path.open("rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
        metadata_bytes += size if path.suffix == ".json" else header
        data_bytes += 0 if path.suffix == ".json" else size - header
    num_boxes = len(index.boxes)
    print(f"{layout}: {num_boxes} boxes, {metadata_bytes / num_boxes:.1f} B of metadata a box")
    assert num_boxes > 1000 and data_bytes > 20 << 20
    assert metadata_bytes <= 256 * num_boxes + 22 * (num_chunks - num_boxes)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_rank_opens_only_files_of_ranks_it_reads_from(tmp_path, layout, num_replicas):
    """Forty ranks saved; each of three ranks of seven reads a seventh of each tensor."""
    manifest = write_all(
        FILES, tmp_path / "c", manifest_of(llama_shapes(2, 32, 40), 40, layout, num_replicas)
    )
    layouts = manifest.built_layouts
    for rank in (0, 3, 6):
        checkpoint = Checkpoint(FILES, tmp_path / "c")
        owners = set()
        for number, info, lo, hi in wanted_by(manifest, rank, 7):
            data = checkpoint.read(info, lo, hi)
            assert data.numpy().tobytes() == expected_bytes(number, lo, hi)
            row = manifest.tensors[number]
            if row.layout is None:
                owners.add(row.rank)
            else:
                found = owners_of(layouts[row.layout], row.index or 0, lo, hi)
                owners |= {manifest.writer_of(number, o.rank) for o in found}
        opened = {int(name[4:9]) for name in checkpoint.opened}
        assert opened == owners
        assert len(owners) < 40
        checkpoint.close()


@pytest.mark.parametrize("span", [(0, 1), (100_000, 100_001), (200_000, 900_000), (0, 1_572_864)])
def test_reading_a_slice_takes_at_most_two_chunks_more(tmp_path, span):
    lo, hi = span
    numel = 6 * CHUNK_BYTES // 4
    units = [{"weight": (numel,)}]
    manifest = manifest_of(units, 1, "rows").model_copy(update={"optimizer": None})
    manifest = manifest.model_copy(update={"tensors": manifest.tensors[:1]})
    data = torch.arange(numel, dtype=torch.int32).view(torch.float32)
    part = Part(0, lambda _, box: memoryview(data[box.lo : box.hi].numpy()).cast("B"), (), {})
    write_checkpoint(FILES, Recording(1), tmp_path / "c", bytes(4), manifest, part)
    checkpoint = Checkpoint(FILES, tmp_path / "c")
    checkpoint.index_of(0)
    before = checkpoint.num_bytes
    found = checkpoint.read(TensorInfo("param", "weight", "F32", (numel,)), lo, hi)
    assert torch.equal(found.view(torch.int32), data[lo:hi].view(torch.int32))
    first, last = lo * 4 // CHUNK_BYTES, -(-hi * 4 // CHUNK_BYTES)
    assert checkpoint.num_bytes - before == (last - first) * CHUNK_BYTES
    assert checkpoint.num_bytes - before <= (hi - lo) * 4 + 2 * CHUNK_BYTES
    checkpoint.close()


# ------------------------------------------------------------------------------------ bytes on disk


class Megabytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 401) for _ in range(3))
        self.register_buffer("table", torch.zeros(1000))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def save_megabytes(rank, world_size, root, precision):
    """Save; return the number of parameters."""
    for layout in ("rows", "flat"):
        model = shardwise.shard(Megabytes(), layout=layout, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 400)).sum().backward()
        optimizer.step()
        shardwise.save(root / layout, model, optimizer)
    return sum(prod(p.shape) for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_disk_holds_twelve_bytes_a_parameter_and_little_more(tmp_path, world_size, precision):
    (numel, *_) = run_ranks(save_megabytes, world_size, tmp_path, precision)
    assert numel == 3 * (400 * 401 + 401)
    for layout in ("rows", "flat"):
        folder = tmp_path / layout
        indexes = [
            parse_index((folder / index_name(r)).read_bytes(), "x") for r in range(world_size)
        ]
        num_boxes = sum(len(index.boxes) + len(index.own) for index in indexes)
        values = sum(len(dumps(index.values)) for index in indexes)  # random generators, mostly
        state = 12 * numel + 6 * 4 + 1000 * 4 + values
        on_disk = sum(path.stat().st_size for path in folder.iterdir())
        assert state < on_disk <= 1.001 * state + 256 * num_boxes
