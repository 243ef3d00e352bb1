"""Forged files cost memory in proportion to their size, and the limits are those of the page."""

import pickle
import re
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hostile import sealed
from shardwise import strict_json
from shardwise.checkpoint import container, manifest
from shardwise.checkpoint.manifest import parse_index
from shardwise.checkpoint.values import decode
from shardwise.convert import unpickle
from shardwise.convert.dcp_metadata import _NAMES, METADATA, read_dcp_metadata
from shardwise.convert.unpickle import read_pickle
from shardwise.errors import CheckpointError

MIB = 1 << 20
PAGE = Path(__file__).parents[2] / "docs/checkpoint-format.md"
FREE_BYTES = 4 * MIB  # what a file of any size may take, with the limits of `small_limits`
TIMES = 48  # of its size


@pytest.fixture
def small_limits(monkeypatch):
    """Let small files reach the limits: only what is free for a file of any size is less."""
    monkeypatch.setattr(strict_json, "MAX_CONTAINERS", 1000)
    monkeypatch.setattr(unpickle, "_FREE_MADE", MIB)
    monkeypatch.setattr(unpickle, "_FREE_CODES", 100_000)


def peak_of(call):
    """Return the memory that a call took at its peak, and its error."""
    tracemalloc.start()
    try:
        call()
        said = ""
    except CheckpointError as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, said


def index_of(item, num_bytes):
    values = b"[" + b",".join([item] * (num_bytes // (len(item) + 1))) + b"]"
    body = (
        b'{"format":1,"run":"a","step":1,"rank":0,"files":[],"boxes":[],"own":[],'
        b'"values":{"extra":' + values + b"}}"
    )
    return sealed(body)


def read_index(data):
    index = parse_index(data, "x")
    for value in index.values.values():
        decode(value, lambda _: torch.zeros(1))


@pytest.mark.parametrize(
    ("item", "fits"),
    [(b"[]", False), (b"{}", False), (b'{"a":1}', False), (b"[[[]]]", False), (b'"ab"', True)],
    ids=["lists", "dicts", "dicts of one", "lists of lists", "texts"],
)
def test_json_of_many_small_values_is_counted_before_it_is_made(item, fits, small_limits):
    data = index_of(item, MIB // 8)
    peak, said = peak_of(lambda: read_index(data))
    assert ("lists and objects" in said) is not fits
    assert peak < FREE_BYTES + (TIMES if fits else 0) * len(data)


def test_what_could_not_be_read_for_its_many_lists_is_not_saved(small_limits):
    part = manifest.unseal(index_of(b"1", 8), "x")
    part["values"]["extra"] = [[] for _ in range(4000)]
    index = parse_index(index_of(b"1", 8), "x").model_copy(update={"values": part["values"]})
    with pytest.raises(CheckpointError, match="large state belongs into tensors"):
        manifest.seal(index)
    part["values"]["extra"] = [[1, 2] for _ in range(900)]
    index = index.model_copy(update={"values": part["values"]})
    assert parse_index(manifest.seal(index), "x").values == index.values


def test_depth_and_count_are_right_whatever_stands_in_texts():
    check = strict_json.check_containers
    deep = b"[" * strict_json.MAX_DEPTH + b"]" * strict_json.MAX_DEPTH
    check(deep)
    block = strict_json._BLOCK_CHARS
    for before in (b'"[[[{{{"', b'"\\"[["', b'"\\\\"', b'"' + b"[" * block + b'"'):
        check(b"[" + before + b"," + deep[1:-1] + b"]")
        with pytest.raises(ValueError, match="nested deeper"):
            check(b"[" + before + b"," + deep + b"]")


PICKLES = {
    "lists": b"]",
    "dicts": b"}",
    "marks": b"(",
    "tuples": b")\x85",
    "tuples of tuples": b"\x85",
    "objects": b"h\x01)R",
    "results of calls": b"h\x00)R",
    "remembered far away": b"Nr\xff\xff\xff\x7f",
    "remembered": b"N\x94",
    "texts": b"\x8c\x02ab",
}


@pytest.mark.parametrize("what", PICKLES)
def test_a_pickle_of_many_small_objects_is_charged_before_they_are_made(what, small_limits):
    code = PICKLES[what]
    start = b"\x80\x04(ccollections\nOrderedDict\nq\x00ctorch\nSize\nq\x01N"
    data = start + code * (MIB // 8 // len(code)) + b"t."
    names = {"collections.OrderedDict": OrderedDict, "torch.Size": None}
    peak, said = peak_of(lambda: read_pickle(data, "x", names))
    assert peak < FREE_BYTES + TIMES * len(data)
    if what in ("lists", "dicts", "marks", "tuples of tuples"):
        assert "as no checkpoint's do" in said
    if what in ("lists", "texts"):  # a large file is refused as soon as its bytes say too much
        large = start + (code if what == "lists" else b"N") * (6 * MIB) + b"t."
        peak, said = peak_of(lambda: read_pickle(large, "x", names))
        assert peak < 20 * MIB and "as no checkpoint's do" in said


def test_a_table_that_names_one_part_many_times_is_refused(tmp_path, small_limits):
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    parts = [chunk] * 20_000
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), parts)
    table = Metadata({f"{n}": entry for n in range(2000)}, storage_data={})
    (tmp_path / METADATA).write_bytes(pickle.dumps(table))
    one = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    data = (tmp_path / METADATA).stat().st_size
    peak, said = peak_of(lambda: read_dcp_metadata(tmp_path))
    assert "more parts of tensors than it has room to describe" in said
    assert peak < FREE_BYTES + TIMES * data
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), [one] * 20_000)
    table = Metadata({"a": entry}, storage_data={MetadataIndex("a", torch.Size([0])): None})
    (tmp_path / METADATA).write_bytes(pickle.dumps(table))
    peak, said = peak_of(lambda: read_dcp_metadata(tmp_path))
    assert said
    assert peak < FREE_BYTES + TIMES * data


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_stays_well_below_the_limits(tmp_path):
    state = {f"layers.{n}.weight": torch.zeros(2, 2) for n in range(300)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    data = (tmp_path / METADATA).read_bytes()
    machine = unpickle._Machine(data, "x", _NAMES, None, False)
    machine.run()
    assert 0 < machine._made_bytes < 0.75 * unpickle._MADE_TIMES * len(data)
    assert machine._num_codes < 0.75 * unpickle._CODES_SHARE * len(data)
    parts = read_dcp_metadata(tmp_path).tensors
    assert len(parts) == 300


def test_the_page_has_the_limits_of_the_code():
    text = PAGE.read_text()
    row = re.search(r"\| a header; a manifest or an index \| (\d+) MiB; (\d+) MiB \|", text)
    limits = (container.MAX_HEADER_BYTES, manifest.MAX_PART_BYTES)
    assert tuple(int(n) * MIB for n in row.groups()) == limits
    row = re.search(r"one of them \| (\d+) (\d+), and one more for every (\d+) bytes \|", text)
    assert int(row[1] + row[2]) == strict_json.MAX_CONTAINERS
    assert int(row[3]) == strict_json.BYTES_PER_CONTAINER
