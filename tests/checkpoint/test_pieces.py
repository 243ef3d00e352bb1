"""Tensors in pieces, over several meshes: what is saved so is read back as it was, by anybody."""

import json
import re
import warnings
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from typer.testing import CliRunner

from disk import SimulatedDisk, Watched
from hostile import sealed
from saving import bits, flip
from shardwise.checkpoint.container import CHUNK_BYTES
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.manifest import TensorRow, parse_manifest, unseal
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.state import Item
from shardwise.checkpoint.verify import check_quickly, verify
from shardwise.checkpoint.write import Written
from shardwise.cli.main import app
from shardwise.convert.export import export_huggingface
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.layout.boxes import Region, full_region
from tables import disk_with
from worlds import Unit, World, grid, regions, save_world, slices, worlds

PLACE = Path("/run/step-00000003")


def saved(world):
    disk = SimulatedDisk()
    results = save_world(disk, PLACE, [world.table_of(rank) for rank in range(world.num_ranks)])
    assert all(isinstance(result, Written) for result in results), results
    manifest, _ = check_quickly(disk, PLACE)
    return disk, Checkpoint(disk, PLACE, manifest)


def same(found, expected):
    packed = torch.empty(expected.numel(), dtype=expected.dtype).copy_(expected.reshape(-1))
    return found.dtype == expected.dtype and torch.equal(bits(found), bits(packed))


@settings(max_examples=40)
@given(worlds(), st.data())
def test_every_element_of_every_piece_is_read_back_whole_and_in_any_other_piece(world, data):
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
                for item in world.table_of(rank).uncut:
                    region = item.row.region
                    assert same(own.read(item.info, 0, region.numel, region), item.data)
    found = verify(disk, PLACE)
    assert found.ok, found.findings


# -- one world in which everything happens

TP = ((0, 1),), ((2, 3),)  # two groups of two ranks
HALVES = grid((6, 4), [[], [2]])
EXAMPLE = World(
    4,
    (
        Unit((6, 4), torch.float32, "flat", tuple(zip(HALVES, ((m,) for m in TP), strict=True))),
        Unit((5,), torch.float32, "rows", ((full_region((5,)), TP),)),
    ),
    (0, 1, 2),
)


def tables(world=EXAMPLE):
    return [world.table_of(rank) for rank in range(world.num_ranks)]


def test_a_piece_that_several_groups_hold_is_written_once_and_a_rank_reads_its_own_directly():
    _, source = saved(EXAMPLE)
    manifest = source.manifest
    rows = [row.info.key for row in manifest.tensors]
    assert rows.count("u0.a") == 2 and rows.count("u1.a") == 1
    writers = {
        row.name: {rank for rank in range(4) if manifest.boxes_of(number, rank)}
        for number, row in enumerate(manifest.tensors)
        if row.kind == "param" and row.name.startswith("u1")
    }
    assert writers == {"u1.a": {0, 1}, "u1.b": {2, 3}}, "groups take turns"
    info = next(i for i in source.tensors if i.key == "u0.a")
    with closing(source):
        source.read(info, 0, 12, HALVES[1])
        # The index of rank 0 says whether it has one of its own; rank 2 has all of the piece.
        opened = {"rank00000.json", "rank00002.json", "rank00002-0.safetensors"}
        assert source.opened == opened


def test_a_checkpoint_of_one_mesh_is_written_to_the_byte_as_before_there_were_pieces():
    digest = sha256()
    for name, data in sorted(disk_with(3, {2: "B"}).tree().items()):
        if "step-" in name:
            digest.update(name.encode() + b"\0" + (data or b""))
    known = "d087b7b7753d0fcc1d13cd223a45acf190485de9c98afaab75f44941f2dfcef0"
    assert digest.hexdigest() == known


def test_other_pieces_are_read_chunk_by_chunk_and_each_chunk_once(tmp_path):
    shape = (1400, 1300)  # pieces of several chunks, whose rows end inside chunks
    saved_as, wanted = grid(shape, [[700], [500]]), grid(shape, [[900], [300, 1000]])
    meshes = [((rank,),) for rank in range(4)]
    cells = tuple((cell, (mesh,)) for cell, mesh in zip(saved_as, meshes, strict=True))
    world = World(4, (Unit(shape, torch.float32, "flat", cells),))
    results = save_world(Files(), tmp_path / "c", tables(world))
    assert all(isinstance(result, Written) for result in results), results
    truth, files = world.truth["u0.a"], Watched()
    with closing(Checkpoint(files, tmp_path / "c")) as source:
        info = next(i for i in source.tensors if i.key == "u0.a")
        for rank in range(4):
            source.index_of(rank)
        for region in (*wanted, full_region(shape)):
            for reads in files.reads.values():
                reads.clear()
            found = source.read(info, 0, region.numel, region)
            assert same(found, truth[slices(region)])
            touched = sum(
                -(-piece.numel * 4 // CHUNK_BYTES) for piece in saved_as if piece.common(region)
            )
            # The first row, the middle and the last row of a range of several rows are one chunk.
            sizes = [hi - lo for reads in files.reads.values() for lo, hi in reads]
            assert max(sizes) <= CHUNK_BYTES and len(sizes) <= touched
        assert sum(sizes) == truth.nbytes


def test_damage_in_a_piece_is_found_by_who_reads_it_and_by_no_other(tmp_path):
    folder = tmp_path / "c"
    save_world(Files(), folder, tables())
    path = folder / "rank00002-0.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    flip(path, begin + json.loads(data[8:begin])["u0.a"]["data_offsets"][0])
    found = verify(Files(), folder)
    assert {finding.tensor for finding in found.findings} == {"u0.a"}, found.findings
    with closing(Checkpoint(Files(), folder)) as source:
        info = next(i for i in source.tensors if i.key == "u0.a")
        source.read(info, 0, 12, HALVES[0])
        for region in (HALVES[1], full_region((6, 4)), Region((0, 1), (2, 3))):
            with pytest.raises(DamagedCheckpoint, match=r"rank00002-0.*'u0\.a' is damaged"):
                source.read(info, 0, region.numel, region)


def test_other_formats_and_commands_see_whole_tensors(tmp_path):
    folder = tmp_path / "step-00000003"
    save_world(Files(), folder, tables())
    expected = EXAMPLE.expected()
    with closing(Checkpoint(Files(), folder)) as source:
        export_huggingface(source, tmp_path / "hf", files=Files())
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        assert same(tensor, expected[name])
    stock = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        dcp.load(stock, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(same(stock[key], tensor) for key, tensor in expected.items())
    for words in (("verify",), ("inspect",), ("inspect", "--all")):
        result = CliRunner().invoke(app, ["ckpt", words[0], str(folder), *words[1:]])
        assert result.exit_code == 0, result.output
    assert "4 in 6 meshes" in result.output
    text = CliRunner().invoke(app, ["ckpt", "inspect", str(folder), "--all", "--json"]).stdout
    (row,) = (r for r in json.loads(text)["tensors"] if r["name"] == "u0.a" and not r["state"])
    assert (row["shape"], row["numel"], row["num_parts"]) == ([6, 4], 24, 4)


# -- what does not fit together


def changed(rank, **fields):
    found = tables()
    found[rank] = replace(found[rank], **fields)
    return found


def optimizer_of(rank, **settings):
    row = EXAMPLE.table_of(rank).optimizer
    return row.model_copy(update={"groups": [row.groups[0] | settings]})


def without(rank, *states):
    return tuple(i for i in EXAMPLE.table_of(rank).sharded if i.info.state not in states)


def as_bf16(items):
    return tuple(
        Item(TensorRow(**{**item.row.model_dump(), "dtype": "BF16"}), item.data.bfloat16(), item.lo)
        for item in items
    )


def alike(rank, **fields):
    """Return ranks that hold the same tensors over one mesh, one of them changed."""
    mesh = (((0, 1, 2, 3),),)
    made = [
        replace(EXAMPLE.table_of(0), meshes=mesh, layouts=(), sharded=(), is_uniform=True)
        for _ in range(EXAMPLE.num_ranks)
    ]
    made[rank] = replace(made[rank], **fields)
    return made


WRONG = TensorRow(kind="buffer", name="w1", dtype="I64", shape=(2,))
UNFIT = {
    "one of a mesh was not stepped": (
        changed(3, sharded=without(3, "exp_avg")),
        r"rank 3 has other tensors to save than rank 2, with which it cuts them: 'optim.state.u0",
    ),
    "one group was not stepped": (
        [*tables()[:2], *(changed(r, sharded=without(r, "exp_avg"))[r] for r in (2, 3))],
        r"'optim.state.u0.a.exp_avg' \(6, 4\): its pieces, on ranks 0, 1, are not the whole",
    ),
    "a dtype": (
        [*tables()[:2], *(changed(r, sharded=as_bf16(without(r)))[r] for r in (2, 3))],
        r"'u0.a' is param F32 \(6, 4\), cut, on ranks 0, 1, and param BF16 .* on ranks 2, 3",
    ),
    "a name for two": (
        changed(1, own_mesh_params=("u1.b",)),
        r"'u1.b' has a mesh of its own, and on ranks 0 to 3 there are 2 of that name",
    ),
    "a stage": (changed(2, stage=2), r"rank 0 is at stage 3, rank 2 at stage 2"),
    "a setting": (
        changed(1, optimizer=optimizer_of(1, lr=0.25)),
        r"'lr' of group 0 is 0.25 on rank 1 and 0.5 on rank 0",
    ),
    "no optimizer": (changed(3, optimizer=None), r"Adam 1 groups on rank 0, none  ?on rank 3"),
    "a tie": (changed(1, tied={"u1.a": "u0.a"}), r"'u1.a' is another name of 'u0.a' on some"),
    "a shape of a buffer": (
        changed(1, uncut=(Item(WRONG, torch.zeros(2).long()),)),
        r"'w1' is buffer I64 \(5,\), whole, on ranks 0, 2, 3, and buffer I64 \(2,\), whole, on",
    ),
    "copies of what turns gave": (
        changed(1, meshes=(((0, 1), (2, 3)),), is_uniform=True, is_staged=True, sharded=()),
        r"rank 1 cut all over one mesh with replicas",
    ),
    "a setting of ranks that are alike": (
        alike(1, optimizer=optimizer_of(0, lr=0.25)),
        r"'lr' of group 0 is 0.25 on rank 1 and 0.5 on ranks 0, 2, 3",
    ),
    "a buffer of ranks that are alike": (
        alike(2, uncut=()),
        r"rank 2 has other buffers or optimizer state to save than rank 0: '",
    ),
    "a stranger in a mesh": (
        changed(2, meshes=(*EXAMPLE.table_of(2).meshes, ((7,),))),
        r"rank 2: rank 7 of a mesh is not among those that save: ranks 0 to 3",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_ranks_whose_tensors_do_not_fit_together_all_say_which_and_why(what):
    made, reason = UNFIT[what]
    disk = SimulatedDisk()
    results = save_world(disk, PLACE, made)
    assert {type(result) for result in results} == {CheckpointError}, results
    (text,) = {str(result) for result in results}
    assert re.search(reason, text), text
    assert not disk.tree().get(str(PLACE)), "nothing was written"


# -- manifests of an attacker


def rows_of(value, name="u0.a"):
    return [r for r in value["tensors"] if r["name"] == name and r["kind"] == "param"]


def set_in(*path, to):
    def change(value):
        place = rows_of(value) if path[0] == "rows" else value[path[0]]
        for step in path[1:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


def many_meshes(value):
    value["meshes"] += [{"ranks": [[n % 4]]} for n in range(20_000)]


def many_pieces(value):
    """Twenty thousand pieces of which two are one."""
    first, _ = rows_of(value)
    value["tensors"] = [
        {k: v for k, v in first.items() if k not in ("layout", "index")}
        | {"shape": [1], "at": [n], "of": [20_000]}
        for n in (*range(19_999), 5)
    ]


def no_meshes(value):
    del value["meshes"]
    for row in value["layouts"]:
        row.pop("mesh", None)


FORGED = {
    "a piece twice": (set_in("rows", 1, "at", to=[0, 0]), "pieces of 'u0.a' are not the whole"),
    "a gap": (set_in("rows", 0, "at", to=[0, 1]), "pieces of 'u0.a' are not the whole|inside"),
    "a piece that sticks out": (set_in("rows", 1, "at", to=[1, 2]), "not inside the tensor"),
    "a huge place": (set_in("rows", 1, "at", to=[1 << 49, 2]), "not inside the tensor"),
    "a negative place": (set_in("rows", 1, "at", to=[0, -2]), "at"),
    "dims": (set_in("rows", 1, "at", to=[0]), "other dims"),
    "no tensor": (set_in("rows", 1, "of", to=[]), "other dims"),
    "an enormous tensor": (set_in("rows", 1, "of", to=[1 << 40, 1 << 40]), "more than a tensor"),
    "two tensors of one name": (set_in("rows", 1, "of", to=[7, 4]), "two have one name"),
    "another dtype": (set_in("rows", 1, "dtype", to="BF16"), "two have one name"),
    "a mesh that is not there": (set_in("layouts", 0, "mesh", to=99), "mesh that is not there"),
    "a mesh with a rank twice": (set_in("meshes", 1, "ranks", to=[[0, 0]]), "no table"),
    "a mesh that is no table": (set_in("meshes", 1, "ranks", to=[[0, 1], [2]]), "no table"),
    "an empty mesh": (set_in("meshes", 1, "ranks", to=[]), "no table"),
    "a mesh of empty rows": (set_in("meshes", 1, "ranks", to=[[], []]), "no table"),
    "a far rank": (set_in("meshes", 1, "ranks", to=[[0, 1 << 23]]), "ranks are in them"),
    "a rank beyond": (set_in("meshes", 1, "ranks", to=[[0, 1 << 30]]), "meshes"),
    "other shards": (set_in("meshes", 0, "ranks", to=[[0, 1]]), "the first is not 1 x 1 ranks"),
    "the format of one mesh": (lambda v: v.update(format=1), "does not fit the meshes"),
    "no meshes": (no_meshes, "does not fit the meshes"),
    "many pieces": (many_pieces, "pieces of 'u0.a' are not the whole"),
    "fewer indexes": (lambda v: v["ranks"].pop(), "3 rows for 4 ranks"),
}


@pytest.fixture(scope="module")
def example():
    disk, _ = saved(EXAMPLE)
    return unseal(disk.tree()[f"{PLACE}/manifest.json"], "x")


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_of_pieces_is_damage_with_its_place(example, what):
    forge, reason = FORGED[what]
    value = deepcopy(example)
    forge(value)
    with pytest.raises(DamagedCheckpoint, match=reason):
        parse_manifest(sealed(json.dumps(value)), "x")


def test_many_meshes_and_pieces_are_read_in_their_numbers(example):
    value = deepcopy(example)
    many_meshes(value)
    row = {"kind": "buffer", "name": "many", "dtype": "I8", "shape": [1], "of": [10_000]}
    value["tensors"] += [row | {"at": [n]} for n in range(10_000)]
    value["ranks"][0]["file_bytes"] += 10_000
    manifest = parse_manifest(sealed(json.dumps(value)), "x")
    assert len(manifest.meshes) > 20_000 and manifest.num_ranks == 4
    assert max(map(len, manifest.rows_of.values())) == 10_000


@settings(max_examples=100)
@given(st.data())
def test_a_number_that_is_changed_anywhere_is_damage_or_changes_nothing_that_is_read(example, data):
    """Forge one number of the manifest of a checkpoint on disk, then read all that it claims."""
    disk, _ = saved(EXAMPLE)
    text = json.dumps({k: v for k, v in example.items() if k not in ("saved_at", "run")})
    spots = [m.span() for m in re.finditer(r"(?<=[\[ ])\d+(?=[,\]}])", text)]
    lo, hi = data.draw(st.sampled_from(spots))
    new = data.draw(st.sampled_from([0, 1, 2, 3, 5, 1 << 20, 1 << 49]))
    value = json.loads(text[:lo] + str(new) + text[hi:]) | {
        key: example[key] for key in ("saved_at", "run")
    }
    try:
        manifest = parse_manifest(sealed(json.dumps(value)), "x")
    except CheckpointError:
        return
    with closing(Checkpoint(disk, PLACE, manifest)) as source:
        for info in source.tensors:
            with suppress(CheckpointError):
                found = source.read(info, 0, info.numel)
                assert found.numel() == info.numel
