"""Whatever is damaged in a checkpoint is found and named, and no wrong element is ever used.

`make soak CAMPAIGN=damage` draws damages by the hundred; here are a few of every kind.
"""

import json
import os
import random
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from ranks import on_ranks, run_ranks
from saving import flip, same_on_all_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name
from shardwise.checkpoint.verify import verify
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, StateError
from stamped import build, count, save_each, stamp

NUM_FLIPS = 24  # for each layout
OTHER_WAYS = ("page", "cut", "extension", "removal", "step", "run", "rank", "duplicate", "kind")
PAGE = 4096
OLDER, DAMAGED = step_name(1), step_name(2)


@dataclass(frozen=True)
class Damage:
    """What is done to a checkpoint: which file, how, and the tensor that stands there, if any."""

    file: str
    how: str
    tensor: str = ""
    harmless: bool = False  # to a load: bytes that only other readers use

    def __str__(self):
        return f"{self.how} of {self.file} {self.tensor}".strip()


def regions(path):
    """Return (begin, end, tensor) of a file's tensors, read as any safetensors reader does."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    found = [(8 + size + t["data_offsets"][0], 8 + size + t["data_offsets"][1], key)
             for key, t in header.items()]  # fmt: skip
    return sorted(found)


def tensor_at(path, at):
    """Return the tensor at a byte of a file, and whether the byte is of the header."""
    if path.suffix != ".safetensors":
        return "", False
    inside = [key for begin, end, key in regions(path) if begin <= at < end]
    return (inside[0], False) if inside else ("", True)


def flip_one_bit(folder, rng):
    """Flip a bit in a file drawn evenly, so that small files are met as often as large ones."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    tensor, in_header = tensor_at(path, at)
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return Damage(path.name, f"bit of byte {at}", tensor, in_header)


def zero_a_page(folder, rng):
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data)) // PAGE * PAGE
    page = bytes(data[at : at + PAGE])
    touched = [key for begin, end, key in regions(path)
               if any(data[max(begin, at) : min(end, at + PAGE)])]  # fmt: skip
    data[at : at + PAGE] = bytes(len(page))
    path.write_bytes(data)
    return Damage(path.name, f"page at {at}", harmless=not touched)


def cut_short(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    size = rng.choice((0, path.stat().st_size - 1, rng.randrange(path.stat().st_size)))
    path.write_bytes(path.read_bytes()[:size])
    return Damage(path.name, f"cut to {size} bytes")


def make_longer(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 8, PAGE))))
    return Damage(path.name, "extension")


def remove(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    return Damage(path.name, "removal")


def take_from(others, what, same_size=True):
    """Put in a file of the same name, and of the same size, of another checkpoint."""

    def swap(folder, rng):
        names = [p.name for p in sorted(folder.iterdir())
                 if (others / p.name).read_bytes() != p.read_bytes()
                 and (others / p.name).stat().st_size == p.stat().st_size]  # fmt: skip
        name = rng.choice(names)
        shutil.copy(others / name, folder / name)
        return Damage(name, f"file of another {what}")

    return swap


def take_of_another_rank(folder, rng):
    """Put in the file of another rank, cut or filled up to the size that is expected."""
    kind = rng.choice(("-0.safetensors", ".json"))
    into, source = rng.sample([f"rank{rank:05d}{kind}" for rank in range(2)], 2)
    size = (folder / into).stat().st_size
    (folder / into).write_bytes((folder / source).read_bytes().ljust(size, b" ")[:size])
    return Damage(into, f"file of {source}")


def duplicate(folder, rng):
    shutil.copy(folder / "rank00000-0.safetensors", folder / "rank00007-0.safetensors")
    return Damage("rank00007-0.safetensors", "duplicate")


def become_another_kind(folder, rng):
    """A link, even to the right bytes, may lead anywhere; a folder or a pipe is no file."""
    path = rng.choice(sorted(folder.iterdir()))
    aside = folder.parent / "aside"
    shutil.copy(path, aside)
    path.unlink()
    change = (lambda: path.symlink_to(aside), path.mkdir, lambda: os.mkfifo(path))
    rng.choice(change)()
    return Damage(path.name, "change of kind")


@contextmanager
def damaged(folder, rank, how, seed):
    """Let rank 0 damage a copy and make it whole again afterwards; the others wait for it."""
    said = [None]
    if rank == 0:
        before = {path: path.read_bytes() for path in folder.iterdir()}
        said = [how(folder, random.Random(seed))]
    dist.broadcast_object_list(said)
    yield said
    dist.barrier()
    if rank == 0:
        for path in folder.iterdir():
            if path.is_symlink() or path.is_fifo() or path not in before:
                path.unlink()
            elif path.is_dir():
                path.rmdir()
        for path, data in before.items():
            path.write_bytes(data)
    dist.barrier()


def load_caught(*args, **kwargs):
    """Return (Loaded or None, kind and text of the error, warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return shardwise.load(*args, **kwargs), "", [str(w.message) for w in caught]
        except CheckpointError as error:
            return None, f"{type(error).__name__}: {error}", [str(w.message) for w in caught]


class Patient:
    """On every rank: two checkpoints of a run, of which the newer is damaged again and again."""

    def __init__(self, rank, folder, layout):
        self.rank = rank
        self.run = folder / "run"
        self.model, self.optimizer = build(3, layout)
        for run, save, step in (("run", "A", 1), ("run", "B", 2), ("other", "C", 2)):
            stamp(self.model, self.optimizer, save)
            extra = {"save": save, "rank": rank}
            shardwise.save(folder / run, self.model, self.optimizer, step=step, extra=extra)
        self.ways = {
            "bit": flip_one_bit,
            "page": zero_a_page,
            "cut": cut_short,
            "extension": make_longer,
            "removal": remove,
            "step": take_from(self.run / OLDER, "step"),
            "run": take_from(folder / "other" / DAMAGED, "run"),
            "rank": take_of_another_rank,
            "duplicate": duplicate,
            "kind": become_another_kind,
        }

    def meet(self, way, seed):
        """Damage the newer one, load it, load the newest; say what came of it."""
        model, optimizer = self.model, self.optimizer
        path = self.run / DAMAGED
        with damaged(path, self.rank, self.ways[way], seed) as said:
            row = {"damage": said[0], "seed": seed}
            findings = verify(Files(), path).findings if self.rank == 0 else ()
            row["verify"] = [str(finding) for finding in findings]
            stamp(model, optimizer, "Z")
            loaded, row["asked"], _ = load_caught(self.run, model, optimizer, step=2)
            row["asked_loaded"], row["asked_found"] = loaded is not None, count(model, optimizer)
            row["refuses"] = refuses_to_run(model)
            loaded, row["newest"], row["warnings"] = load_caught(self.run, model, optimizer)
            row["found"], row["usable"] = count(model, optimizer), not refuses_to_run(model)
            row["step"], row["skipped"] = (loaded.step, loaded.skipped) if loaded else (None, ())
            row["extra"] = dict(loaded.extra) if loaded else {}
        return row


def try_damages(rank, world_size, folder, layout, plan):
    patient = Patient(rank, Path(folder), layout)
    return [patient.meet(way, seed) for way, seed in plan]


def refuses_to_run(model):
    if engine_of(model).status.unusable is None:
        with torch.no_grad():
            model(torch.zeros(1, 13))
        return False
    with pytest.raises(StateError, match="did not come to its end"):
        model(torch.zeros(1, 13))
    return True


def assert_found(rank, row):
    """The damage was found: named to all, nothing of it used, and the older one taken instead."""
    damage, why = row["damage"], f"{row['damage']} (seed {row['seed']}): {row}"
    # Asked for by its step, it is refused; no other is taken.
    assert row["asked"].startswith("DamagedCheckpoint: ") and not row["asked_loaded"], why
    assert damage.file in row["asked"] or "another" in damage.how, why
    assert damage.tensor in row["asked"] or damage.tensor.startswith("rank"), why
    untouched = set(row["asked_found"]) == {"Z"}
    assert untouched or row["refuses"], why
    # The newest that can be used is the older one, and it says so.
    assert (row["step"], set(row["found"]), row["usable"]) == (1, {"A"}, True), why
    assert row["extra"] == {"save": "A", "rank": rank}, why
    assert len(row["skipped"]) == 1 and row["skipped"][0] in row["asked"], why
    if rank == 0:
        assert len(row["warnings"]) == 1 and DAMAGED in row["warnings"][0], why


def assert_harmless(rank, row):
    """Nothing that a load uses was touched: it loads, every element right."""
    assert (row["asked"], row["newest"], row["skipped"]) == ("", "", ()), row
    assert (row["step"], set(row["found"]), row["usable"]) == (2, {"B"}, True), row
    assert row["extra"] == {"save": "B", "rank": rank}


def check_all(of_ranks):
    """Check every trial on every rank; return the rows of rank 0."""
    for rows in zip(*of_ranks, strict=True):
        for rank, row in enumerate(rows):
            (assert_harmless if row["damage"].harmless else assert_found)(rank, row)
        for key in ("asked", "newest", "skipped", "refuses", "step"):
            assert len({str(row[key]) for row in rows}) == 1, (key, rows)
        damage, findings = rows[0]["damage"], rows[0]["verify"]
        # Which of two files that do not belong together is the strange one, nobody can say.
        assert any(damage.file in text or "another" in damage.how for text in findings), rows[0]
    return of_ranks[0]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_whatever_is_damaged_is_found_and_named_and_the_older_checkpoint_is_taken(tmp_path, layout):
    plan = [("bit", seed) for seed in range(NUM_FLIPS)]
    plan += [(way, seed) for way in OTHER_WAYS for seed in range(5 if way == "kind" else 2)]
    rows = check_all(run_ranks(try_damages, 2, str(tmp_path), layout, plan))
    flips, others = rows[:NUM_FLIPS], rows[NUM_FLIPS:]
    named = {row["damage"].file for row in flips}
    assert {"manifest.json", "rank00000.json", "rank00001-0.safetensors"} <= named
    in_tensors = [row for row in flips if row["damage"].tensor]
    assert {bool(row["refuses"]) for row in in_tensors} == {True}
    of_one_rank = [row for row in in_tensors if "rank00001" in row["damage"].file]
    assert any(": rank 1: " in row["asked"] for row in of_one_rank)
    assert any("other rank" not in row["asked"] for row in of_one_rank)  # the others had no error
    assert not all(row["refuses"] for row in others)  # what shows at once changes nothing


@on_ranks(3)
def test_when_all_are_damaged_all_ranks_say_so_for_each_and_nothing_can_be_saved(rank, tmp_path):
    model, optimizer = build()
    save_each(tmp_path, model, optimizer)
    if rank == 0:
        for step in (1, 2):
            flip(tmp_path / step_name(step) / "rank00002-0.safetensors")
    dist.barrier()
    _, text, warned = load_caught(tmp_path, model, optimizer)
    assert same_on_all_ranks(text) and not warned  # the error names both
    assert text.startswith("CheckpointError: ") and "no checkpoint can be used" in text
    for step in (1, 2):
        assert f"{step_name(step)}/rank00002-0.safetensors: tensor" in text
    assert refuses_to_run(model)
    with pytest.raises(StateError):  # it would be saved as if it were whole
        shardwise.save(tmp_path / "new", model, optimizer)
    assert not (tmp_path / "new").exists()


def save_once(rank, world_size, folder):
    save_each(folder, *build(3, "flat"), "A")


def load_once(rank, world_size, folder):
    model, optimizer = build(3, "rows", save="Z")
    loaded, text, _ = load_caught(folder, model, optimizer, step=1)
    assert loaded is None or set(count(model, optimizer)) == {"A"}
    return text


def test_damage_that_a_smaller_world_meets_is_found_by_whoever_reads_it(tmp_path):
    """Saved on three ranks, loaded on one: every file is read by that one."""
    run_ranks(save_once, 3, str(tmp_path))
    for path in sorted((tmp_path / step_name(1)).glob("*.safetensors")):
        flip(path)
        (text,) = run_ranks(load_once, 1, str(tmp_path))
        assert text.startswith("DamagedCheckpoint: ") and path.name in text
        flip(path)
    assert run_ranks(load_once, 1, str(tmp_path)) == [""]
