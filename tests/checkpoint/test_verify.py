"""Offline verification: no byte of a checkpoint can change unseen, and all damage is listed."""

import errno
import json
import re
from contextlib import closing
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disk import Fault, FaultyFiles, Watched
from hostile import sealed
from shardwise.checkpoint.container import digest_of
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.generators import check_generators
from shardwise.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorRow,
    file_name,
    index_name,
    parse_manifest,
    unseal,
)
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.verify import check_quickly, verify
from shardwise.checkpoint.write import Part, write_checkpoint
from shardwise.comm.control import SoloControl
from shardwise.errors import CheckpointError
from shardwise.strict_json import dumps
from tables import disk_with

FILES = Files()


@cache
def files_of(ranks, step=2):
    """Return the files of one checkpoint by name, as the code under test wrote them."""
    tree = disk_with(ranks, {step: chr(ord("A") + step - 1)}).tree()
    prefix = f"/run/step-{step:08d}/"
    return {name.removeprefix(prefix): data for name, data in tree.items() if data is not None}


def folder_of(files, folder):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(params=[1, 3])
def folder(request, tmp_path):
    return folder_of(
        {n: d for n, d in files_of(request.param).items() if "lock" not in n}, tmp_path
    )


def tensor_at(data, offset):
    """Return the key of the tensor that has this byte of a safetensors file; None in the header."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    places = {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"}
    return next((k for k, (lo, hi) in places.items() if begin + lo <= offset < begin + hi), None)


def write_large(folder):
    """Write three tensors, of 1, 9.5 and 0.1 MiB."""
    shapes = [(1 << 18,), (19, 1 << 17), (26214,)]
    rng = np.random.default_rng(0)
    data = [rng.bytes(4 * int(np.prod(shape))) for shape in shapes]
    rows = [
        TensorRow(kind="param", name=f"t{n}", dtype="F32", shape=s) for n, s in enumerate(shapes)
    ]
    fields = dict.fromkeys(("shardwise", "torch", "run", "saved_at"), "x")
    fields |= {"layouts": (), "tied": {}, "optimizer": None, "ranks": ()}
    manifest = Manifest(
        format=1, step=3, stage=0, num_shards=1, num_replicas=1, tensors=tuple(rows), **fields
    )
    part = Part(0, lambda n, box: memoryview(data[n])[4 * box.lo : 4 * box.hi], (), {})
    write_checkpoint(FILES, SoloControl(), folder / "large", bytes(4), manifest, part)
    return folder / "large"


def files_found(verified):
    return {finding.file for finding in verified.findings}


# -- what is whole --------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_no_findings_and_every_byte_is_read(folder):
    told = []
    verified = verify(FILES, folder, told.append)
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert (verified.findings, verified.notes, verified.ok) == ((), (), True)
    assert (verified.num_bytes, verified.num_files) == (sum(sizes), len(sizes))
    assert sum(told) == sum(sizes)
    assert verified.step == 2


def test_each_file_of_tensors_is_read_once_from_start_to_end(tmp_path):
    watched, folder = Watched(), write_large(tmp_path)
    assert verify(watched, folder).ok
    reads = watched.reads[file_name(0, 0)]
    assert [end for _, end in reads[:-1]] == [begin for begin, _ in reads[1:]]
    assert (reads[0][0], reads[-1][1]) == (0, (folder / file_name(0, 0)).stat().st_size)
    assert max(end - begin for begin, end in reads) <= 4 << 20


def test_foreign_files_are_noted_and_are_no_damage(folder):
    (folder / "README.md").write_text("mine")
    (folder / "notes").mkdir()
    verified = verify(FILES, folder)
    assert verified.ok
    assert len(verified.notes) == 2
    assert "README.md" in verified.notes[0] and "notes" in verified.notes[1]


# -- damage ---------------------------------------------------------------------------------------


@given(data=st.data(), ranks=st.sampled_from([1, 3]))
def test_any_flipped_bit_is_found_with_its_file_and_tensor(tmp_path_factory, data, ranks):
    files = files_of(ranks)
    name = data.draw(st.sampled_from(sorted(files)))
    at = data.draw(st.integers(0, 8 * len(files[name]) - 1))
    damaged = bytearray(files[name])
    damaged[at // 8] ^= 1 << at % 8
    folder = folder_of({**files, name: bytes(damaged)}, tmp_path_factory.mktemp("flip"))
    first, *others = verify(FILES, folder).findings
    assert first.file == name
    if name.endswith(".safetensors"):
        assert others == []
        key = tensor_at(files[name], at // 8) or ""
        assert first.tensor == re.sub(r"^rank\d{5}\.", "", key)


@pytest.mark.parametrize("change", ["cut", "grown", "gone", "link", "folder"])
def test_a_file_that_is_no_longer_itself_is_named(folder, change):
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if change in ("cut", "grown"):
            path.write_bytes(data[:-1] if change == "cut" else data + b"\0")
        else:
            path.unlink()
        if change == "link":
            other = folder.parent / f"{path.name}.elsewhere"
            other.write_bytes(data)
            path.symlink_to(other)
        if change == "folder":
            path.mkdir()
        assert path.name in files_found(verify(FILES, folder)), path.name
        if change == "folder":
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert verify(FILES, folder).ok


def test_the_files_of_two_ranks_that_changed_places_are_named(tmp_path):
    files = files_of(3)
    for kind in (lambda rank: file_name(rank, 0), index_name):
        one, other = kind(0), kind(1)
        swapped = {**files, one: files[other], other: files[one]}
        assert {one, other} <= files_found(verify(FILES, folder_of(swapped, tmp_path)))


def test_a_file_of_another_step_of_the_same_size_is_named(tmp_path):
    files, older = files_of(3), files_of(3, step=1)
    for name in files:
        if name == MANIFEST:
            continue  # that is another whole: its indexes are not those here
        mixed = {**files, name: older[name]}
        assert name in files_found(verify(FILES, folder_of(mixed, tmp_path))), name
    mixed = {**files, MANIFEST: older[MANIFEST]}
    found = files_found(verify(FILES, folder_of(mixed, tmp_path)))
    assert {index_name(rank) for rank in range(3)} <= found


def test_a_file_too_many_that_could_be_taken_for_ours_is_damage(folder):
    (folder / file_name(7, 0)).write_bytes((folder / file_name(0, 0)).read_bytes())
    (finding,) = verify(FILES, folder).findings
    assert finding.file == file_name(7, 0)
    assert "does not name" in str(finding)


def test_all_damage_is_listed_and_not_only_the_first(tmp_path):
    files = dict(files_of(3))
    names = [file_name(0, 0), file_name(1, 0), index_name(2)]
    for name in names:
        files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    found = verify(FILES, folder_of(files, tmp_path)).findings
    assert {f.file for f in found} == {
        *names,
        ", ".join(n for n in files if n.startswith("rank00002-")),
    }
    assert "not checked" in str(found[-1])


def test_a_large_tensor_says_which_chunks_and_where(tmp_path):
    folder = write_large(tmp_path)
    path = folder / file_name(0, 0)
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little") + (1 << 20)  # of the second tensor
    for chunk in (2, 3, 9):
        data[begin + (chunk << 20) + 5] ^= 4
    path.write_bytes(data)
    (finding,) = verify(FILES, folder).findings
    assert (finding.file, finding.tensor) == (path.name, "t1")
    assert f"3 of its 10 chunks damaged, from byte {begin + (2 << 20)}" in finding.text

    path.write_bytes(data[: begin + (5 << 20) + 1])
    verified = verify(FILES, folder)
    size, second, third = verified.findings
    assert "bytes, expected" in size.text
    assert (second.tensor, third.tensor) == ("t1", "t2")
    assert "7 of its 10 chunks cannot be read (the file ends before it)" in second.text


def test_a_read_that_fails_names_the_tensor_and_the_rest_is_read(tmp_path):
    folder = write_large(tmp_path)
    # Reads: the manifest, the index, the header; then the chunks one by one.
    files = FaultyFiles(FILES, Fault(5, errno.EIO, "read"))
    (finding,) = verify(files, folder).findings
    assert finding.tensor == "t1"
    assert "1 of its 10 chunks cannot be read" in finding.text
    assert f"errno {errno.EIO}" in finding.text


def test_a_damaged_manifest_is_the_one_finding(folder):
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"stage":3', b'"stage":2'))
    (finding,) = verify(FILES, folder).findings
    assert finding.file == MANIFEST
    assert "digest" in finding.text


def test_what_cannot_be_judged_is_an_error_and_no_damage(folder):
    with pytest.raises(CheckpointError, match="cannot be listed"):
        verify(FILES, folder / "nowhere")
    path = folder / MANIFEST
    value = unseal(path.read_bytes(), "") | {"format": 3}
    path.write_bytes(sealed(dumps(value)))
    with pytest.raises(CheckpointError, match="format 3"):
        verify(FILES, folder)


# -- lies with the right seal ---------------------------------------------------------------------


def forge(folder, edit_index=lambda value: None, edit_manifest=lambda value: None):
    """Change the index of rank 0 and the manifest, and seal both anew."""
    index = unseal((folder / index_name(0)).read_bytes(), "")
    edit_index(index)
    data = sealed(dumps(index))
    (folder / index_name(0)).write_bytes(data)
    manifest = unseal((folder / MANIFEST).read_bytes(), "")
    manifest["ranks"][0] |= {"index_bytes": len(data), "digest": digest_of(data)}
    edit_manifest(manifest)
    (folder / MANIFEST).write_bytes(sealed(dumps(manifest)))


def rewrite_header(folder, edit):
    """Change the header of a file, and its digest in the index; nothing moves."""
    path = folder / file_name(0, 0)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    text = dumps(header)
    assert len(text) <= end - 8
    changed = data[:8] + text.ljust(end - 8)
    path.write_bytes(changed + data[end:])
    forge(folder, lambda index: index["files"][0].update(header=digest_of(changed)))


def test_a_forged_checkpoint_without_a_lie_passes(folder):
    forge(folder)
    rewrite_header(folder, lambda header: None)
    assert verify(FILES, folder).ok


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda index: index.update(run="other"), "run other"),
        (lambda index: index.update(step=1), "step 1"),
        (lambda index: index.update(rank=1), "rank 1"),
        (lambda index: index["boxes"].pop(), "not those that the manifest gives"),
        (lambda index: index["boxes"].append(index["boxes"][0]), "not those that the manifest"),
        (lambda index: index["boxes"][0].__setitem__(0, 99), "not those that the manifest"),
        (lambda index: index["boxes"][0].__setitem__(2, 0), "not described right"),
        (lambda index: index["boxes"][0].__setitem__(3, ""), "not described right"),
        (lambda index: index["boxes"][0].pop(), "Field required"),
        (lambda index: index["own"].pop(), "does not end with its last tensor"),
        (lambda index: index["own"].append(index["own"][0]), "occurs twice"),
        (lambda index: index["own"][0].update(kind="param"), "cannot have its own"),
        (lambda index: index["files"].pop(), "names"),
        (lambda index: index["files"][0].update(num_bytes=9), "it names"),
    ],
)
def test_an_index_that_lies_under_a_right_seal_is_found(folder, edit, part):
    forge(folder, edit)
    verified = verify(FILES, folder)
    assert part in " | ".join(map(str, verified.findings))


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: values.update(extra=[]),
        lambda values: values.update(modules={"a": {"$": "no such tag"}}),
        lambda values: values.update(modules={"a": {"$": "tensor", "of": "elsewhere"}}),
        lambda values: values["extra"].clear(),
        lambda values: values.update(generators={"cpu": "AAAA"}),
    ],
)
def test_values_that_a_load_refuses_are_found(folder, edit):
    forge(folder, lambda index: edit(index["values"]))
    (finding,) = verify(FILES, folder).findings
    assert finding.file == index_name(0)
    with pytest.raises(CheckpointError), closing(checkpoint_of(folder)) as checkpoint:
        check_generators(checkpoint.values_of(0)["generators"], torch.device("cpu"))


def checkpoint_of(folder):
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), "")
    return Checkpoint(FILES, folder, manifest)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda header: header["r0"].update(dtype="F32"), "its header says"),
        (lambda header: header["r0"].update(shape=header["r0"]["shape"][::-1]), "its header says"),
        (lambda header: header["r0"].update(dtype="X"), "not described right"),
        (lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="[]"), "no map"),
        (lambda header: header.update(x=header.pop("r0")), "its header says None"),
        (lambda header: header.pop("r0"), "begins at byte"),
    ],
)
def test_a_header_that_tells_others_something_else_is_found(folder, edit, part):
    rewrite_header(folder, edit)
    verified = verify(FILES, folder)
    assert part in " | ".join(map(str, verified.findings))


def test_a_manifest_without_ranks_is_found_although_its_files_are_there(folder):
    forge(folder, edit_manifest=lambda manifest: manifest.update(ranks=[]))
    assert not verify(FILES, folder).ok


@given(data=st.data())
def test_no_sealed_nonsense_ends_in_another_error(tmp_path_factory, data):
    """Whoever seals a checkpoint can write what they like; it is damage or an error, no crash."""
    folder = folder_of(files_of(1), tmp_path_factory.mktemp("lie"))
    junk = st.sampled_from([None, -1, 0, 1, 2**49, 2**63, 1.5, "", "x", [], {}, [0] * 40, True])

    def spoil(value):
        for _ in range(20):
            if not isinstance(value, dict | list) or not value:
                return
            keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(value[key], dict | list) or data.draw(st.booleans()):
                value[key] = data.draw(junk)
                return
            value = value[key]

    nothing = lambda value: None  # noqa: E731
    in_index = data.draw(st.booleans())
    forge(folder, spoil if in_index else nothing, nothing if in_index else spoil)
    try:
        verified = verify(FILES, folder)
    except CheckpointError:
        return
    if verified.ok:
        check_quickly(FILES, folder)
