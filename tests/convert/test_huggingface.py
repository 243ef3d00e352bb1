"""Weights in Hugging Face folders: what is read, and what is refused."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from convert.sources import all_bits, bits, odd_tensors, whole_tensors
from shardwise.checkpoint import files as files_module
from shardwise.convert.huggingface import open_huggingface
from shardwise.errors import CheckpointError, DamagedCheckpoint

INDEX = "model.safetensors.index.json"
ONE = torch.ones(1)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_files(folder):
    """Write a sharded model; return its right weight_map."""
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, folder / FIRST)
    save_file({"c": torch.tensor(7)}, folder / SECOND)
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND}
    write_index(folder, weight_map)
    return weight_map


def test_a_file_that_the_library_wrote_is_read_to_the_bit(tmp_path):
    tensors = odd_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        source = open_huggingface(path)
        assert all_bits(whole_tensors(source)) == all_bits(tensors)
        assert {t.kind for t in source.tensors} == {"param"}
        assert (source.step, source.optimizer, source.extra, source.tied) == (None, None, {}, {})


def test_the_files_of_an_index_are_one_model(tmp_path):
    two_files(tmp_path)
    for path in (tmp_path, tmp_path / INDEX):
        found = whole_tensors(open_huggingface(path))
        assert set(found) == {"a", "b", "c"}
        assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))
        assert found["c"].item() == 7


@given(numel=st.integers(1, 40), ends=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_a_range_is_that_range_of_the_flat_tensor(tmp_path_factory, numel, ends):
    folder = tmp_path_factory.mktemp("range")
    tensor = torch.arange(numel).bfloat16()
    save_file({"before": torch.ones(3), "w": tensor}, folder / "model.safetensors")
    source = open_huggingface(folder)
    info = next(t for t in source.tensors if t.name == "w")
    lo, hi = sorted(min(end, numel) for end in ends)
    assert bits(source.read(info, lo, hi)) == bits(tensor[lo:hi])


def test_only_the_asked_bytes_are_read(tmp_path, monkeypatch):
    save_file({"w": torch.randn(1000, 100)}, tmp_path / "model.safetensors")
    source = open_huggingface(tmp_path)
    asked = []
    read_into = files_module.Reader.read_into

    def counted(self, offset, buffer):
        asked.append(buffer.nbytes)
        read_into(self, offset, buffer)

    monkeypatch.setattr(files_module.Reader, "read_into", counted)
    source.read(source.tensors[0], 150, 357)
    assert asked == [4 * 207]


def test_a_range_outside_the_tensor_is_refused(tmp_path):
    two_files(tmp_path)
    source = open_huggingface(tmp_path)
    info = next(t for t in source.tensors if t.name == "b")
    for lo, hi in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(CheckpointError, match=r"tensor 'b' has 2 elements"):
            source.read(info, lo, hi)


def test_links_of_the_hub_cache_are_followed(tmp_path):
    two_files(tmp_path / "real")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate((FIRST, SECOND, INDEX)):
        (tmp_path / "real" / name).rename(blobs / f"hash{number}")
        (snapshot / name).symlink_to(f"../../blobs/hash{number}")
    assert set(whole_tensors(open_huggingface(snapshot))) == {"a", "b", "c"}
    (blobs / "hash1").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_huggingface(snapshot)


def test_a_link_that_leads_out_is_not_followed(tmp_path):
    two_files(tmp_path / "real")
    (tmp_path / "real" / FIRST).rename(tmp_path / "elsewhere")
    (tmp_path / "real" / FIRST).symlink_to("../elsewhere")
    with pytest.raises(CheckpointError, match=rf"{FIRST} is a link to .*elsewhere"):
        open_huggingface(tmp_path / "real")
    (tmp_path / "elsewhere").rename(tmp_path / "real" / "inside")
    (tmp_path / "real" / FIRST).unlink()
    (tmp_path / "real" / FIRST).symlink_to("inside")
    assert set(whole_tensors(open_huggingface(tmp_path / "real"))) == {"a", "b", "c"}


HOSTILE = (
    *("../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", ""),
    *(".hidden.safetensors", "..\\model.safetensors", "model.bin", "a\0.safetensors"),
    *("model.safetensors\n", "C:model.safetensors", "~/x.safetensors", "\u2215.safetensors"),
    *(7, None, ["model.safetensors"], {"a": 1}),
)


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_a_hostile_name_in_an_index_is_refused_before_it_is_opened(tmp_path, name, monkeypatch):
    weight_map = two_files(tmp_path / "model")
    save_file({"c": torch.tensor(7)}, tmp_path / "model.safetensors")
    write_index(tmp_path / "model", weight_map | {"c": name})
    opened = []
    real_open = files_module.Files.open

    def watched(self, path):
        opened.append(path.name)
        return real_open(self, path)

    monkeypatch.setattr(files_module.Files, "open", watched)
    with pytest.raises(CheckpointError, match="names the file"):
        open_huggingface(tmp_path / "model")
    assert opened == [INDEX]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path, text):
    two_files(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_huggingface(tmp_path)


# How an index and its files differ: the change, given the folder and the weight_map; the message.
DIFFERENCES = {
    "a tensor that its file lacks": (
        lambda folder, index: write_index(folder, index | {"d": FIRST}),
        rf"{FIRST} lacks tensor 'd'",
    ),
    "a tensor in two files": (
        lambda folder, index: save_file({"c": ONE, "b": torch.ones(2)}, folder / SECOND),
        rf"{SECOND} holds tensor 'b', expected in .*{FIRST}",
    ),
    "a tensor that the index does not know": (
        lambda folder, index: save_file({"c": ONE, "z": torch.ones(2)}, folder / SECOND),
        r"'z', expected in no file",
    ),
    "a missing file": (lambda folder, index: (folder / SECOND).unlink(), SECOND),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_an_index_that_differs_from_its_files_is_refused(tmp_path, kind):
    change, says = DIFFERENCES[kind]
    change(tmp_path, two_files(tmp_path))
    error = DamagedCheckpoint if "lacks" in kind else CheckpointError
    with pytest.raises(error, match=says):
        open_huggingface(tmp_path)


def test_a_folder_of_two_models_or_of_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither"):
        open_huggingface(tmp_path)
    two_files(tmp_path)
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="may be two models"):
        open_huggingface(tmp_path)
    assert [t.name for t in open_huggingface(tmp_path / "model.safetensors").tensors] == ["w"]


def test_a_part_of_a_sharded_checkpoint_is_not_taken_for_whole_tensors(tmp_path):
    info = json.dumps({"w": {"saved_offsets": [0]}})
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match="sharded checkpoint"):
        open_huggingface(tmp_path)


def test_a_file_that_was_cut_short_is_named_at_once_and_while_it_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, file)
    data = file.read_bytes()
    source = open_huggingface(tmp_path)
    file.write_bytes(data[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"tensor 'b'.*model\.safetensors"):
        source.read(source.tensors[1], 0, 4)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors"):
        open_huggingface(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="tensor 'b' cannot be read"):
        source.read(source.tensors[1], 0, 4)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere"):
        open_huggingface(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for target in ("/dev/zero", "pipe", "."):
        link = tmp_path / "model.safetensors"
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match=r"should be a regular file|leads out of"):
            open_huggingface(tmp_path)
        link.unlink()


@given(where=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 10**6))
def test_a_changed_byte_or_length_is_an_error_of_ours_or_harmless(
    tmp_path_factory, where, value, cut
):
    folder = tmp_path_factory.mktemp("changed")
    file = folder / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, file, metadata={"format": "pt"})
    data = bytearray(file.read_bytes())
    data[where % len(data)] = value
    if cut % 3 == 0:
        del data[cut % len(data) :]
    file.write_bytes(data)
    try:
        source = open_huggingface(folder)
    except CheckpointError as error:
        assert str(file) in str(error)
    else:
        assert len(whole_tensors(source)) == 2
