"""Hostile checkpoints: each case makes one out of a good one, as an attacker would.

The attacker can write anything, and all digests are right again afterwards (xxh3 is a checksum, not
a signature), so a refusal is for the content. The cases here go through every way in, to see that
no code runs, no file outside is opened and no memory is taken on a claim. Here is one case of each
kind; what each single check refuses is in test_manifest, test_values, test_container, test_pieces,
test_generators and test_verify, and tests/campaigns/fuzz.py draws files by the thousand.

A case gets a `Target`: the folder of one checkpoint, alone in the folder of a run. Its outcome must
be `refused` (no load succeeds, and verify finds it), `unfit` (no load succeeds; each byte is in
order, and verify does not read values), `found` (verify finds it; a load either refuses or gives
the saved values) or `harmless` (a load either refuses or gives the saved values).
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

import shardwise
from shardwise import shard
from shardwise.checkpoint.container import chunk_digests, digest_of

STEP = 3
NAME = f"step-{STEP:08d}"
GIB = 1 << 30
TIB = 1 << 40
Expected = Literal["refused", "unfit", "found", "harmless"]


# -- the good checkpoint

INDEX, TENSORS = "rank00000.json", "rank00000-0.safetensors"


class Loader(nn.Module):
    """A module with a state of its own, under a name that the user's state has too."""

    def __init__(self):
        super().__init__()
        self.order = torch.tensor(4)

    def get_extra_state(self):
        return {"order": self.order}

    def set_extra_state(self, state):
        self.order = state["order"].clone()


class Victim(nn.Module):
    """Sizes that two ranks cannot share, a tied weight, a buffer and a state of its own."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 9)
        self.again = nn.Linear(7, 9, bias=False)
        self.again.weight = self.down.weight
        self.register_buffer("seen", torch.zeros(5))
        self.loader = Loader()

    def forward(self, x):
        self.seen += x.detach().sum(0)
        hidden = torch.tanh(self.up(x))
        return self.down(hidden) + self.again(hidden)


def extra():
    return {"loader": {"position": 7, "order": torch.arange(6), "epoch": (1, 2)}, "note": "x"}


def build(rank):
    """Return a sharded model and its optimizer after a step."""
    torch.manual_seed(0)
    model = shard(Victim(), stage=3, layout="flat")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    random = torch.Generator().manual_seed(rank)
    model(torch.randn(3, 5, generator=random)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_good(rank, world_size, folder):
    model, optimizer = build(rank)
    shardwise.save(folder, model, optimizer, step=STEP, extra=extra())


# -- the attacker's tools


def sealed(text):
    """Return a JSON object, or what stands for one, with the digest that it should have."""
    body = (text.encode() if isinstance(text, str) else text).rstrip()[:-1]
    return body + b',"digest":"' + digest_of(body).encode() + b'"}\n'


class Target:
    """One checkpoint in the hands of the attacker."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, name):
        return self.folder / name

    def text(self, name="manifest.json"):
        """Return the JSON text of a sealed file, without the digest."""
        body, _, _ = self.path(name).read_bytes().rpartition(b',"digest":"')
        return body.decode() + "}"

    def json(self, name="manifest.json"):
        return json.loads(self.text(name))

    def put_bytes(self, name, data):
        """Write a file; for an index, tell the manifest."""
        self.path(name).write_bytes(data)
        if name.startswith("rank") and name.endswith(".json"):
            manifest = self.json()
            row = manifest["ranks"][int(name[4:9])]
            row["index_bytes"], row["digest"] = len(data), digest_of(data)
            self.put(manifest)

    def put_text(self, text, name="manifest.json"):
        self.put_bytes(name, sealed(text))

    def put(self, value, name="manifest.json"):
        self.put_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False), name)

    @contextlib.contextmanager
    def edit(self, name="manifest.json"):
        """Change a sealed file's value in place."""
        value = self.json(name)
        yield value
        self.put(value, name)

    def digests_at(self, begin, num_bytes):
        """Return the digests of some bytes of the first file of rank 0."""
        data = self.path(TENSORS).read_bytes()[begin : begin + num_bytes]
        return chunk_digests(memoryview(data))

    def put_header(self, text, number=0, length=None):
        name = f"rank00000-{number}.safetensors"
        data = self.path(name).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = (len(text) if length is None else length).to_bytes(8, "little") + text
        self.path(name).write_bytes(header + data[begin:])
        moved = len(header) - begin
        with self.edit(INDEX) as index:
            index["files"][number] = {
                "num_bytes": len(data) + moved,
                "header": digest_of(header),
            }
            for row in index["boxes"]:
                row[2] += moved * (row[1] == number)
            for row in index["own"] if number == 0 else ():
                row["begin"] += moved
        with self.edit() as manifest:
            manifest["ranks"][0]["file_bytes"] += moved

    def set_size(self, name, num_bytes):
        """Make a file of rank 0 longer by a hole, and have index and manifest say so."""
        before = self.path(name).stat().st_size
        os.truncate(self.path(name), num_bytes)
        with self.edit(INDEX) as index:
            index["files"][int(name[10])]["num_bytes"] = num_bytes
        with self.edit() as manifest:
            manifest["ranks"][0]["file_bytes"] += num_bytes - before


@dataclass(frozen=True)
class Case:
    name: str
    expected: Expected
    attack: Callable[[Target], object]


CASES = []


def _add(expected, attacks):
    CASES.extend(Case(name.replace(" ", "_"), expected, attack) for name, attack in attacks.items())


def _set(value, *keys, name="manifest.json"):
    """Return an attack that puts a value at a path of a sealed file."""

    def change(part):
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value

    return _edit(change, name)


def _edit(change, name="manifest.json"):
    """Return an attack that changes a sealed file's value in place."""

    def attack(target):
        with target.edit(name) as part:
            change(part)

    return attack


# -- names of tensors

CLIMBS = "../../../etc/passwd"


def _own_parameter(target):
    with target.edit(INDEX) as index:
        begin = index["own"][0]["begin"]
        row = {"kind": "param", "name": "up.bias", "shape": [7], "dtype": "F32", "begin": begin}
        index["own"].append(row | {"digests": target.digests_at(begin, 28)})


_add(
    "refused",
    {
        "a tensor with a name that climbs": _set(CLIMBS, "tensors", 0, "name"),
        "a tie that hides another tensor": _edit(
            lambda m: m["tied"].update({"up.bias": "down.bias", "down.bias": "up.bias"})
        ),
        "two tensors of one name": _edit(lambda m: m["tensors"].append(dict(m["tensors"][0]))),
        "an own tensor in the place of a parameter": _own_parameter,
        "a lot of ties": _set({f"{n}": 0 for n in range(10**4)}, "tied"),
    },
)
_add(
    "harmless",
    {
        "a tied name that climbs": _edit(
            lambda m: m["tied"].update({"../../up.weight": "up.weight"})
        )
    },
)


# -- files of another kind


def _device(path, data):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except OSError as error:  # only the superuser makes devices, and not in each container
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        path.symlink_to("/dev/zero")


def _link_outside(path, data):
    where = path.parents[2] / f"{path.parents[1].name}-outside"
    where.write_bytes(data)
    path.symlink_to(where)


def _hole(path, data):
    path.write_bytes(data)
    os.truncate(path, 2 * GIB)


def _replace(name, put):
    def attack(target):
        data = target.path(name).read_bytes()
        target.path(name).unlink()
        put(target.path(name), data)

    return attack


PARTS = {"manifest": "manifest.json", "index": INDEX, "tensors": TENSORS}
KINDS = {
    "a pipe": ("manifest", lambda path, data: os.mkfifo(path)),
    "a link outside": ("index", _link_outside),
    "a device": ("tensors", _device),
    "a hole of two gib": ("manifest", _hole),
    "a link to itself": ("tensors", lambda path, data: path.symlink_to(path.name)),
}
_add(
    "refused",
    {
        f"a file that is {kind} {part}": _replace(PARTS[part], put)
        for kind, (part, put) in KINDS.items()
    },
)


def _names_like_ours(target):
    data = target.path("manifest.json").read_bytes()
    for name in ("MANIFEST.JSON", "manifest.json\n", "rank0000\u0660-0.safetensors"):
        target.path(name).write_bytes(data)


def _step_without_utf8(target):
    os.rename(target.folder, os.fsencode(target.folder) + b"\xff")
    os.symlink("step\udcff", target.folder)


def _large_index(target):
    os.truncate(target.path(INDEX), 2 * GIB)
    _set(2 * GIB, "ranks", 0, "index_bytes")(target)


_add(
    "refused",
    {
        "a step with a line end": lambda target: os.rename(
            target.folder, target.folder.with_name(f"{NAME}\n")
        ),
        "a folder whose name is no utf8": _step_without_utf8,
        "an index of two gib that the manifest claims": _large_index,
    },
)
_add("found", {"a file of a tib that all claim": lambda target: target.set_size(TENSORS, TIB)})
_add("harmless", {"names that look like ours": _names_like_ours})


# -- numbers and rows of the manifest

HUGE = {"kind": "optimizer", "name": "up.bias", "state": "huge", "dtype": "F32"}
_add(
    "refused",
    {
        "a format of the future": _set(3, "format"),
        "2 to 23 ranks": _set(1 << 23, "num_shards"),
        "a thousand ranks row by row": _edit(
            lambda m: m.update(num_shards=10**3, ranks=m["ranks"][:1] * 10**3)
        ),
        "files of a pib": _set((1 << 50) - 1, "ranks", 0, "file_bytes"),
        "a shape that explodes": _set([1 << 49] * 32, "tensors", 0, "shape"),
        "a shape with a zero that hides it": _set([1 << 49] * 31 + [0], "tensors", 0, "shape"),
        "a dtype that is code": _set("os.system", "tensors", 0, "dtype"),
        "a dtype of a megabyte": _set("F" * (1 << 20), "tensors", 0, "dtype"),
        "another dtype of the same width": _set("I32", "tensors", 0, "dtype"),
        "huge layouts": _set([[1 << 49] * 32] * 9, "layouts", 0, "shapes"),
        "state of a tib that no file holds": _edit(
            lambda m: m["tensors"].append(HUGE | {"shape": [1 << 38]})
        ),
        "state of no elements and huge dims": _edit(
            lambda m: m["tensors"].append(HUGE | {"shape": [1 << 49, 1 << 49, 0]})
        ),
    },
)


# -- JSON

PICKLE = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n(S'true'\ntR."
_add(
    "refused",
    {
        "json with lists that never end": lambda t: t.put_text(
            t.text().replace('"step":3', '"step":' + "[" * 10**5, 1)
        ),
        "a manifest that is a pickle": lambda t: t.put_bytes("manifest.json", PICKLE),
        "a manifest of 100 mb of blanks": lambda t: t.put_bytes(
            "manifest.json", b" " * 100_000_000
        ),
        "a sealed manifest full of nul": lambda t: t.put_text(b"{" + bytes(10**6) + b"}"),
        "a sealed manifest that is a list": lambda t: t.put_text(b'[1,{"a":1}'),
    },
)


# -- indexes


def _move_a_box(target):
    """Begin a box one byte too early, with the digests of the bytes there."""
    with target.edit(INDEX) as index:
        row, after = [row for row in index["boxes"] if row[1] == 0][:2]
        num_bytes = after[2] - row[2]
        row[2] -= 1
        row[3] = target.digests_at(row[2], num_bytes)


_add(
    "refused",
    {
        "a box one byte too early": _move_a_box,
        "a box that begins far behind": _set((1 << 50) - 1, "boxes", 0, 2, name=INDEX),
        "a box of another rank": lambda target: _edit(
            lambda index: index["boxes"].append(target.json("rank00001.json")["boxes"][-1]), INDEX
        )(target),
        "a lot of digests": _set("0" * (22 << 15), "boxes", 0, 3, name=INDEX),
        "an own tensor of half a tib": _set([1 << 37], "own", 0, "shape", name=INDEX),
        "an index that says nothing": lambda target: target.put({}, INDEX),
    },
)


# -- headers of files: our loads follow the index, so only verify reads them


def _headers_length(target):
    data = target.path(TENSORS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    target.put_header(data[8:end], length=1 << 63)


DIMS = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
_add(
    "found",
    {
        "a header of 2 to 63 bytes": _headers_length,
        "a header of dims without end": lambda target: target.put_header(
            DIMS % b",".join([b"%d" % ((1 << 62) - 1)] * 30_000)
        ),
    },
)


# -- values: the state of the user and of the optimizer beside tensors

COLLIDING = [{"$": "int", "of": hex(n * ((1 << 61) - 1))} for n in range(1, 5_000)]
ARRAY = {"$": "numpy.array", "dtype": "<f4", "shape": [(1 << 62) - 1] * 10_000, "of": ""}
FACTORY = {"$": "defaultdict", "keys": [], "values": [], "factory": "eval"}
VALUES = {
    "a tensor from outside": {"$": "tensor", "of": CLIMBS},
    "a tag that is code": {"$": "os.system", "of": ["true"]},
    "a factory that is code": FACTORY,
    "an array that explodes": ARRAY,
    "keys that all collide": {"$": "dict", "keys": COLLIDING, "values": [0] * len(COLLIDING)},
    "depth beyond ours": json.loads('{"$":"tuple","of":[' * 31 + "]}" * 31),
}
_add(
    "unfit",
    {
        f"a value with {what}": _set(value, "values", "extra", "note", name=INDEX)
        for what, value in VALUES.items()
    },
)
GROUP = ("optimizer", "groups", 0)
_add(
    "unfit",
    {
        "a group with a tag that is code": _set(VALUES["a tag that is code"], *GROUP, "lr"),
        "params outside": _set([CLIMBS], *GROUP, "params"),
        "state that is a number": _set({"up.bias": 5}, "optimizer", "state"),
        "an optimizer that is code": _set("os.system", "optimizer", "class_name"),
        "one tensor in ten thousand places": _edit(
            lambda i: i["values"]["extra"].update(
                note=[i["values"]["extra"]["loader"]["order"]] * 10_000
            ),
            INDEX,
        ),
        "extra that is a text": _set("loader", "values", "extra", name=INDEX),
        # As many bytes as torch's has.
        "a generator of zeros": _set(
            "A" * 6742 + "==", "values", "generators", "torch", name=INDEX
        ),
    },
)
