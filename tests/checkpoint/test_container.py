"""A safetensors file's header: what is built is read back, by us and by the safetensors library."""

import json
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors import torch as st_torch

from shardwise.checkpoint.container import (
    Stored,
    build_header,
    dtype_name,
    element_bytes,
    is_dtype,
    memory_of,
    parse_header,
    place,
    read_header,
    torch_dtype,
)
from shardwise.checkpoint.files import Files
from shardwise.errors import CheckpointError, DamagedCheckpoint

SPELLINGS = [
    *("F64", "I64", "U64", "C64", "F32", "I32", "U32", "BF16", "F16", "I16", "U16"),
    *("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"),
]
sizes = st.lists(st.integers(0, 5), max_size=4)
texts = st.text(min_size=1, max_size=12).filter(lambda text: text != "__metadata__")
keys = texts.filter(lambda text: text.encode("utf-8", "ignore").decode() == text)


@st.composite
def described(draw):
    """Draw boxes: key, dtype, lengths, offsets."""
    found = []
    for key in draw(st.lists(keys, unique=True, max_size=6)):
        lengths = tuple(draw(sizes))
        offsets = tuple(draw(st.integers(0, 1 << 40)) for _ in lengths)
        found.append((key, draw(st.sampled_from(SPELLINGS)), lengths, offsets))
    return found


@given(described())
def test_a_header_that_was_built_is_read_back(boxes):
    stored = place(boxes)
    header = build_header(stored)
    data_bytes = sum(prod(lengths) * element_bytes(dtype) for _, dtype, lengths, _ in boxes)
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert len(header) % 8 == 0  # so that the widest elements are aligned
    assert parse_header(header[8:], data_bytes, "x") == {s.key: s for s in stored}
    assert [(s.key, s.dtype, s.lengths, s.offsets) for s in stored] == boxes
    assert not stored or (stored[0].begin, stored[-1].end) == (0, data_bytes)


@given(described(), st.integers(0, 2**62))
def test_another_size_of_the_file_is_noticed(boxes, data_bytes):
    stored = place(boxes)
    right = stored[-1].end if stored else 0
    if data_bytes == right:
        data_bytes += 1
    with pytest.raises(DamagedCheckpoint, match="x: tensors take"):
        parse_header(build_header(stored)[8:], data_bytes, "x")


@given(described(), st.data())
def test_a_header_with_other_bytes_is_read_or_refused_and_never_more(boxes, data):
    stored = place(boxes)
    header = bytearray(build_header(stored)[8:])
    where = data.draw(st.integers(0, len(header) - 1))
    header[where] ^= data.draw(st.integers(1, 255))
    try:
        found = parse_header(bytes(header), stored[-1].end if stored else 0, "x")
    except CheckpointError:
        return
    assert sum(s.end - s.begin for s in found.values()) == (stored[-1].end if stored else 0)
    assert all(len(s.offsets) == len(s.lengths) for s in found.values())


def write(path, tensors):
    stored = place(
        [(k, dtype_name(t.dtype, k), tuple(t.shape), (0,) * t.ndim) for k, t in tensors.items()]
    )
    path.write_bytes(build_header(stored) + b"".join(memory_of(t) for t in tensors.values()))


def test_the_safetensors_library_reads_every_dtype(tmp_path):
    tensors = {}
    for number, name in enumerate(SPELLINGS):
        count = 6 * element_bytes(name)
        data = torch.arange(number, number + count, dtype=torch.int64).to(torch.uint8)
        if name == "BOOL":
            data %= 2
        tensors[name] = data.view(torch_dtype(name)).view(2, 3)
    write(tmp_path / "a", tensors)
    assert all(is_dtype(name) and dtype_name(torch_dtype(name), "x") == name for name in SPELLINGS)
    with safe_open(str(tmp_path / "a"), framework="pt") as file:
        assert sorted(file.keys()) == sorted(SPELLINGS)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and found.shape == (2, 3)
            assert bytes(memory_of(found)) == bytes(memory_of(tensor))


def test_a_file_of_the_safetensors_library_is_read(tmp_path):
    tensors = {"b": torch.ones(3, 2), "a": torch.tensor(5), "c": torch.zeros(0, 4).half()}
    st_torch.save_file(tensors, tmp_path / "a", metadata={"format": "pt", "note": "x"})
    with Files().open(tmp_path / "a") as reader:
        found, begin = read_header(reader, "x")
        for key, tensor in tensors.items():
            s = found[key]
            assert (s.lengths, s.offsets) == (tuple(tensor.shape), (0,) * tensor.ndim)
            data = bytearray(s.end - s.begin)
            reader.read_into(begin + s.begin, memoryview(data))
            assert data == bytes(memory_of(tensor))


def test_memory_is_shared_with_the_tensor():
    tensor = torch.zeros(2, 3)
    memory_of(tensor)[4:8] = torch.tensor(1.5).numpy().tobytes()
    assert tensor.tolist() == [[0.0, 1.5, 0.0], [0.0, 0.0, 0.0]]
    assert len(memory_of(torch.zeros(0, 3))) == 0 and len(memory_of(torch.tensor(1.0))) == 4


def test_a_dtype_that_files_cannot_hold_is_named():
    with pytest.raises(CheckpointError, match=r"w: safetensors files hold no torch\.complex128"):
        dtype_name(torch.complex128, "w")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
REFUSED = {
    "a list": ([], "no JSON object"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "not described right"),
    "no object": ({"w": 3}, "not described right"),
    "unknown dtype": ({"w": {**GOOD, "dtype": "F128"}}, "not described right"),
    "negative": ({"w": {**GOOD, "shape": [-2]}}, "not described right"),
    "no integer": ({"w": {**GOOD, "shape": [2.0]}}, "not described right"),
    "a bool": ({"w": {**GOOD, "shape": [True]}}, "not described right"),
    "three offsets": ({"w": {**GOOD, "data_offsets": [0, 8, 8]}}, "not described right"),
    "too large": ({"w": {**GOOD, "shape": [1 << 62]}}, "not described right"),
    "other bytes": ({"w": {**GOOD, "shape": [3]}}, r"takes 8 bytes, expected 12"),
    "overlap": (
        {"v": GOOD, "w": {**GOOD, "data_offsets": [4, 12]}},
        "begins at byte 4, expected 8",
    ),
    "a hole": ({"w": {**GOOD, "data_offsets": [4, 12]}}, "begins at byte 4, expected 0"),
    "too short": ({}, "tensors take 0 bytes, got 8"),
    "metadata": ({"__metadata__": {"DCP_SHARDING_INFO": 3}, "w": GOOD}, "no map of strings"),
    "sharding": ({"__metadata__": {"DCP_SHARDING_INFO": "[]"}, "w": GOOD}, "is no map"),
    "offsets": (
        {"__metadata__": {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[1,2]}}'}, "w": GOOD},
        "not described right",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_header_is_refused_with_its_reason(name):
    value, reason = REFUSED[name]
    with pytest.raises(DamagedCheckpoint, match=reason) as caught:
        parse_header(json.dumps(value).encode(), 8, "the/file")
    assert str(caught.value).startswith("the/file: ")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"1234567", "7 bytes are no safetensors file"),
        (b"\xff" * 8 + b"{}", "claims 18446744073709551615 bytes; the file has 10"),
        (b"\x03" + b"\0" * 7 + b"{}", "claims 3 bytes; the file has 10"),
        (b"\x02" + b"\0" * 7 + b"{]", "x: "),
        (b"\x0f" + b"\0" * 7 + b'{"a":{},"a":{}}', "x: "),
    ],
)
def test_a_file_that_is_cut_or_lies_is_refused(tmp_path, data, reason):
    (tmp_path / "a").write_bytes(data)
    with Files().open(tmp_path / "a") as reader, pytest.raises(CheckpointError, match=reason):
        read_header(reader, "x")


def test_placing_lays_tensors_one_after_the_other():
    assert place([("a", "F32", (3,), (0,)), ("b", "I8", (0, 2), (4, 0)), ("c", "F64", (), ())]) == [
        Stored("a", "F32", (3,), (0,), 0, 12),
        Stored("b", "I8", (0, 2), (4, 0), 12, 12),
        Stored("c", "F64", (), (), 12, 20),
    ]
