"""Manifest and index: what is written is read back, sealed, and checked before it is believed."""

import json
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostile import sealed
from scaling import manifest_of
from shardwise.checkpoint.manifest import (
    FileRow,
    IndexRow,
    LayoutRow,
    OwnRow,
    RankIndex,
    TensorRow,
    file_name,
    index_name,
    is_ours,
    parse_index,
    parse_manifest,
    seal,
    unseal,
)
from shardwise.errors import CheckpointError, DamagedCheckpoint

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
UNITS = st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3)


@st.composite
def manifests(draw):
    shapes = draw(UNITS)
    units = [
        {f"unit{number}.é{n}": shape for n, shape in enumerate(unit)}
        for number, unit in enumerate(shapes)
    ]
    num_replicas = draw(st.integers(1, 3))
    num_ranks = num_replicas * draw(st.integers(1, 5))
    return manifest_of(units, num_ranks, draw(st.sampled_from(["rows", "flat"])), num_replicas)


@given(manifests(), st.integers(0, 2**49))
def test_a_manifest_is_read_back_as_it_was(manifest, size):
    row = IndexRow(index_bytes=size, digest="0f" * 16, num_files=3, file_bytes=2**48 + size)
    whole = manifest.model_copy(update={"ranks": (row,) * manifest.num_ranks})
    data = seal(whole)
    back = parse_manifest(data, "x")
    assert back == whole and seal(back) == data


@given(manifests())
def test_every_element_is_written_exactly_once(manifest):
    places = {n: [] for n in range(len(manifest.tensors))}
    for rank in range(manifest.num_ranks):
        files = {}
        for number, place, box in manifest.all_boxes(rank):
            places[number].append((box.lo, box.hi))
            assert number not in files.setdefault(place, set()), "one key twice in a file"
            files[place].add(number)
            assert manifest.boxes_of(number, rank)[place] == box
    for number, found in places.items():
        numel = prod(manifest.tensors[number].shape)
        at = 0
        for lo, hi in sorted(found):
            assert lo == at < hi
            at = hi
        assert at == numel


def test_replicas_take_turns():
    units = [{f"w{n}": (8,) for n in range(6)}]
    manifest = manifest_of(units, 4, "rows", num_replicas=2)
    counts = [sum(1 for _ in manifest.all_boxes(rank)) for rank in range(4)]
    # Rank 0 also has the six step counts.
    assert counts == [9 + 6, 9, 9, 9]


def test_wide_elements_come_first_in_a_file():
    rows = tuple(
        TensorRow(kind="buffer", name=name, dtype=dtype, shape=(3,))
        for name, dtype in (("a", "BOOL"), ("b", "F64"), ("c", "BF16"), ("d", "F32"))
    )
    manifest = manifest_of([{"w": (2,)}], 1, "rows").model_copy(update={"tensors": rows})
    assert [rows[n].dtype for n, _, _ in manifest.all_boxes(0)] == ["F64", "F32", "BF16", "BOOL"]


def index():
    return RankIndex(
        format=1,
        run="1" * 16,
        step=3,
        rank=1,
        files=(FileRow(num_bytes=70, header="a" * 32),),
        boxes=((0, 0, 16, "b" * 32), (1, 0, 28, "c" * 32)),
        own=(OwnRow(kind="extra", name="x", dtype="I8", shape=(2,), begin=32, digests="d" * 32),),
        values={"extra": {"a": [1, None]}},
    )


def test_an_index_is_read_back():
    assert parse_index(seal(index()), "x") == index()


SEALED = {"manifest": seal(manifest_of([{"w": (3, 2)}], 2, "rows")), "index": seal(index())}


@settings(max_examples=150)
@given(st.sampled_from(sorted(SEALED)), st.data())
def test_any_changed_byte_breaks_the_seal(name, data):
    damaged = bytearray(SEALED[name])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedCheckpoint, match=r"^x: it is damaged"):
        unseal(bytes(damaged), "x")


@given(st.sampled_from(sorted(SEALED)), st.data())
def test_a_cut_or_longer_file_breaks_the_seal(name, data):
    whole = SEALED[name]
    size = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:size], whole[size:][1:], whole + whole[size:]):
        with pytest.raises(DamagedCheckpoint):
            unseal(damaged, "x")


def changed(name, *path, to):
    value = unseal(SEALED[name], "x")
    place = value
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return sealed(json.dumps(value, separators=(",", ":")))


WRONG = {
    "a negative size": ("manifest", ("tensors", 0, "shape"), [-1, 2], "shape"),
    "a size that is no integer": ("manifest", ("tensors", 0, "shape"), [3.0, 2], "shape"),
    "another shape than its layout": ("manifest", ("tensors", 0, "shape"), [2, 2], "in its layout"),
    "a layout that is not there": ("manifest", ("tensors", 0, "layout"), 5, "in its layout"),
    "an index past its layout": ("manifest", ("tensors", 0, "index"), 1, "in its layout"),
    "an unknown dtype": ("manifest", ("tensors", 0, "dtype"), "F128", "unknown 'F128'"),
    "an unknown kind": ("manifest", ("tensors", 0, "kind"), "grad", "kind"),
    "a rank that is not there": ("manifest", ("tensors", 3, "rank"), 2, "of rank 2 of 2"),
    "two of one name": ("manifest", ("tensors", 1, "state"), "exp_avg_sq", "two have one name"),
    "too many ranks": ("manifest", ("num_shards",), 1 << 24, "num_shards"),
    "no ranks": ("manifest", ("num_shards",), 0, "num_shards"),
    "a stage that is not there": ("manifest", ("stage",), 4, "stage"),
    "a key too many": ("manifest", ("surprise",), 1, "surprise"),
    "files that are too small": (
        "manifest",
        ("ranks",),
        [{"index_bytes": 1, "digest": "0" * 32, "num_files": 1, "file_bytes": 37}] * 2,
        "they take 76 bytes, more than the files have",
    ),
    "rows of other ranks": (
        "manifest",
        ("ranks",),
        [{"index_bytes": 1, "digest": "0" * 32, "num_files": 1, "file_bytes": 1}],
        "1 rows for 2 ranks",
    ),
    "a tie to nothing": ("manifest", ("tied",), {"a": "b"}, "cannot be another name of 'b'"),
    "an enormous tensor": (
        "manifest",
        ("layouts",),
        [{"kind": "rows", "shapes": [[1 << 50]]}],
        "layouts",
    ),
    "a file number": ("index", ("boxes", 0, 1), "0", "boxes"),
    "a short box": ("index", ("boxes", 0), [1, 2], "boxes"),
    "a digest that is none": ("index", ("files", 0, "header"), "x" * 32, "header"),
    "a value that is no object": ("index", ("values",), [1], "values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_sealed_but_wrong_is_refused_with_its_place(name):
    which, path, to, reason = WRONG[name]
    data = changed(which, *path, to=to)
    with pytest.raises(DamagedCheckpoint, match=reason) as caught:
        if which == "manifest":
            parse_manifest(data, "the/file")
        else:
            parse_index(data, "the/file")
    assert str(caught.value).startswith("the/file: ")


@pytest.mark.parametrize("text", [b"[]", b'"a"', b"3", b"null", b"{}", b'{"format":1}'])
def test_sealed_json_of_another_kind_is_refused(text):
    for parse in (parse_manifest, parse_index):
        with pytest.raises(CheckpointError):
            parse(sealed(text), "x")


def test_an_enormous_tensor_is_refused():
    with pytest.raises(ValueError, match="more than a tensor can be"):
        TensorRow(kind="param", name="w", dtype="F32", shape=(1 << 30, 1 << 30))
    assert TensorRow(kind="param", name="w", dtype="F32", shape=(1 << 19, 1 << 19)).info.numel


def test_names_of_files_are_known_and_no_others():
    for rank, number in product((0, 7, 99_999, 100_000), (0, 1, 12)):
        assert is_ours(index_name(rank)) and is_ours(file_name(rank, number))
    assert is_ours("manifest.json")
    others = ["rank1.json", "rank00000.json\n", "../rank00000.json", "rank00000.safetensors", ""]
    others += ["rank00000-.safetensors", "rank00000-0.bin", "Manifest.json", "manifest.json~", "."]
    others += [
        "rank\u0660\u0660\u0660\u0660\u0660.json",
        "rank00000-0.safetensors.tmp",
        "xrank00000.json",
        "rank-0001.json",
    ]
    assert not [name for name in others if is_ours(name)]


def test_a_layout_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind"):
        LayoutRow(kind="columns", shapes=())
