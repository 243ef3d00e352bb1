"""Pickles read as data: every plain value comes back, and nothing that a pickle names ever runs."""

import collections
import os
import pickle
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.convert.torch_file import StoredTensor, TorchFile
from shardwise.convert.unpickle import PLAIN, Made, Name, read_pickle
from shardwise.errors import CheckpointError, DamagedCheckpoint

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**600), 2**600)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)


def values(sets):
    return st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.lists(inner, max_size=5).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=5)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict)
            | (st.sets(KEYS, max_size=3) | st.frozensets(KEYS, max_size=3) if sets else inner)
        ),
        max_leaves=20,
    )


# torch.save writes protocol 2; the table of DCP has the default one, and no sets.
@given(st.tuples(values(True), st.just(2)) | st.tuples(values(False), st.sampled_from([3, 4, 5])))
def test_plain_values_come_back_as_they_were(case):
    value, protocol = case
    got = read_pickle(pickle.dumps(value, protocol), "f", PLAIN)
    assert got == value
    assert type(got) is type(value)


class Runs:
    """Pickles as a call of any function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def hostile_pickles(marker):
    command = f"touch {marker}"
    text = command.encode()
    short = b"\x8c" + bytes([len(text)]) + text
    return {
        "os.system": pickle.dumps(Runs(os.system, command)),
        "eval": pickle.dumps(Runs(eval, f"open({str(marker)!r}, 'w')")),
        "open": pickle.dumps(Runs(open, str(marker), "w"), protocol=2),
        "getattr": pickle.dumps(Runs(getattr, 1, "real")),
        "torch.load": pickle.dumps(Runs(torch.load, str(marker))),
        "inside a list": pickle.dumps([1, {"a": Runs(os.system, command)}]),
        "the oldest protocol": f"cos\nsystem\n(S'{command}'\ntR.".encode(),
        "INST": f"(S'{command}'\nios\nsystem\n.".encode(),
        "OBJ": b"(cos\nsystem\n" + short + b"o.",
        "EMPTY_SET": b"\x80\x04\x8f.",
        "NEWOBJ_EX": b"\x80\x04cbuiltins\nset\n)}\x92.",
        "EXT1": b"\x80\x02\x82\x01).",
        "a dotted name": b"\x80\x04\x8c\x0bcollections\x8c\x0fOrderedDict.get\x93.",
    }


@pytest.mark.parametrize("kind", hostile_pickles(Path("x")))
def test_what_a_pickle_names_is_refused_by_name_and_never_runs(kind, tmp_path):
    marker = tmp_path / "ran"
    with pytest.raises(CheckpointError, match="the file: "):
        read_pickle(hostile_pickles(marker)[kind], "the file", PLAIN)
    assert not marker.exists()


def test_allowed_names_are_described_and_not_made():
    data = pickle.dumps([torch.float32, zipfile.ZipInfo("a")])
    names = {"torch.float32": None, "zipfile.ZipInfo": None, "copyreg._reconstructor": None}
    dtype, info = read_pickle(data, "f", names)
    assert dtype == Name("torch.float32")
    assert isinstance(info, Made)
    assert info.name == "zipfile.ZipInfo"


def nested(depth):
    value = ()
    for _ in range(depth):
        value = (value, value)
    return value


BOMBS = {
    "a memo index of 4 GB": b"\x80\x02Nr\xff\xff\xff\xff0.",
    "text of 2^63 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b".",
    "a key whose hash takes 2^60 steps": b"\x80\x04}(" + pickle.dumps(nested(60))[2:-1] + b"Nu.",
    "a member whose hash takes 2^60 steps": b"\x80\x04\x8f("
    + pickle.dumps(nested(60))[2:-1]
    + b"\x90.",
    "marks without end": b"\x80\x04" + b"(" * 1000 + b".",
    "bytes of one text many times": b"\x80\x02X\x00\x00\x01\x00"
    + b"x" * 65536
    + b"q\x00]("
    + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 600
    + b"e\x86.",
    "sets of one list many times": pickle.dumps(list(range(100_000)), 2)[:-1]
    + b"]("
    + b"c__builtin__\nset\nh\x00\x85R" * 1000
    + b"e\x86.",
    "keys of one hash": pickle.dumps({n * ((1 << 61) - 1): None for n in range(3000)}),
    "members of one hash": pickle.dumps({n * ((1 << 61) - 1) for n in range(3000)}, 2),
    "frozen members of one hash": pickle.dumps(
        frozenset(n * ((1 << 61) - 1) for n in range(3000)), 2
    ),
    "a number of 2^31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_small_pickles_that_would_take_for_ever_are_refused(kind):
    with pytest.raises(CheckpointError):
        read_pickle(BOMBS[kind], "f", PLAIN)


def test_a_tensor_that_stands_in_many_places_is_read_once(tmp_path):
    tensor = torch.arange(3)
    torch.save([tensor] * 5, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    first, *others = file.plain(file.value, "it")
    assert all(other is first for other in others)
    torch.save([torch.zeros(10_000)] * 100, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="many times over"):
        file.plain(file.value, "it")


def test_counters_and_numbers_of_numpy_come_back(tmp_path):
    """Schedulers of torch count milestones; scripts keep their best loss."""
    value = {
        "milestones": collections.Counter([2, 2, 5]),
        "best": np.float64(0.1),
        "n": np.int64(3),
    }
    torch.save(value, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    got = file.plain(file.value, "it")
    assert got == value
    assert [type(member) for member in got.values()] == [collections.Counter, float, int]


def test_a_pickle_that_takes_long_is_told_before_it_is_read_and_one_too_large_refused(
    caplog, monkeypatch
):
    value = ["x" * (17 << 20)]
    data = pickle.dumps(value)
    assert read_pickle(data, "f", PLAIN) == value
    assert "f: a pickle of 17 MiB is read value by value, up to 3 s" in caplog.text
    monkeypatch.setattr("shardwise.convert.unpickle.MAX_PICKLE_BYTES", 16 << 20)
    with pytest.raises(CheckpointError, match="at most 16777216 are read"):
        read_pickle(data, "f", PLAIN)


def test_many_large_keys_of_different_hashes_are_read():
    value = {(n, "a"): n for n in range(5000)} | {n << 61: n for n in range(5000)}
    assert read_pickle(pickle.dumps(value), "f", PLAIN) == value


def test_a_tree_that_holds_one_branch_a_million_times_is_not_walked(tmp_path):
    value = []
    for _ in range(40):
        value = [value, value]
    torch.save(value, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="nested without end"):
        file.plain(file.value, "it")


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_our_error(data):
    with suppress(CheckpointError):
        read_pickle(b"\x80\x04" + data, "f", PLAIN)


SAMPLE = pickle.dumps(
    {"a": [1, 2.5, (True, None)], "b": (1, 2, 3, 4), "c": collections.OrderedDict(x=b"y")}
)


@given(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_value_or_our_error(at, byte):
    with suppress(CheckpointError):
        read_pickle(SAMPLE[:at] + bytes([byte]) + SAMPLE[at + 1 :], "f", PLAIN)


@pytest.mark.parametrize("length", range(len(SAMPLE)))
def test_a_pickle_that_was_cut_short_is_refused(length):
    with pytest.raises(DamagedCheckpoint):
        read_pickle(SAMPLE[:length], "f", PLAIN)


def tensors():
    base = torch.arange(60, dtype=torch.float32)
    floats = (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    ints = (
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.uint16,
    )
    return {
        "plain": base.view(3, 4, 5),
        "a slice of a storage": base[7:20],
        "transposed": base.view(6, 10).t(),
        "every second": base[::2],
        "a scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "a parameter": torch.nn.Parameter(torch.ones(3)),
        "complex": torch.tensor([1 + 2j]),
        **{str(dtype): torch.ones(5).to(dtype) for dtype in (*floats, *ints)},
    }


def test_slices_of_saved_tensors_are_the_slices_of_the_tensors(tmp_path):
    torch.save(tensors(), tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    for name, tensor in tensors().items():
        stored, flat = file.value[name], tensor.detach().reshape(-1)
        assert isinstance(stored, StoredTensor)
        assert stored.shape == tuple(tensor.shape)
        for lo in range(0, flat.numel() + 1, 3):
            for hi in (lo, min(lo + 4, flat.numel()), flat.numel()):
                got = file.read(stored, lo, hi)
                assert got.dtype == tensor.dtype, name
                assert got.tolist() == flat[lo:hi].tolist(), name


@pytest.mark.parametrize("where", ["at the start", "in the middle"])
def test_a_file_may_be_a_part_of_another(where, tmp_path):
    torch.save(torch.arange(9), tmp_path / "f.pt")
    data = (tmp_path / "f.pt").read_bytes()
    before = b"" if where == "at the start" else data + b"?" * 5
    (tmp_path / "g").write_bytes(before + data + data)
    file = TorchFile(tmp_path / "g", begin=len(before), length=len(data))
    assert file.read_whole(file.value).tolist() == list(range(9))


def test_every_flipped_byte_is_found_or_changes_nothing(tmp_path):
    value = {"t": torch.arange(20.0), "u": torch.arange(3), "n": 5}
    torch.save(value, tmp_path / "f.pt")
    data, found = (tmp_path / "f.pt").read_bytes(), 0
    for at in range(0, len(data), 3):
        (tmp_path / "f.pt").write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            file = TorchFile(tmp_path / "f.pt")
            got = file.plain(file.value, "it")
        except DamagedCheckpoint as error:
            assert "f.pt" in str(error)
            found += 1
        else:
            assert {key: getattr(v, "tolist", lambda v=v: v)() for key, v in got.items()} == {
                "t": value["t"].tolist(),
                "u": [0, 1, 2],
                "n": 5,
            }
    assert found > 100


@pytest.mark.parametrize("keep", [0, 1, 100, 600, -1])
def test_a_file_that_was_cut_short_is_named(keep, tmp_path):
    torch.save(torch.arange(100), tmp_path / "f.pt")
    data = (tmp_path / "f.pt").read_bytes()
    (tmp_path / "f.pt").write_bytes(data[:keep])
    with pytest.raises(DamagedCheckpoint, match=r"f\.pt"):
        TorchFile(tmp_path / "f.pt")


def test_a_tensor_larger_than_its_bytes_is_refused_before_memory_is_taken(tmp_path):
    torch.save(torch.zeros(1).expand(1 << 45), tmp_path / "f.pt")
    with pytest.raises(DamagedCheckpoint, match="elements"):
        TorchFile(tmp_path / "f.pt")


def test_without_checksums_files_are_read_as_well(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(4), tmp_path / "f.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    file = TorchFile(tmp_path / "f.pt")
    assert file.read_whole(file.value).tolist() == [0, 1, 2, 3]


def test_the_format_before_zip_files_is_refused_in_words(tmp_path):
    torch.save(torch.arange(4), tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="from before"):
        TorchFile(tmp_path / "f.pt")


def test_a_compressed_file_is_refused_in_words(tmp_path):
    torch.save(torch.arange(4), tmp_path / "f.pt")
    with (
        zipfile.ZipFile(tmp_path / "f.pt") as old,
        zipfile.ZipFile(tmp_path / "g.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="is compressed"):
        TorchFile(tmp_path / "g.pt")


def test_links_are_not_followed(tmp_path):
    torch.save(torch.arange(4), tmp_path / "f.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="symbolic link"):
        TorchFile(tmp_path / "link.pt")
