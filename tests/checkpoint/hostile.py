"""Hostile checkpoints: each function makes one out of a good one, as an attacker would.

The attacker can write whatever they like, and all digests are right again afterwards (xxh3 is a
checksum, not a signature), so what is refused is refused for what it says. A case gets a `Target`:
the folder of one checkpoint, alone in the folder of a run.

What must come of it, by the decorator: `refused` (no load succeeds, and verify finds it), `unfit`
(no load succeeds; each byte is in order, and verify does not read values), `found` (verify finds
it; a load either refuses or gives the saved values), `harmless` (a load either refuses or gives the
saved values).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import shardwise
from shardwise import shard
from shardwise.checkpoint.container import chunk_digests, digest_of

STEP = 3
NAME = f"step-{STEP:08d}"
GIB = 1 << 30
Expected = Literal["refused", "unfit", "found", "harmless"]


# -- the good checkpoint


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
    def manifest(self) -> Iterator[Any]:
        value = self.json()
        yield value
        self.put(value)

    @contextlib.contextmanager
    def index(self, rank: int = 0) -> Iterator[Any]:
        name = f"rank{rank:05d}.json"
        value = self.json(name)
        yield value
        self.put(value, name)

    @contextlib.contextmanager
    def values(self) -> Iterator[Any]:
        with self.index() as index:
            yield index["values"]

    @contextlib.contextmanager
    def rows(self) -> Iterator[Any]:
        with self.manifest() as manifest:
            yield manifest["tensors"]

    @contextlib.contextmanager
    def header(self, number: int = 0) -> Iterator[dict[str, Any]]:
        """Edit the header of a file of rank 0; the index and the manifest follow."""
        path = self.path(f"rank00000-{number}.safetensors")
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        value = json.loads(data[8:begin])
        yield value
        self.put_header(json.dumps(value).encode(), number)

    def put_header(self, text: bytes, number: int = 0, length: int | None = None) -> None:
        name = f"rank00000-{number}.safetensors"
        data = self.path(name).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = (len(text) if length is None else length).to_bytes(8, "little") + text
        self.path(name).write_bytes(header + data[begin:])
        moved = len(header) - begin
        with self.index() as index:
            index["files"][number] = {
                "num_bytes": len(data) + moved,
                "header": digest_of(header),
            }
            for row in index["boxes"]:
                row[2] += moved * (row[1] == number)
            for row in index["own"] if number == 0 else ():
                row["begin"] += moved
        with self.manifest() as manifest:
            manifest["ranks"][0]["file_bytes"] += moved

    def set_size(self, name: str, num_bytes: int) -> None:
        """Make a file of rank 0 longer by a hole, and have index and manifest say so."""
        before = self.path(name).stat().st_size
        os.truncate(self.path(name), num_bytes)
        with self.index() as index:
            index["files"][int(name[10])]["num_bytes"] = num_bytes
        with self.manifest() as manifest:
            manifest["ranks"][0]["file_bytes"] += num_bytes - before


@dataclass(frozen=True)
class Case:
    name: str
    expected: Expected
    attack: Callable[[Target], None]


CASES: list[Case] = []


def _case(expected: Expected) -> Callable[[Callable[[Target], None]], Callable[[Target], None]]:
    def add(attack: Callable[[Target], None]) -> Callable[[Target], None]:
        CASES.append(Case(attack.__name__, expected, attack))
        return attack

    return add


refused, unfit, found, harmless = (
    _case("refused"),
    _case("unfit"),
    _case("found"),
    _case("harmless"),
)


def _variants(
    name: str,
    values: dict[str, Any],
    attack: Callable[[Target, Any], None],
    expected: Expected = "refused",
) -> None:
    """Add a case for each value."""
    for label, value in values.items():
        CASES.append(
            Case(f"{name}_{label}", expected, lambda target, v=value: attack(target, v))  # type: ignore[misc]
        )


def _first(rows: Any, kind: str = "param") -> Any:
    return next(row for row in rows if row["kind"] == kind)


# -- names

NAMES = {
    "that_climbs": "../../../etc/passwd",
    "that_is_absolute": "/etc/passwd",
    "with_a_nul": "up.weight\0.png",
    "in_other_case": "UP.weight",
    "of_lookalike_letters": "uр.weight",  # noqa: RUF001 - the second letter is Cyrillic
    "with_a_joiner": "up.wei\u200dght",
    "of_nothing": "",
    "of_5000_letters": "a" * 5000,
    "that_is_code": "__import__('os').system('true')",
    "that_is_a_format": "{0.__class__}%s%n",
}


def _name_a_tensor(target: Target, name: str) -> None:
    with target.rows() as rows:
        _first(rows)["name"] = name


def _name_an_own_tensor(target: Target, name: str) -> None:
    with target.index() as index:
        index["own"][0]["name"] = name


def _tie_to(target: Target, name: str) -> None:
    with target.manifest() as manifest:
        manifest["tied"]["again.weight"] = name


_variants("a_tensor_with_a_name", NAMES, _name_a_tensor)
_variants("an_own_tensor_with_a_name", NAMES, _name_an_own_tensor)
_variants("a_tied_weight_with_a_name", NAMES, _tie_to)


@harmless
def a_tied_name_that_climbs(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["tied"]["../../up.weight"] = "up.weight"


@refused
def a_tied_name_that_hides_another_tensor(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["tied"]["up.bias"] = "down.bias"
        manifest["tied"]["down.bias"] = "up.bias"


@refused
def a_tied_name_that_leads_to_optimizer_state(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["tied"]["again.weight"] = "optim.state.up.weight.exp_avg"


@refused
def two_tensors_of_one_name(target: Target) -> None:
    with target.rows() as rows:
        rows.append(dict(rows[0]))


@refused
def a_parameter_that_takes_the_key_of_optimizer_state(target: Target) -> None:
    with target.rows() as rows:
        _first(rows)["name"] = "optim.state.down.weight.exp_avg"


@refused
def an_own_tensor_that_stands_twice(target: Target) -> None:
    with target.index() as index:
        index["own"].append(dict(index["own"][0]))


@refused
def an_own_tensor_in_the_place_of_a_parameter(target: Target) -> None:
    with target.index() as index:
        begin = index["own"][0]["begin"]
        row = {"kind": "param", "name": "up.bias", "shape": [7], "dtype": "F32", "begin": begin}
        index["own"].append(row | {"digests": _digests_at(target, begin, 28)})


def _digests_at(target: Target, begin: int, num_bytes: int, number: int = 0) -> str:
    data = target.path(f"rank00000-{number}.safetensors").read_bytes()[begin : begin + num_bytes]
    return chunk_digests(memoryview(data))


# -- files that are none

PARTS = {
    "manifest": "manifest.json",
    "index": "rank00000.json",
    "tensors": "rank00000-0.safetensors",
}


def _link_inside(target: Target, name: str) -> None:
    os.rename(target.path(name), target.path("other"))
    os.symlink("other", target.path(name))


def _link_outside(target: Target, name: str) -> None:
    outside = target.folder.parent.parent / f"{target.folder.parent.name}-outside"
    os.rename(target.path(name), outside)
    os.symlink(outside, target.path(name))


def _link_to_nothing(target: Target, name: str) -> None:
    target.path(name).unlink()
    os.symlink("nowhere", target.path(name))


def _link_to_itself(target: Target, name: str) -> None:
    target.path(name).unlink()
    os.symlink(name, target.path(name))


def _link_to_a_device(target: Target, name: str) -> None:
    target.path(name).unlink()
    os.symlink("/dev/zero", target.path(name))


def _device(target: Target, name: str) -> None:
    target.path(name).unlink()
    try:
        os.mknod(target.path(name), stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except OSError as error:  # only the superuser makes devices, and not in each container
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        os.symlink("/dev/zero", target.path(name))


def _pipe(target: Target, name: str) -> None:
    target.path(name).unlink()
    os.mkfifo(target.path(name))


def _folder(target: Target, name: str) -> None:
    target.path(name).unlink()
    target.path(name).mkdir()


def _socket(target: Target, name: str) -> None:
    target.path(name).unlink()
    before = os.getcwd()
    os.chdir(target.folder)  # the name of a socket has at most 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    finally:
        os.chdir(before)


def _nothing(target: Target, name: str) -> None:
    target.path(name).unlink()


def _empty(target: Target, name: str) -> None:
    target.path(name).write_bytes(b"")


def _two_gib(target: Target, name: str) -> None:
    os.truncate(target.path(name), 2 * GIB)


def _zeros(target: Target, name: str) -> None:
    target.path(name).write_bytes(bytes(target.path(name).stat().st_size))


for _label, _attack in {
    "is_a_link_inside": _link_inside,
    "is_a_link_outside": _link_outside,
    "is_a_link_to_nothing": _link_to_nothing,
    "is_a_link_to_itself": _link_to_itself,
    "is_a_link_to_a_device": _link_to_a_device,
    "is_a_device": _device,
    "is_a_pipe": _pipe,
    "is_a_folder": _folder,
    "is_a_socket": _socket,
    "is_missing": _nothing,
    "is_empty": _empty,
    "has_a_hole_of_two_gib": _two_gib,
    "is_all_zeros": _zeros,
}.items():
    _variants(f"a_file_that_{_label}", PARTS, _attack)


@refused
def every_file_empty(target: Target) -> None:
    for path in target.folder.iterdir():
        path.write_bytes(b"")


@refused
def an_empty_folder(target: Target) -> None:
    for path in target.folder.iterdir():
        path.unlink()


@refused
def a_file_in_the_place_of_the_folder(target: Target) -> None:
    shutil.rmtree(target.folder)
    target.folder.write_bytes(b"")


@refused
def a_file_of_a_rank_that_is_none(target: Target) -> None:
    shutil.copy(target.path("rank00000-0.safetensors"), target.path("rank00005-0.safetensors"))


@refused
def files_of_two_ranks_exchanged(target: Target) -> None:
    a, b = (target.path(f"rank0000{rank}-0.safetensors") for rank in (0, 1))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@refused
def indexes_of_two_ranks_exchanged(target: Target) -> None:
    a, b = (target.path(f"rank0000{rank}.json").read_bytes() for rank in (0, 1))
    target.put_bytes("rank00000.json", b)
    target.put_bytes("rank00001.json", a)


@harmless
def names_that_look_like_ours(target: Target) -> None:
    data = target.path("manifest.json").read_bytes()
    for name in (
        "MANIFEST.JSON",
        "manifest.json\n",
        "rank0000\u0660-0.safetensors",
        ".manifest.json",
    ):
        target.path(name).write_bytes(data)


@refused
def a_step_in_other_digits(target: Target) -> None:
    os.rename(target.folder, target.folder.with_name("step-0000000\u0663"))


@refused
def a_step_with_a_line_end(target: Target) -> None:
    os.rename(target.folder, target.folder.with_name(f"{NAME}\n"))


@refused
def a_folder_with_a_byte_that_is_no_utf8(target: Target) -> None:
    os.rename(target.folder, os.fsencode(target.folder) + b"\xff")
    os.symlink("step\udcff", target.folder)


@refused
def an_index_of_two_gib_that_the_manifest_claims(target: Target) -> None:
    os.truncate(target.path("rank00000.json"), 2 * GIB)
    with target.manifest() as manifest:
        manifest["ranks"][0]["index_bytes"] = 2 * GIB


@found
def a_tensor_file_of_a_tib_that_all_claim(target: Target) -> None:
    target.set_size("rank00000-0.safetensors", 1 << 40)


# -- numbers of the manifest

NUMBERS = {
    "below_zero": -1,
    "of_64_bits": 1 << 63,
    "of_31_digits": 10**30,
    "with_a_fraction": 1.5,
    "that_is_a_float": 1.0,
    "that_is_true": True,
    "that_is_a_text": "1",
    "that_is_a_list": [1],
    "that_is_an_object": {"$": "int", "of": "0x1"},
}


FEW_NUMBERS = {key: NUMBERS[key] for key in ("below_zero", "of_64_bits", "that_is_true")}


def _set(*keys: Any) -> Callable[[Target, Any], None]:
    def attack(target: Target, value: Any) -> None:
        with target.manifest() as manifest:
            place = manifest
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = value

    return attack


_variants(
    "a_format",
    NUMBERS | {"of_the_future": 3, "that_has_meshes": 2, "that_is_null": None},
    _set("format"),
)
_variants("a_step", NUMBERS, _set("step"))
_variants("a_stage", FEW_NUMBERS | {"four": 4}, _set("stage"))
_variants(
    "ranks", FEW_NUMBERS | {"of_none": 0, "2_to_23": 1 << 23, "10_to_7": 10**7}, _set("num_shards")
)
_variants("replicas", FEW_NUMBERS | {"of_none": 0, "10_to_7": 10**7}, _set("num_replicas"))
_variants("a_dim", FEW_NUMBERS, _set("tensors", 0, "shape", 0))
_variants("a_layout", FEW_NUMBERS | {"none": 9}, _set("tensors", 0, "layout"))
_variants("a_place_in_a_layout", FEW_NUMBERS | {"none": 99}, _set("tensors", 0, "index"))
_variants(
    "a_size_of_an_index", FEW_NUMBERS | {"a_pib": (1 << 50) - 1}, _set("ranks", 0, "index_bytes")
)
_variants("a_number_of_files", FEW_NUMBERS | {"65": 65, "64": 64}, _set("ranks", 0, "num_files"))
_variants("a_size_of_files", FEW_NUMBERS | {"a_pib": (1 << 50) - 1}, _set("ranks", 0, "file_bytes"))
_variants(
    "a_shape",
    {
        "that_explodes": [1 << 49] * 32,
        "of_33_dims": [1] * 33,
        "of_many_dims": [1] * 100_000,
        "with_a_zero_that_hides_it": [1 << 49] * 31 + [0],
        "that_is_a_text": "77",
        "that_is_null": None,
        "of_another_size": [5, 7],
        "of_no_dims": [],
    },
    _set("tensors", 0, "shape"),
)
_variants(
    "a_dtype",
    {
        "that_is_code": "os.system",
        "in_other_case": "f32",
        "of_torch": "torch.float32",
        "that_is_narrower": "BF16",
        "that_is_wider": "F64",
        "of_the_same_width": "I32",
        "of_a_megabyte": "F" * (1 << 20),
        "that_is_null": None,
    },
    _set("tensors", 0, "dtype"),
)
_variants("a_kind", {"that_is_code": "os", "that_is_null": None}, _set("tensors", 0, "kind"))
_variants("a_layouts_kind", {"unknown": "diagonal", "other": "rows"}, _set("layouts", 0, "kind"))
_variants(
    "a_layouts_shapes",
    {"none": [], "one": [[1]], "huge": [[1 << 49] * 32] * 9, "wrong": [[7, 5], [1], [2], [3]]},
    _set("layouts", 0, "shapes"),
)
_variants(
    "a_digest",
    {
        "too_short": "0" * 21,
        "too_long": "0" * 33,
        "of_others": "ABCDEF01234" * 2,
        "with_a_line_end": "0" * 32 + "\n",
        "that_is_a_number": 0,
        "that_is_another": "0" * 32,
    },
    _set("ranks", 0, "digest"),
)
_variants("a_run", {"that_is_another": "0" * 16, "that_is_a_list": []}, _set("run"))
_variants("tensors", {"null": None, "a_text": "x", "an_object": {}, "none": []}, _set("tensors"))
_variants("a_row", {"null": None, "a_number": 3, "a_list": []}, _set("tensors", 0))
_variants("rows_of_ranks", {"none": [], "null": None, "a_lot_of_zeros": [0] * 10**5}, _set("ranks"))
_variants("ties", {"a_list": [], "a_lot": {f"{n}": 0 for n in range(10**4)}}, _set("tied"))


@refused
def a_manifest_that_claims_a_thousand_ranks_row_by_row(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["num_shards"] = 10**3
        manifest["ranks"] = manifest["ranks"][:1] * 10**3


@refused
def a_manifest_with_an_unknown_key(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["k" * (1 << 20)] = 1


@refused
def a_manifest_without_a_key(target: Target) -> None:
    with target.manifest() as manifest:
        del manifest["num_replicas"]


@refused
def one_rank_less(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["ranks"].pop()


@refused
def rows_of_ranks_exchanged(target: Target) -> None:
    with target.manifest() as manifest:
        manifest["ranks"].reverse()


@refused
def a_whole_tensor_of_a_rank_that_is_none(target: Target) -> None:
    with target.rows() as rows:
        _first(rows, "buffer")["rank"] = 2


@refused
def a_whole_tensor_of_the_wrong_rank(target: Target) -> None:
    with target.rows() as rows:
        row = _first(rows, "buffer")
        row["rank"] = 1 - row.get("rank", 0)


@refused
def optimizer_state_of_a_tib_that_no_file_holds(target: Target) -> None:
    with target.rows() as rows:
        row = {"kind": "optimizer", "name": "up.bias", "state": "huge", "dtype": "F32"}
        rows.append(row | {"shape": [1 << 38]})


@refused
def optimizer_state_of_no_elements_and_huge_dims(target: Target) -> None:
    with target.rows() as rows:
        row = {"kind": "optimizer", "name": "up.bias", "state": "huge", "dtype": "F32"}
        rows.append(row | {"shape": [1 << 49, 1 << 49, 0]})


# -- JSON


def _swap(target: Target, before: str, after: str) -> None:
    text = target.text()
    assert before in text
    target.put_text(text.replace(before, after, 1))


_variants(
    "json_with",
    {
        "a_key_twice": '"step":3,"step":3',
        "nan": '"step":NaN',
        "infinity": '"step":-Infinity',
        "a_float_that_overflows": '"step":1e999',
        "ten_thousand_digits": '"step":' + "9" * 10_000,
        "a_million_digits": '"step":' + "9" * 10**6,
        "half_a_character": '"step":"\\ud800"',
        "deep_lists": '"step":' + "[" * 10**4 + "]" * 10**4,
        "deep_objects": '"step":' + '{"a":' * 10**4 + "1" + "}" * 10**4,
        "lists_that_never_end": '"step":' + "[" * 10**5,
        "a_comment": '"step":3/* */',
        "a_comma_too_many": '"step":3,',
    },
    lambda target, after: _swap(target, '"step":3', after),
)
_variants(
    "a_manifest_that_is",
    {
        "a_list": b"[]",
        "a_number": b"1",
        "null": b"null",
        "a_pickle": b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n(S'true'\ntR.",
        "a_zip": b"PK\x03\x04" + bytes(64),
        "an_open_brace": b"{",
    },
    lambda target, data: target.put_bytes("manifest.json", data),
)
_variants(
    "a_sealed_manifest_that_is",
    {
        "an_empty_object": b"{}",
        "no_utf8": b'{"format":1,"run":"\xff\xfe"}',
        "utf16": '{"format":1}'.encode("utf-16-le") + b"}",
        "with_a_byte_order_mark": b'\xef\xbb\xbf{"format":1}',
        "a_list": b'[1,{"a":1}',
        "full_of_nul": b"{" + bytes(10**6) + b"}",
    },
    lambda target, data: target.put_text(data),
)


@refused
def a_manifest_with_no_digest(target: Target) -> None:
    target.put_bytes("manifest.json", target.text().encode())


@refused
def a_manifest_with_more_behind_its_digest(target: Target) -> None:
    with target.path("manifest.json").open("ab") as file:
        file.write(b"{}")


@refused
def a_manifest_with_two_digests(target: Target) -> None:
    target.put_bytes("manifest.json", sealed(sealed(target.text())))


@refused
def a_sealed_manifest_with_10_mb_of_blanks(target: Target) -> None:
    target.put_text(b'{"format":1,' + b" " * 10_000_000 + b'"x":1}')


@refused
def a_manifest_of_100_mb_of_blanks(target: Target) -> None:
    target.put_bytes("manifest.json", b" " * 100_000_000)


# -- indexes


def _set_index(*keys: Any) -> Callable[[Target, Any], None]:
    def attack(target: Target, value: Any) -> None:
        with target.index() as index:
            place = index
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = value

    return attack


_variants("an_index_of_a_format", {"2": 2, "true": True, "null": None}, _set_index("format"))
_variants("an_index_of_a_run", {"other": "0" * 16, "null": None}, _set_index("run"))
_variants("an_index_of_a_step", NUMBERS | {"that_is_another": 4}, _set_index("step"))
_variants("an_index_of_a_rank", FEW_NUMBERS | {"that_is_another": 1}, _set_index("rank"))
_variants(
    "a_box",
    {"null": None, "a_text": "abcdef", "an_object": {}, "too_short": [0, 0], "too_long": [0] * 5},
    _set_index("boxes", 0),
)
_variants("a_box_of_a_tensor", FEW_NUMBERS | {"none": 999}, _set_index("boxes", 0, 0))
_variants("a_box_in_a_file", FEW_NUMBERS | {"64": 64}, _set_index("boxes", 0, 1))
_variants(
    "a_box_that_begins",
    FEW_NUMBERS | {"in_the_header": 0, "far_behind": (1 << 50) - 1, "one_byte_behind": 10**5},
    _set_index("boxes", 0, 2),
)
_variants(
    "digests",
    {
        "none": "",
        "too_short": "0" * 21,
        "too_many": "0" * 44,
        "a_lot": "0" * (22 << 15),
        "of_others": "ABCDEF01234" * 2,
        "a_number": 0,
        "null": None,
    },
    _set_index("boxes", 0, 3),
)
_variants("own_tensors", {"null": None, "a_number": [1], "none": []}, _set_index("own"))
_variants(
    "an_own_tensor_that_begins",
    FEW_NUMBERS | {"in_the_header": 0, "far_behind": (1 << 50) - 1},
    _set_index("own", 0, "begin"),
)
_variants(
    "an_own_tensor_of_shape",
    {"a_tib": [1 << 37], "none": [0], "that_explodes": [1 << 49] * 32, "other": [2]},
    _set_index("own", 0, "shape"),
)
_variants("files_of_an_index", {"none": [], "null": None, "a_number": [1]}, _set_index("files"))
_variants(
    "a_file_of_bytes",
    FEW_NUMBERS | {"a_pib": (1 << 50) - 1, "none": 0},
    _set_index("files", 0, "num_bytes"),
)
_variants("a_header_with_a_digest", {"short": "0", "1": 1}, _set_index("files", 0, "header"))
_variants("a_header_with_a_digest", {"other": "0" * 32}, _set_index("files", 0, "header"), "found")


@refused
def an_index_that_says_nothing(target: Target) -> None:
    target.put({}, "rank00000.json")


@refused
def an_index_that_is_a_list(target: Target) -> None:
    target.put_text(b'[{"format":1}', "rank00000.json")


@refused
def two_boxes_in_one_place(target: Target) -> None:
    with target.index() as index:
        a, b = _two_of_one_size(index)
        b[2], b[3] = a[2], a[3]


@refused
def two_boxes_exchanged(target: Target) -> None:
    with target.index() as index:
        a, b = _two_of_one_size(index)
        a[2], a[3], b[2], b[3] = b[2], b[3], a[2], a[3]


def _two_of_one_size(index: Any) -> tuple[Any, Any]:
    sizes = _sizes_of(index)
    rows = index["boxes"]
    for n, a in enumerate(rows):
        for m, b in enumerate(rows[n + 1 :], n + 1):
            if sizes[n] == sizes[m] and a[1] == b[1] and a[3] != b[3]:
                return a, b
    raise AssertionError("no two boxes of one size")


def _sizes_of(index: Any) -> list[int]:
    """Return the bytes of each box: up to the next one of its file, or the file's end."""
    ends = {n: file["num_bytes"] for n, file in enumerate(index["files"])}
    ends[0] = min([own["begin"] for own in index["own"]], default=ends[0])
    sizes = []
    for row in reversed(index["boxes"]):
        sizes.append(ends[row[1]] - row[2])
        ends[row[1]] = row[2]
    return sizes[::-1]


@refused
def a_box_that_begins_one_byte_too_early(target: Target) -> None:
    with target.index() as index:
        at, row = next((n, r) for n, r in enumerate(index["boxes"]) if r[1] == 0)
        num_bytes = _sizes_of(index)[at]
        row[2] -= 1
        row[3] = _digests_at(target, row[2], num_bytes)


@refused
def a_box_that_lies_in_the_header(target: Target) -> None:
    with target.index() as index:
        at, row = next((n, r) for n, r in enumerate(index["boxes"]) if r[1] == 0)
        num_bytes = _sizes_of(index)[at]
        row[2] = 8
        row[3] = _digests_at(target, 8, num_bytes)


@refused
def a_box_that_is_missing(target: Target) -> None:
    with target.index() as index:
        index["boxes"].pop()


@refused
def a_box_that_stands_twice(target: Target) -> None:
    with target.index() as index:
        index["boxes"].append(index["boxes"][0])


@refused
def a_box_of_a_tensor_of_another_rank(target: Target) -> None:
    with target.index() as index:
        index["boxes"].append(target.json("rank00001.json")["boxes"][-1])


@refused
def ten_thousand_boxes_that_are_none(target: Target) -> None:
    with target.index() as index:
        index["boxes"] = [0] * 10**3


# -- headers of files: our loads follow the index, so that only verify reads them


@found
def a_header_with_a_hole(target: Target) -> None:
    with target.header() as header:
        next(reversed(header.values()))["data_offsets"][0] += 1


@found
def a_header_whose_tensors_overlap(target: Target) -> None:
    with target.header() as header:
        entries = [e for key, e in header.items() if key != "__metadata__"]
        entries[1]["data_offsets"] = entries[0]["data_offsets"]


@found
def a_header_with_another_dtype(target: Target) -> None:
    with target.header() as header:
        next(e for e in header.values() if e.get("dtype") == "F32")["dtype"] = "I32"


@found
def a_header_with_another_shape(target: Target) -> None:
    with target.header() as header:
        entry = next(e for e in header.values() if len(e.get("shape", ())) == 2)
        entry["shape"].reverse()


@found
def a_header_with_a_tensor_too_many(target: Target) -> None:
    with target.header() as header:
        header["more"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@found
def a_header_with_names_exchanged(target: Target) -> None:
    with target.header() as header:
        a, b = [k for k, e in header.items() if e.get("dtype") == "F32"][:2]
        header[a], header[b] = header[b], header[a]


@found
def a_header_that_says_another_place(target: Target) -> None:
    with target.header(1) as header:
        header["__metadata__"]["DCP_SHARDING_INFO"] = "{}"


for _label, _text in {
    "that_is_a_list": b"[]",
    "that_is_no_json": b"\xff\xfe",
    "of_metadata_that_is_a_list": b'{"__metadata__":[]}',
    "of_sharding_that_is_a_list": b'{"__metadata__":{"DCP_SHARDING_INFO":"[]"}}',
    "of_sharding_of_numbers": b'{"__metadata__":{"DCP_SHARDING_INFO":"{\\"a\\":1}"}}',
    "with_a_key_twice": b'{"a":{},"a":{}}',
    "that_is_deep": b"[" * 10**5,
    "of_numbers_below_zero": b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
    "of_shapes_that_are_text": b'{"a":{"dtype":"F32","shape":"11","data_offsets":[0,4]}}',
    "of_dims_without_end": b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
    % b",".join([b"%d" % ((1 << 62) - 1)] * 30_000),
    "of_300_dims": b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
    % b",".join([b"%d" % ((1 << 62) - 1)] * 300),
    "of_a_dtype_that_is_a_list": b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}',
}.items():
    CASES.append(
        Case(
            f"a_header_{_label}",
            "found",
            lambda target, text=_text: target.put_header(text),  # type: ignore[misc]
        )
    )


@found
def a_header_of_2_to_63_bytes(target: Target) -> None:
    text = target.path("rank00000-0.safetensors").read_bytes()
    end = 8 + int.from_bytes(text[:8], "little")
    target.put_header(text[8:end], length=1 << 63)


# -- values: what the user and the optimizer keep beside tensors


def _set_extra(target: Target, value: Any) -> None:
    with target.values() as values:
        values["extra"]["note"] = value


def _many(key: Any) -> Any:
    return {"$": "dict", "keys": key, "values": [0] * len(key)}


VALUES = {
    "a_tensor_from_nowhere": {"$": "tensor", "of": "nowhere"},
    "a_tensor_from_outside": {"$": "tensor", "of": "../../../etc/passwd"},
    "a_tensor_of_a_number": {"$": "tensor", "of": 5},
    "a_tensor_of_no_place": {"$": "tensor"},
    "a_tensor_of_two_places": {"$": "tensor", "of": "a", "and": "b"},
    "a_dtype_that_is_code": {"$": "dtype", "of": "os.system"},
    "a_torch_dtype_that_is_code": {"$": "torch.dtype", "of": "os.system"},
    "a_tag_that_is_code": {"$": "os.system", "of": ["true"]},
    "a_tag_that_is_a_class": {"$": "builtins.eval", "of": "1"},
    "a_tag_that_is_a_list": {"$": [], "of": 1},
    "a_tag_that_is_null": {"$": None},
    "a_device_that_is_code": {"$": "torch.device", "of": "os.system"},
    "a_device_of_none": {"$": "torch.device", "of": "cuda:999"},
    "a_factory_that_is_code": {
        "$": "defaultdict",
        "keys": [],
        "values": [],
        "factory": "os.system",
    },
    "an_array_of_objects": {"$": "numpy.array", "dtype": "|O", "shape": [1], "of": "AAAAAAAAAAA="},
    "an_array_of_a_tib": {"$": "numpy.array", "dtype": "<f4", "shape": [1 << 38], "of": ""},
    "an_array_that_explodes": {
        "$": "numpy.array",
        "dtype": "<f4",
        "shape": [(1 << 62) - 1] * 10_000,
        "of": "",
    },
    "an_array_of_nothing_that_explodes": {
        "$": "numpy.array",
        "dtype": "<f4",
        "shape": [1 << 62, 1 << 62, 0],
        "of": "",
    },
    "an_array_below_zero": {"$": "numpy.array", "dtype": "<f4", "shape": [-1], "of": ""},
    "an_array_of_65_dims": {
        "$": "numpy.array",
        "dtype": "<f4",
        "shape": [1] * 65,
        "of": "AAAAAA==",
    },
    "an_array_that_is_no_base64": {"$": "numpy.array", "dtype": "<f4", "shape": [1], "of": "!!"},
    "a_deque_without_end": {"$": "deque", "of": [1], "maxlen": 10**30},
    "a_deque_below_zero": {"$": "deque", "of": [], "maxlen": -1},
    "a_deque_too_full": {"$": "deque", "of": [1, 2], "maxlen": 1},
    "a_set_of_lists": {"$": "set", "of": [[1]]},
    "a_set_of_a_text": {"$": "set", "of": "abc"},
    "keys_that_are_dicts": {"$": "dict", "keys": [{}], "values": [1]},
    "keys_without_values": {"$": "dict", "keys": [1, 2], "values": [1]},
    "keys_of_one_value": {"$": "dict", "keys": [1, True], "values": [1, 2]},
    "keys_that_all_collide": _many(
        [{"$": "int", "of": hex(n * ((1 << 61) - 1))} for n in range(1, 5_000)]
    ),
    "members_that_all_collide": {
        "$": "set",
        "of": [{"$": "int", "of": hex(n * ((1 << 61) - 1))} for n in range(1, 5_000)],
    },
    "a_dict_of_texts": {"$": "dict", "keys": "ab", "values": "cd"},
    "a_text_that_is_no_utf8": {"$": "str", "of": "/w=="},
    "bytes_that_are_a_list": {"$": "bytes", "of": [1]},
    "an_int_that_is_code": {"$": "int", "of": "__import__('os')"},
    "a_float_of_nine_bytes": {"$": "float", "of": "00" * 9},
    "a_complex_of_one_byte": {"$": "complex", "of": "00"},
    "a_size_of_texts": {"$": "torch.Size", "of": ["1"]},
    "a_pickle": {"$": "pickle", "of": "gASVDwAAAAAAAAA="},
    "fields_too_many": {"$": "tuple", "of": [], "class": "os"},
    "depth_beyond_ours": json.loads('{"$":"tuple","of":[' * 31 + "]}" * 31),
}
_variants("a_value_with", VALUES, _set_extra, "unfit")


def _set_group(target: Target, value: Any) -> None:
    with target.manifest() as manifest:
        manifest["optimizer"]["groups"][0]["lr"] = value


_variants("a_group_with", dict(list(VALUES.items())[::3]), _set_group, "unfit")
_variants(
    "groups",
    {
        "null": None,
        "a_number": 5,
        "a_text": "ab",
        "an_object": {},
        "none": [],
        "of_numbers": [1],
        "of_nothing": [{}],
        "too_many": [{"params": []}] * 1000,
    },
    _set("optimizer", "groups"),
    "unfit",
)
_variants(
    "params_of_a_group",
    {
        "null": None,
        "a_number": 5,
        "a_text": "up.weight",
        "of_numbers": [1],
        "of_lists": [[]],
        "of_nothing": [],
        "of_half_a_character": [{"$": "str", "of": "7aCA"}],
        "outside": ["../../etc/passwd"],
    },
    _set("optimizer", "groups", 0, "params"),
    "unfit",
)
_variants(
    "state_of_the_optimizer",
    {
        "null": None,
        "a_list": [],
        "of_a_number": {"up.bias": 5},
        "of_a_tag": {"up.bias": {"$": "os.system", "of": "true"}},
    },
    _set("optimizer", "state"),
    "unfit",
)
_variants(
    "an_optimizer",
    {"null": None, "a_list": [], "another": {"class_name": "SGD"}},
    _set("optimizer"),
    "unfit",
)
_variants(
    "a_class_of_the_optimizer",
    {"other": "os.system", "1": 1},
    _set("optimizer", "class_name"),
    "unfit",
)


@unfit
def one_tensor_in_ten_thousand_places(target: Target) -> None:
    with target.values() as values:
        place = values["extra"]["loader"]["order"]
        values["extra"]["note"] = [place] * 10_000


@unfit
def one_tensor_in_ten_thousand_places_of_a_group(target: Target) -> None:
    with target.manifest() as manifest:
        group = manifest["optimizer"]["groups"][0]
        group["more"] = [group["lr"]] * 10_000


def _set_values(*keys: str) -> Callable[[Target, Any], None]:
    return _set_index("values", *keys)


_variants("values", {"null": None, "a_list": []}, _set_values())
_variants("values", {"none": {}, "of_1": {"extra": 1}}, _set_values(), "unfit")
_variants(
    "extra",
    {"null": None, "a_list": [], "a_text": "loader", "none": {}},
    _set_values("extra"),
    "unfit",
)
_variants(
    "modules",
    {"null": None, "a_list": [], "a_text": "x", "1": 1},
    _set_values("modules"),
    "unfit",
)
_variants(
    "generators",
    {"null": None, "a_list": [], "a_text": "x", "of_others": {"a": 1}, "1": 1},
    _set_values("generators"),
    "unfit",
)
for _generator in ("torch", "numpy", "python"):
    _variants(
        f"a_generator_of_{_generator}",
        {
            "of_nothing": "",
            "of_one_byte": "AA==",
            "of_zeros": "A" * 6742 + "==",  # as many bytes as torch's has
            "of_a_megabyte": "A" * (1 << 20),
            "that_is_no_base64": "!!",
            "that_is_a_number": 1,
            "that_is_null": None,
        },
        _set_values("generators", _generator),
        "unfit",
    )
