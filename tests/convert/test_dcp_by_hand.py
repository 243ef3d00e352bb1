"""DCP folders written by hand, with torch's own classes: any cut is read, any lie is refused."""

import datetime
import pickle
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.filesystem import _StorageInfo

from convert.sources import Command
from shardwise.convert.dcp import open_dcp
from shardwise.errors import CheckpointError, DamagedCheckpoint


def write(folder, tensor, boxes):
    """Write one tensor cut into boxes (offsets, lengths); return the table, not yet saved."""
    folder.mkdir(parents=True, exist_ok=True)
    storage, at = {}, 0
    with open(folder / "__0_0.distcp", "wb") as file:
        for offsets, lengths in boxes:
            cut = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            torch.save(cut.clone(), file)
            index = names.MetadataIndex("w", torch.Size(offsets))
            storage[index] = _StorageInfo("__0_0.distcp", at, file.tell() - at)
            at = file.tell()
    chunks = [names.ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
    properties = names.TensorProperties(tensor.dtype)
    entry = names.TensorStorageMetadata(properties, tensor.size(), chunks)
    return names.Metadata({"w": entry}, {"w": ("w",)}, storage, names.StorageMeta())


def put(folder, table):
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    return folder


def cuts(size):
    def pairs(inner):
        borders = [0, *sorted(inner), size]
        return [(a, b - a) for a, b in pairwise(borders)]

    return (
        st.sets(st.integers(1, size - 1), max_size=3).map(pairs) if size > 1 else st.just([(0, 1)])
    )


@given(st.data(), st.lists(st.integers(1, 5), max_size=3))
def test_any_grid_of_boxes_gives_every_slice(tmp_path_factory, data, shape):
    boxes = [((), ())]
    for size in shape:
        sides = data.draw(cuts(size))
        boxes = [((*o, a), (*n, b)) for o, n in boxes for a, b in sides]
    tensor = torch.arange(prod(shape)).view(shape)
    folder = tmp_path_factory.mktemp("grid")
    source = open_dcp(put(folder, write(folder, tensor, data.draw(st.permutations(boxes)))))
    lo = data.draw(st.integers(0, tensor.numel()))
    hi = data.draw(st.integers(lo, tensor.numel()))
    assert source.read(source.tensors[0], lo, hi).tolist() == list(range(lo, hi))


HALVES = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
W = torch.arange(12.0).view(4, 3)


def set_info(folder, table, **fields):
    key = names.MetadataIndex("w", torch.Size((2, 0)))
    table.storage_data[key] = _StorageInfo(**{**vars(table.storage_data[key]), **fields})


def set_chunk(table, offsets, lengths):
    chunk = names.ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
    table.state_dict_metadata["w"].chunks[1] = chunk


def link(folder, table):
    (folder / "__0_0.distcp").rename(folder / "real")
    (folder / "__0_0.distcp").symlink_to("real")


PATHS = ("../x", "/etc/passwd", "..", "a/b", "", "a\0b", "\ud800", "a" * 256)
LONG = torch.Size([1] * 99)
# What is wrong: how to make it so, the error, its message.
LIES = {
    **{
        f"path {path!r}": (
            lambda f, t, path=path: set_info(f, t, relative_path=path),
            CheckpointError,
            "no plain file name",
        )
        for path in PATHS
    },
    "a link": (link, CheckpointError, "symbolic link"),
    "compressed": (
        lambda f, t: set_info(f, t, transform_descriptors=["zstd"]),
        CheckpointError,
        "compressed",
    ),
    **{
        name: (lie, DamagedCheckpoint, says)
        for name, lie, says in (
            ("no file", lambda f, t: set_info(f, t, relative_path="gone"), "gone is missing"),
            ("past the end", lambda f, t: set_info(f, t, length=1 << 40), "cut short"),
            ("negative", lambda f, t: set_info(f, t, offset=-1), "a size was expected"),
            ("shared bytes", lambda f, t: set_info(f, t, offset=3), "shares bytes"),
            ("overlap", lambda f, t: set_chunk(t, (1, 0), (3, 3)), "in no file"),
            ("outside", lambda f, t: set_chunk(t, (2, 0), (3, 3)), "outside of it"),
            ("a gap", lambda f, t: set_chunk(t, (2, 0), (1, 3)), "only 9 of 12"),
            ("no chunks", lambda f, t: t.state_dict_metadata["w"].chunks.clear(), "only 0 of 12"),
            ("not in the table", lambda f, t: t.storage_data.clear(), "'w'.* is in no file"),
            (
                "another kind",
                lambda f, t: t.state_dict_metadata.update(w=names.BytesStorageMetadata()),
                "'w' is in no file",
            ),
            (
                "no table",
                lambda f, t: setattr(t, "state_dict_metadata", [1]),
                "not as torch.distributed.checkpoint writes it",
            ),
            (
                "a long shape",
                lambda f, t: setattr(t.state_dict_metadata["w"], "size", LONG),
                "not a whole pickle",
            ),
        )
    },
}


@pytest.mark.parametrize("name", LIES)
def test_a_table_that_lies_is_refused_when_it_is_opened(name, tmp_path):
    lie, error, says = LIES[name]
    made = write(tmp_path, W, HALVES)
    lie(tmp_path, made)
    with pytest.raises(error, match=says):
        open_dcp(put(tmp_path, made))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 3)), ((1, 0), (2, 3)), ((3, 0), (1, 3))],
        [((0, 0), (2, 2)), ((0, 2), (3, 1)), ((2, 0), (2, 2)), ((3, 2), (1, 1))],
    ],
)
def test_chunks_that_overlap_or_are_no_grid_are_refused(boxes, tmp_path):
    with pytest.raises(DamagedCheckpoint, match="overlap, or are no grid"):
        open_dcp(put(tmp_path, write(tmp_path, W, boxes)))


def test_a_chunk_of_another_shape_or_dtype_is_refused(tmp_path):
    for wrong in (W.double(), W[:, :2]):
        made = write(tmp_path, W, HALVES)
        lying = write(tmp_path, wrong, [((0, 0), (2, wrong.size(1))), ((2, 0), (2, wrong.size(1)))])
        made.storage_data = lying.storage_data
        source = open_dcp(put(tmp_path, made))
        with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp, tensor 'w'"):
            source.read(source.tensors[0], 0, 12)


@pytest.mark.parametrize("where", ["metadata", "planner_data", "tensor"])
def test_code_in_a_folder_is_refused_and_never_runs(where, tmp_path):
    marker = tmp_path / "ran"
    hostile = Command(f"touch {marker}")
    folder = tmp_path / "c"
    made = write(folder, W, HALVES)
    if where == "metadata":
        put(folder, hostile)
    elif where == "planner_data":
        made.planner_data = {"w": ("w",), "x": hostile}
        put(folder, made)
    else:
        made = write(folder, W, [((0, 0), (4, 3))])
        with open(folder / "bad", "wb") as file:
            torch.save(hostile, file)
        info = _StorageInfo("bad", 0, (folder / "bad").stat().st_size)
        made.storage_data = dict.fromkeys(made.storage_data, info)
        put(folder, made)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        source = open_dcp(folder)
        source.read(source.tensors[0], 0, 12)
        _ = source.extra
    assert not marker.exists()


def add_value(folder, made, path, value):
    key = ".".join(map(str, path))
    with open(folder / f"of {key}", "wb") as file:
        torch.save(value, file)
    info = _StorageInfo(f"of {key}", 0, (folder / f"of {key}").stat().st_size)
    made.state_dict_metadata[key] = names.BytesStorageMetadata()
    made.planner_data[key] = path
    made.storage_data[names.MetadataIndex(key)] = info


def test_what_is_made_of_other_classes_is_left_out_named_and_never_run(tmp_path):
    marker, folder = tmp_path / "ran", tmp_path / "c"
    made = write(folder, W, HALVES)
    hostile, state = Command(f"touch {marker}"), np.random.RandomState(5).get_state()
    for path, value in {
        ("evil",): hostile,
        ("train", "rng"): state,
        ("train", "big"): np.arange(4, dtype=">i4").reshape(2, 2).T,
        ("train", "when"): datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        ("train", "list", 0): 1,
        ("train", "list", 1): {"a": [hostile]},
        ("train", "words"): np.array(["a", "b"]),
        ("train", "other", 0): hostile,
    }.items():
        add_value(folder, made, path, value)
    source = open_dcp(put(folder, made))
    assert set(source.extra) == {"train"}
    train = source.extra["train"]
    assert set(train) == {"rng", "big", "list"}
    assert train["rng"][0] == "MT19937"
    assert train["rng"][1].tolist() == state[1].tolist()
    assert train["big"].tolist() == [[0, 2], [1, 3]]
    assert train["list"] == [1, {}]
    assert set(source.left_out) == {
        *("evil", "train.when", "train.list.1.'a'", "train.words", "train.other.0")
    }
    assert not marker.exists()


def test_a_dtype_that_is_not_read_is_named_as_torch_names_it(tmp_path):
    made = write(tmp_path, W, HALVES)
    made.state_dict_metadata["w"].properties.dtype = torch.complex128
    with pytest.raises(CheckpointError, match=r"'w' has dtype torch\.complex128,"):
        open_dcp(put(tmp_path, made))


OPTIONS = {"lr": 0.5, "momentum": 0.9, "dampening": 0, "nesterov": False}


@pytest.mark.parametrize(
    ("options", "expected"),
    [(OPTIONS, "SGD"), ({"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}, "")],
)
def test_the_optimizers_class_is_told_by_its_options(options, expected, tmp_path):
    made = write(tmp_path, W, HALVES)
    for name, value in {**options, "params": ["w"]}.items():
        add_value(tmp_path, made, ("optim", "param_groups", 0, name), value)
    found = open_dcp(put(tmp_path, made)).optimizer
    assert found.class_name == expected


def test_param_groups_of_the_users_own_are_no_optimizer(tmp_path):
    made = write(tmp_path, W, HALVES)
    add_value(tmp_path, made, ("mine", "param_groups", "x"), 5)
    source = open_dcp(put(tmp_path, made))
    assert source.optimizer is None
    assert source.extra == {"mine": {"param_groups": {"x": 5}}}


@pytest.mark.parametrize("step", [-(10**400), 10**400, float("nan"), 1j])
def test_an_odd_step_is_none_or_an_error_that_names_the_folder(step, tmp_path):
    made = write(tmp_path, W, HALVES)
    for name, value in {"lr": 0.5, "params": ["w"]}.items():
        add_value(tmp_path, made, ("optim", "param_groups", 0, name), value)
    add_value(tmp_path, made, ("optim", "state", "w", "step"), step)
    source = open_dcp(put(tmp_path, made))
    assert source.step is None


def test_a_group_of_5000_digits_is_an_error_that_names_the_folder(tmp_path):
    made = write(tmp_path, W, HALVES)
    add_value(tmp_path, made, ("o", "param_groups", 0, "params"), ["w"])
    digits, old = "9" * 5000, "o.param_groups.0.params"
    for table in (made.state_dict_metadata, made.planner_data):
        table[f"o.param_groups.{digits}.lr"] = table[old]
    info = made.storage_data[names.MetadataIndex(old)]
    made.storage_data[names.MetadataIndex(f"o.param_groups.{digits}.lr")] = _StorageInfo(
        info.relative_path, 0, 0
    )
    with pytest.raises(DamagedCheckpoint, match=str(tmp_path)):
        open_dcp(put(tmp_path, made))


def test_a_flipped_bit_in_a_chunk_is_found_and_named(tmp_path):
    put(tmp_path, write(tmp_path, W, HALVES))
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(6.0, 12.0).numpy().tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    source = open_dcp(tmp_path)
    assert source.read(source.tensors[0], 0, 6).tolist() == W[:2].reshape(-1).tolist()
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp, tensor 'w'.* not those that were"):
        source.read(source.tensors[0], 6, 12)


@given(st.data())
def test_any_change_of_the_table_gives_the_tensor_or_our_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    table = bytearray(pickle.dumps(write(folder, W, HALVES)))
    for _ in range(data.draw(st.integers(1, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(table)
    try:
        source = open_dcp(folder)
        for info in source.tensors:
            source.read(info, 0, info.numel)
        _ = source.extra, source.step
    except CheckpointError as error:
        assert str(folder) in str(error)
