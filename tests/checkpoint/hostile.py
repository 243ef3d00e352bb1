"""Hostile checkpoints: each case makes one out of a good one, as an attacker would.

The attacker can write anything, and all digests are right again afterwards (xxh3 is a checksum, not
a signature), so a refusal is for the content. The cases here go through every way in, to see that
no code runs, no file outside is opened and no memory is taken on a claim. Here is one case of each
kind; what each single check refuses is in test_manifest, test_values, test_container, test_pieces,
test_generators and test_verify.

A case gets a `Target`: the folder of one checkpoint, alone in the folder of a run. Its outcome must
be `refused` (no load succeeds, and verify finds it), `unfit` (no load succeeds; each byte is in
order, and verify does not read values), `found` (verify finds it; a load either refuses or gives
the saved values) or `harmless` (a load either refuses or gives the saved values).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import shardwise
from inner import chunk_digests, digest_of
from shardwise import shard

STEP = 3
NAME = f"step-{STEP:08d}"
GIB = 1 << 30
TIB = 1 << 40
Expected = Literal["refused", "unfit", "found", "harmless"]


# -- the good checkpoint

INDEX, TENSORS = "rank00000.json", "rank00000-0.safetensors"


class Loader(nn.Module):
    """A module with a state of its own, under a name that the user's state has too."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.tensor(4)

    def get_extra_state(self) -> Any:
        return {"order": self.order}

    def set_extra_state(self, state: Any) -> None:
        self.order = state["order"].clone()


class Victim(nn.Module):
    """Sizes that two ranks cannot share, a tied weight, a buffer and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 9)
        self.again = nn.Linear(7, 9, bias=False)
        self.again.weight = self.down.weight
        self.register_buffer("seen", torch.zeros(5))
        self.loader = Loader()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum(0)
        hidden = torch.tanh(self.up(x))
        return self.down(hidden) + self.again(hidden)


def extra() -> dict[str, Any]:
    return {"loader": {"position": 7, "order": torch.arange(6), "epoch": (1, 2)}, "note": "x"}


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer after a step."""
    torch.manual_seed(0)
    model = shard(Victim(), stage=3, layout="flat")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    random = torch.Generator().manual_seed(rank)
    model(torch.randn(3, 5, generator=random)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_good(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = build(rank)
    shardwise.save(folder, model, optimizer, step=STEP, extra=extra())


# -- the attacker's tools


def sealed(text: str | bytes) -> bytes:
    """Return a JSON object with the digest that it should have."""
    body = (text.encode() if isinstance(text, str) else text).rstrip()
    assert body.endswith(b"}")
    body = body[:-1]
    return body + b',"digest":"' + digest_of(body).encode() + b'"}\n'


class Target:
    """One checkpoint in the hands of the attacker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name

    def text(self, name: str = "manifest.json") -> str:
        """Return the JSON text of a sealed file, without the digest."""
        body, _, _ = self.path(name).read_bytes().rpartition(b',"digest":"')
        return body.decode() + "}"

    def json(self, name: str = "manifest.json") -> Any:
        return json.loads(self.text(name))

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a file; for an index, tell the manifest."""
        self.path(name).write_bytes(data)
        if name.startswith("rank") and name.endswith(".json"):
            manifest = self.json()
            row = manifest["ranks"][int(name[4:9])]
            row["index_bytes"], row["digest"] = len(data), digest_of(data)
            self.put(manifest)

    def put_text(self, text: str | bytes, name: str = "manifest.json") -> None:
        self.put_bytes(name, sealed(text))

    def put(self, value: Any, name: str = "manifest.json") -> None:
        self.put_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False), name)

    @contextlib.contextmanager
    def edit(self, name: str = "manifest.json") -> Iterator[Any]:
        """Change a sealed file's value in place."""
        value = self.json(name)
        yield value
        self.put(value, name)

    def put_header(self, text: bytes, number: int = 0, length: int | None = None) -> None:
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

    def set_size(self, name: str, num_bytes: int) -> None:
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
    attack: Callable[[Target], None]


CASES: list[Case] = []


def _add(
    expected: Expected, attacks: Mapping[str, Any], attack: Callable[..., Any] | None = None
) -> None:
    """Add a case for each attack, or for each value of one ``attack``."""
    for name, value in attacks.items():
        run = value if attack is None else (lambda target, v=value: attack(target, v))
        CASES.append(Case(name.replace(" ", "_"), expected, run))


def _set(*keys: Any, name: str = "manifest.json") -> Callable[[Target, Any], None]:
    """Return an attack that puts a value at a path of a sealed file."""

    def attack(target: Target, value: Any) -> None:
        with target.edit(name) as part:
            for key in keys[:-1]:
                part = part[key]
            part[keys[-1]] = value

    return attack


def _edit(change: Callable[[Any], Any], name: str = "manifest.json") -> Callable[[Target], None]:
    """Return an attack that changes a sealed file's value in place."""

    def attack(target: Target) -> None:
        with target.edit(name) as part:
            change(part)

    return attack


def _first(rows: Any, kind: str = "param") -> Any:
    return next(row for row in rows if row["kind"] == kind)


# -- names

CLIMBS = "../../../etc/passwd"
_add(
    "refused",
    {f"a tensor with a name {n}": name for n, name in enumerate((CLIMBS, "a\0b", "", "a" * 5000))},
    lambda target, name: _set("tensors", 0, "name")(target, name),
)
_add(
    "refused",
    {
        "an own tensor with a name that climbs": _edit(
            lambda index: index["own"][0].update(name=CLIMBS), INDEX
        ),
        "a tie to a name that climbs": _edit(lambda m: m["tied"].update({"again.weight": CLIMBS})),
        "a tie that hides another tensor": _edit(
            lambda m: m["tied"].update({"up.bias": "down.bias", "down.bias": "up.bias"})
        ),
        "two tensors of one name": _edit(lambda m: m["tensors"].append(dict(m["tensors"][0]))),
        "a parameter with the key of optimizer state": _edit(
            lambda m: _first(m["tensors"]).update(name="optim.state.down.weight.exp_avg")
        ),
        "an own tensor twice": _edit(lambda i: i["own"].append(dict(i["own"][0])), INDEX),
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


def _own_parameter(target: Target) -> None:
    with target.edit(INDEX) as index:
        begin = index["own"][0]["begin"]
        row = {"kind": "param", "name": "up.bias", "shape": [7], "dtype": "F32", "begin": begin}
        index["own"].append(row | {"digests": _digests_at(target, begin, 28)})


def _digests_at(target: Target, begin: int, num_bytes: int) -> str:
    data = target.path(TENSORS).read_bytes()[begin : begin + num_bytes]
    return chunk_digests(memoryview(data))


_add("refused", {"an own tensor in the place of a parameter": _own_parameter})


# -- files of another kind

PARTS = {"manifest": "manifest.json", "index": INDEX, "tensors": TENSORS}


def _device(path: Path, data: bytes) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except OSError as error:  # only the superuser makes devices, and not in each container
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        path.symlink_to("/dev/zero")


def _socket(path: Path, data: bytes) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(before)


def _link_to_its_data(path: Path, data: bytes, where: Path) -> None:
    where.write_bytes(data)
    path.symlink_to(where)


def _hole(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.truncate(path, 2 * GIB)


KINDS: dict[str, Callable[[Path, bytes], Any]] = {
    "is a link inside": lambda p, d: _link_to_its_data(p, d, p.with_name("other")),
    "is a link outside": lambda p, d: _link_to_its_data(
        p, d, p.parents[2] / f"{p.parents[1].name}-outside"
    ),
    "is a link to nothing": lambda p, d: p.symlink_to("nowhere"),
    "is a link to itself": lambda p, d: p.symlink_to(p.name),
    "is a link to a device": lambda p, d: p.symlink_to("/dev/zero"),
    "is a device": _device,
    "is a pipe": lambda p, d: os.mkfifo(p),
    "is a folder": lambda p, d: p.mkdir(),
    "is a socket": _socket,
    "is missing": lambda p, d: None,
    "is empty": lambda p, d: p.write_bytes(b""),
    "has a hole of two gib": _hole,
    "is all zeros": lambda p, d: p.write_bytes(bytes(len(d))),
}


def _replace(kind: str, name: str) -> Callable[[Target], None]:
    def attack(target: Target) -> None:
        data = target.path(name).read_bytes()
        target.path(name).unlink()
        KINDS[kind](target.path(name), data)

    return attack


_add(
    "refused",
    {
        f"a file that {kind} {part}": _replace(kind, name)
        for number, kind in enumerate(KINDS)
        for turn, (part, name) in enumerate(PARTS.items())
        if number % len(PARTS) == turn or kind in ("is a pipe", "has a hole of two gib")
    },
)


def _every_file(change: Callable[[Path], Any]) -> Callable[[Target], None]:
    return lambda target: [change(path) for path in target.folder.iterdir()] and None


def _file_as_folder(target: Target) -> None:
    shutil.rmtree(target.folder)
    target.folder.write_bytes(b"")


def _exchange_ranks(target: Target, kind: str) -> None:
    names = [f"rank0000{rank}{kind}" for rank in (0, 1)]
    data = [target.path(name).read_bytes() for name in names]
    for name, other in zip(names, data[::-1], strict=True):
        target.put_bytes(name, other)


def _names_like_ours(target: Target) -> None:
    data = target.path("manifest.json").read_bytes()
    for name in (
        "MANIFEST.JSON",
        "manifest.json\n",
        "rank0000\u0660-0.safetensors",
        ".manifest.json",
    ):
        target.path(name).write_bytes(data)


def _step_without_utf8(target: Target) -> None:
    os.rename(target.folder, os.fsencode(target.folder) + b"\xff")
    os.symlink("step\udcff", target.folder)


def _large_index(target: Target) -> None:
    os.truncate(target.path(INDEX), 2 * GIB)
    _set("ranks", 0, "index_bytes")(target, 2 * GIB)


_add(
    "refused",
    {
        "every file empty": _every_file(lambda path: path.write_bytes(b"")),
        "an empty folder": _every_file(Path.unlink),
        "a file in the place of the folder": _file_as_folder,
        "a file of a rank that is none": lambda target: shutil.copy(
            target.path(TENSORS), target.path("rank00005-0.safetensors")
        ),
        "files of two ranks exchanged": lambda target: _exchange_ranks(target, "-0.safetensors"),
        "indexes of two ranks exchanged": lambda target: _exchange_ranks(target, ".json"),
        "a step in other digits": lambda target: os.rename(
            target.folder, target.folder.with_name("step-0000000\u0663")
        ),
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

_add("refused", {"a format of the future": 3, "a format of meshes": 2}, _set("format"))
_add(
    "refused",
    {"a step of 31 digits": 10**30, "a step that is an object": {"$": "int", "of": "0x1"}},
    _set("step"),
)
_add("refused", {"2 to 23 ranks": 1 << 23, "10 to 7 ranks": 10**7}, _set("num_shards"))
_add("refused", {"10 to 7 replicas": 10**7}, _set("num_replicas"))
_add("refused", {"an index of a pib": (1 << 50) - 1}, _set("ranks", 0, "index_bytes"))
_add("refused", {"64 files": 64}, _set("ranks", 0, "num_files"))
_add("refused", {"files of a pib": (1 << 50) - 1}, _set("ranks", 0, "file_bytes"))
_add(
    "refused",
    {
        "a shape that explodes": [1 << 49] * 32,
        "a shape of many dims": [1] * 100_000,
        "a shape with a zero that hides it": [1 << 49] * 31 + [0],
    },
    _set("tensors", 0, "shape"),
)
_add(
    "refused",
    {
        "a dtype that is code": "os.system",
        "a wider dtype": "F64",
        "another dtype of the same width": "I32",
        "a dtype of a megabyte": "F" * (1 << 20),
    },
    _set("tensors", 0, "dtype"),
)
_add("refused", {"another kind of layout": "rows"}, _set("layouts", 0, "kind"))
_add("refused", {"huge layouts": [[1 << 49] * 32] * 9}, _set("layouts", 0, "shapes"))
_add("refused", {"a digest with a line end": "0" * 32 + "\n"}, _set("ranks", 0, "digest"))
_add("refused", {"no tensors": []}, _set("tensors"))
_add("refused", {"a lot of zeros for ranks": [0] * 10**5}, _set("ranks"))
_add("refused", {"a lot of ties": {f"{n}": 0 for n in range(10**4)}}, _set("tied"))
HUGE = {"kind": "optimizer", "name": "up.bias", "state": "huge", "dtype": "F32"}
_add(
    "refused",
    {
        "a thousand ranks row by row": _edit(
            lambda m: m.update(num_shards=10**3, ranks=m["ranks"][:1] * 10**3)
        ),
        "an unknown key": _edit(lambda m: m.update({"k" * (1 << 20): 1})),
        "one rank less": _edit(lambda m: m["ranks"].pop()),
        "rows of ranks exchanged": _edit(lambda m: m["ranks"].reverse()),
        "a whole tensor of the wrong rank": _edit(
            lambda m: [
                row.update(rank=1 - row.get("rank", 0))
                for row in m["tensors"][:]
                if row["kind"] == "buffer"
            ]
        ),
        "state of a tib that no file holds": _edit(
            lambda m: m["tensors"].append(HUGE | {"shape": [1 << 38]})
        ),
        "state of no elements and huge dims": _edit(
            lambda m: m["tensors"].append(HUGE | {"shape": [1 << 49, 1 << 49, 0]})
        ),
    },
)


# -- JSON


def _swap(target: Target, after: str) -> None:
    text = target.text()
    assert '"step":3' in text
    target.put_text(text.replace('"step":3', after, 1))


_add(
    "refused",
    {
        "json with a key twice": '"step":3,"step":3',
        "json with nan": '"step":NaN',
        "json with a million digits": '"step":' + "9" * 10**6,
        "json with half a character": '"step":"\\ud800"',
        "json with deep objects": '"step":' + '{"a":' * 10**4 + "1" + "}" * 10**4,
        "json with lists that never end": '"step":' + "[" * 10**5,
    },
    _swap,
)
PICKLE = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n(S'true'\ntR."
_add(
    "refused",
    {
        "a manifest that is a list": b"[]",
        "a manifest that is a pickle": PICKLE,
        "a manifest of 100 mb of blanks": b" " * 100_000_000,
    },
    lambda target, data: target.put_bytes("manifest.json", data),
)
_add(
    "refused",
    {
        "a sealed manifest that is empty": b"{}",
        "a sealed manifest that is no utf8": b'{"format":1,"run":"\xff\xfe"}',
        "a sealed manifest that is a list": b'[1,{"a":1}',
        "a sealed manifest full of nul": b"{" + bytes(10**6) + b"}",
        "a sealed manifest with 10 mb of blanks": b'{"format":1,' + b" " * 10_000_000 + b'"x":1}',
    },
    lambda target, data: target.put_text(data),
)
_add(
    "refused",
    {
        "a manifest with no digest": lambda t: t.put_bytes("manifest.json", t.text().encode()),
        "a manifest with two digests": lambda t: t.put_bytes(
            "manifest.json", sealed(sealed(t.text()))
        ),
    },
)


# -- indexes


def _in_index(*keys: Any) -> Callable[[Target, Any], None]:
    return _set(*keys, name=INDEX)


_add("refused", {"an index of another run": "0" * 16}, _in_index("run"))
_add("refused", {"a box too long": [0] * 5}, _in_index("boxes", 0))
_add("refused", {"a box of no tensor": 999}, _in_index("boxes", 0, 0))
_add("refused", {"a box that begins far behind": (1 << 50) - 1}, _in_index("boxes", 0, 2))
_add(
    "refused",
    {"a lot of digests": "0" * (22 << 15), "other digests": "ABCDEF01234" * 2},
    _in_index("boxes", 0, 3),
)
_add("refused", {"an own tensor far behind": (1 << 50) - 1}, _in_index("own", 0, "begin"))
_add("refused", {"an own tensor of half a tib": [1 << 37]}, _in_index("own", 0, "shape"))
_add("refused", {"a file of a pib": (1 << 50) - 1}, _in_index("files", 0, "num_bytes"))
_add("found", {"another digest of a header": "0" * 32}, _in_index("files", 0, "header"))
_add("refused", {"an index that says nothing": lambda target: target.put({}, INDEX)})


def _sizes_of(index: Any) -> list[int]:
    """Return the bytes of each box: up to the next one of its file, or the file's end."""
    ends = {n: file["num_bytes"] for n, file in enumerate(index["files"])}
    ends[0] = min([own["begin"] for own in index["own"]], default=ends[0])
    sizes = []
    for row in reversed(index["boxes"]):
        sizes.append(ends[row[1]] - row[2])
        ends[row[1]] = row[2]
    return sizes[::-1]


def _exchange_boxes(index: Any) -> None:
    sizes, rows = _sizes_of(index), index["boxes"]
    a, b = next(
        (a, b)
        for n, a in enumerate(rows)
        for m, b in enumerate(rows[:n])
        if sizes[n] == sizes[m] and a[1] == b[1] and a[3] != b[3]
    )
    a[2], a[3], b[2], b[3] = b[2], b[3], a[2], a[3]


def _move_a_box(target: Target) -> None:
    """Begin a box one byte too early, with the digests of the bytes there."""
    with target.edit(INDEX) as index:
        at, row = next((n, r) for n, r in enumerate(index["boxes"]) if r[1] == 0)
        num_bytes = _sizes_of(index)[at]
        row[2] -= 1
        row[3] = _digests_at(target, row[2], num_bytes)


_add(
    "refused",
    {
        "two boxes exchanged": _edit(_exchange_boxes, INDEX),
        "a box one byte too early": _move_a_box,
        "a box that is missing": _edit(lambda index: index["boxes"].pop(), INDEX),
        "a box twice": _edit(lambda index: index["boxes"].append(index["boxes"][0]), INDEX),
        "a box of another rank": lambda target: _edit(
            lambda index: index["boxes"].append(target.json("rank00001.json")["boxes"][-1]), INDEX
        )(target),
    },
)


# -- headers of files: our loads follow the index, so only verify reads them


def _headers_length(target: Target) -> None:
    data = target.path(TENSORS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    target.put_header(data[8:end], length=1 << 63)


DIMS = b",".join([b"%d" % ((1 << 62) - 1)] * 30_000)
_add("found", {"a header of 2 to 63 bytes": _headers_length})
_add(
    "found",
    {
        "a header that is no json": b"\xff\xfe",
        "a header that is deep": b"[" * 10**5,
        "a header of dims without end": b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
        % DIMS,
    },
    lambda target, text: target.put_header(text),
)


# -- values: the state of the user and of the optimizer beside tensors

COLLIDING = [{"$": "int", "of": hex(n * ((1 << 61) - 1))} for n in range(1, 5_000)]


def _array(shape: list[int], dtype: str = "<f4") -> dict[str, Any]:
    return {"$": "numpy.array", "dtype": dtype, "shape": shape, "of": ""}


VALUES = {
    "a tensor from nowhere": {"$": "tensor", "of": "nowhere"},
    "a tensor from outside": {"$": "tensor", "of": CLIMBS},
    "a tag that is code": {"$": "os.system", "of": ["true"]},
    "a factory that is code": {"$": "defaultdict", "keys": [], "values": [], "factory": "eval"},
    "an array of objects": _array([1], "|O"),
    "an array of a tib": _array([1 << 38]),
    "an array that explodes": _array([(1 << 62) - 1] * 10_000),
    "keys that all collide": {"$": "dict", "keys": COLLIDING, "values": [0] * len(COLLIDING)},
    "a pickle": {"$": "pickle", "of": "gASVDwAAAAAAAAA="},
    "depth beyond ours": json.loads('{"$":"tuple","of":[' * 31 + "]}" * 31),
}
_add(
    "unfit",
    {f"a value with {what}": value for what, value in VALUES.items()},
    _in_index("values", "extra", "note"),
)
_add(
    "unfit",
    {f"a group with {what}": value for what, value in list(VALUES.items())[::5]},
    _set("optimizer", "groups", 0, "lr"),
)
_add(
    "unfit",
    {"groups of numbers": [1], "too many groups": [{"params": []}] * 1000},
    _set("optimizer", "groups"),
)
_add("unfit", {"params outside": [CLIMBS]}, _set("optimizer", "groups", 0, "params"))
_add("unfit", {"state that is a number": {"up.bias": 5}}, _set("optimizer", "state"))
_add("unfit", {"no optimizer": None, "another optimizer": {"class_name": "SGD"}}, _set("optimizer"))
_add("unfit", {"an optimizer that is code": "os.system"}, _set("optimizer", "class_name"))


def _repeat_a_group_tensor(manifest: Any) -> None:
    group = manifest["optimizer"]["groups"][0]
    group["more"] = [group["lr"]] * 10_000


_add(
    "unfit",
    {
        "one tensor in ten thousand places": _edit(
            lambda i: i["values"]["extra"].update(
                note=[i["values"]["extra"]["loader"]["order"]] * 10_000
            ),
            INDEX,
        ),
        "one tensor in ten thousand places of a group": _edit(_repeat_a_group_tensor),
    },
)
_add("refused", {"values that are null": None}, _in_index("values"))
_add("unfit", {"no values": {}, "values of a number": {"extra": 1}}, _in_index("values"))
_add("unfit", {"extra that is a text": "loader", "no extra": {}}, _in_index("values", "extra"))
_add("unfit", {"modules that are a list": []}, _in_index("values", "modules"))
_add("unfit", {"generators of others": {"a": 1}}, _in_index("values", "generators"))
_add(
    "unfit",
    {
        "a generator of zeros": "A" * 6742 + "==",  # as many bytes as torch's has
        "a generator of a megabyte": "A" * (1 << 20),
    },
    _in_index("values", "generators", "torch"),
)
