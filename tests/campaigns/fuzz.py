"""Fuzz the parsers of checkpoints (manifests, indexes, headers, JSON, values), tokens and text.

    python tests/campaigns/fuzz.py [--trials N] [--seconds S] [--seed N] [--replay FILE]

Half of the trials change bytes, half change the JSON tree and make all digests right again; files
of tokens and of text have bytes alone. Only CheckpointError and ConfigError may come out, within a
second of processor time and 64 MiB of memory. The first violation is written to a file, which
--replay runs again, and the exit code is 1.

Each trial is drawn from its own number and the seed, so that a trial is the same whatever ran
before it.
"""

from __future__ import annotations

import argparse
import atexit
import base64
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint.container import (
    build_header,
    chunk_digests,
    digest_of,
    parse_header,
    place,
)
from shardwise.checkpoint.generators import read_generators, set_generators
from shardwise.checkpoint.manifest import (
    Manifest,
    RankIndex,
    find_extents,
    parse_index,
    parse_manifest,
    seal,
)
from shardwise.checkpoint.read import optimizer_info
from shardwise.checkpoint.values import decode, encode
from shardwise.data.tokens import TokenFiles
from shardwise.errors import CheckpointError, ConfigError
from shardwise.strict_json import dumps, loads
from shardwise.train.text import read_texts

MIB = 1 << 20
OVER_BYTES = 64 * MIB
LIMIT_S = 1.0
PROGRESS_S = 10.0
SEAL = b',"digest":"'


class Slow(BaseException):
    """A trial took more than its second; no `except Exception` holds it up."""


# -- the good ones, which trials start from


def good_values():
    tensor, cpu = torch.arange(6), torch.device("cpu")
    value = {
        "tuple": (1, 2.5, None, "text"),
        "odd": {1: "a", (2, 3): b"bytes", "$": 10**30},
        "set": {1, 2},
        "nested": [{"a": [{"b": complex(1, 2)}]}],
        "array": tensor.numpy(),
        "scalar": tensor.numpy()[1],
        "floats": [float("nan"), -0.0, 1e300],
        "kinds": [torch.float32, torch.Size([2, 3]), cpu],
        "tensor": tensor,
    }
    return encode(value, "value")[0]


def good_manifest(index):
    groups = [{"lr": 0.1, "betas": {"$": "tuple", "of": [0.9, 0.99]}, "params": ["w", "b"]}]
    tensors = [
        {"kind": "param", "name": "w", "dtype": "F32", "shape": [7, 5], "layout": 0, "index": 0},
        {"kind": "param", "name": "b", "dtype": "BF16", "shape": [7], "layout": 0, "index": 1},
        {"kind": "buffer", "name": "n", "dtype": "I64", "shape": [], "rank": 1},
        {"kind": "optimizer", "name": "w", "state": "m", "dtype": "F32", "shape": [7, 5]},
    ]
    tensors[3] |= {"layout": 0, "index": 0}
    row = {"index_bytes": len(index), "digest": digest_of(index), "num_files": 2}
    return Manifest.model_validate(
        {
            "format": 1,
            "shardwise": "0",
            "torch": "2",
            "run": "0123456789abcdef",
            "step": 3,
            "saved_at": "",
            "stage": 3,
            "num_shards": 2,
            "num_replicas": 1,
            "layouts": [{"kind": "flat", "shapes": [[7, 5], [7]]}],
            "tensors": tensors,
            "tied": {"v": "w"},
            "optimizer": {"class_name": "A", "groups": groups, "state": {"w": {"n": 1}}},
            "ranks": [row | {"file_bytes": 366}] * 2,
        }
    )


def good_index():
    data = memoryview(bytes(400))
    boxes = []
    at = {0: 100, 1: 50}
    for tensor, numel, file in ((0, 20, 0), (3, 20, 0), (0, 1, 1), (3, 1, 1)):
        size = 4 * numel
        boxes.append([tensor, file, at[file], chunk_digests(data[:size])])
        at[file] += size
    own = {"kind": "extra", "name": "tensor", "dtype": "I64", "shape": [6], "begin": at[0]}
    header = digest_of(b"")
    return RankIndex.model_validate(
        {
            "format": 1,
            "run": "0123456789abcdef",
            "step": 3,
            "rank": 0,
            "files": [{"num_bytes": n, "header": header} for n in (at[0] + 48, at[1])],
            "boxes": boxes,
            "own": [own | {"digests": chunk_digests(data[:48])}],
            "values": {
                "extra": {"value": good_values()},
                "modules": {},
                "generators": read_generators(torch.device("cpu")),
            },
        }
    )


def good_header():
    boxes = [("w", "F32", (4, 5), (0, 0)), ("b", "BF16", (3,), (4,)), ("n", "I64", (), ())]
    return build_header(place(boxes))[8:]


HEADER_BYTES = 80 + 6 + 8
INDEX = seal(good_index())
MANIFEST = good_manifest(INDEX)


# -- what is run: each takes bytes and may raise CheckpointError


def _tensor(place):
    if place != "tensor":
        raise CheckpointError(place)
    return torch.zeros(6)


def run_manifest(data):
    manifest = parse_manifest(data, "manifest")
    for rank in {0, manifest.num_ranks - 1}:
        for _ in zip(range(1000), manifest.all_boxes(rank), strict=False):
            pass
    if manifest.optimizer is not None:
        optimizer_info(manifest.optimizer, lambda value: decode(value, _tensor))


def run_index(data):
    index = parse_index(data, "index")
    with contextlib.suppress(ValueError):
        find_extents(MANIFEST, index)
    for key, value in index.values.items():
        made = decode(value, _tensor, key)
        if key == "generators":
            set_generators(made, torch.device("cpu"))


def run_header(data):
    parse_header(data, HEADER_BYTES, "header")


def run_json(data):
    dumps(loads(data, "json"))


def run_values(data):
    encode(decode(loads(data, "values"), _tensor), "values")


FILES = Path(tempfile.mkdtemp(prefix="fuzz-"))
atexit.register(shutil.rmtree, FILES, ignore_errors=True)


def run_tokens(data):
    path = FILES / "tokens.npy"
    path.write_bytes(data)
    files = TokenFiles([path], 4)
    for window in {0, len(files) - 1}:
        files[window]


def run_text(data):
    for name in ("text.jsonl", "text.txt"):
        (FILES / name).write_bytes(data)
        for _ in read_texts(FILES / name):
            pass


def good_tokens():
    out = io.BytesIO()
    np.save(out, np.arange(99, dtype=np.uint16))
    return out.getvalue()


def reseal(data):
    body = data.rstrip()
    body = body[:-1] if body.endswith(b"}") else body
    return body + SEAL + digest_of(body).encode() + b'"}\n'


Run = Callable[[bytes], None]
# name: (what runs, a good input, whether it is sealed, its share of the trials)
KINDS = {
    "manifest": (run_manifest, seal(MANIFEST), True, 4),
    "index": (run_index, INDEX, True, 3),
    "header": (run_header, good_header(), False, 4),
    "json": (run_json, dumps(good_values()), False, 1),
    "values": (run_values, dumps(good_values()), False, 4),
    "tokens": (run_tokens, good_tokens(), False, 2),
    "text": (run_text, b'{"text": "one"}\n{"text": "\xc3\xa9"}\n', False, 1),
}
BYTES_ALONE = ("tokens", "text")

# -- mutations

SCALARS = [
    *(None, True, False, 0, 1, -1, 2, 7, 64, 255, 2**31, 2**53, 2**62, 2**63, -(2**63), 2**64),
    *(10**30, 0.5, 1e308, -0.0, "", "a", "w", "tensor", "F32", "BF16", "os.system", "../../x"),
    *(
        "/etc/passwd",
        "a\0b",
        "w\u200d",
        "\uff57",
        "0" * 32,
        "A" * 5000,
        "7aCA",
        "AA==",
        "0x1",
        "<f4",
    ),
    *([], {}, [[]], [0], [2**62] * 40, [2**49] * 32, [1] * 33, {"$": "tensor", "of": "tensor"}),
    *({"$": "tuple", "of": [1]}, {"$": "dict", "keys": [[]], "values": [1]}, {"$": []}),
    *({"$": "numpy.array", "dtype": "<f4", "shape": [2**62, 2**62, 0], "of": ""}, {"$": "int"}),
    *({"$": "deque", "of": [], "maxlen": 2**62}, {"$": "set", "of": [1, True]}, {"": {"": {}}}),
]
TOKENS = [
    *(b"[" * 70, b'{"a":' * 70, b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\\ud800", b"\xff"),
    *(b"\0", b'"', b"}", b"]", b",", b":", b" " * 64, b"null", b"-1", b"0", b"\xef\xbb\xbf", b"\\"),
    *(b'"$":', b'"digest":"', b"9223372036854775808", b"true", b"1.0", b"\xed\xa0\x80"),
]


def _spots(tree):
    """List (container, key) of every place in a tree."""
    spots, rest = [], [tree]
    while rest:
        node = rest.pop()
        keys = node if isinstance(node, dict) else range(len(node))
        for key in keys:
            spots.append((node, key))
            if isinstance(node[key], dict | list):
                rest.append(node[key])
    return spots


def mutate_tree(tree, draw):
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        spots = _spots(tree)
        if not spots:
            return draw.choice(SCALARS)
        node, key = draw.choice(spots)
        other, other_key = draw.choice(spots)
        how = draw.randrange(8)
        if how < 3:
            node[key] = json.loads(json.dumps(draw.choice(SCALARS)))
        elif how == 3:
            del node[key]
        elif how == 4:
            node[key] = json.loads(json.dumps(other[other_key]))
        elif how == 5 and isinstance(node, list):
            node.insert(key, json.loads(json.dumps(node[key])))
        elif how == 5:
            node[str(draw.choice(SCALARS))[:40]] = node.pop(key)
        elif how == 6 and type(node[key]) is int:
            node[key] += draw.choice((-1, 1, 8, 1 << 20, 1 << 49))
        else:
            node[key], other[other_key] = other[other_key], node[key]
            if len(_reachable(tree)) > 10_000:  # it may now contain itself
                return draw.choice(SCALARS)
    return tree


def _reachable(tree):
    found, rest = [], [tree]
    while rest and len(found) <= 10_000:
        node = rest.pop()
        found.append(node)
        if isinstance(node, dict | list):
            rest += node.values() if isinstance(node, dict) else node
    return found


def mutate_bytes(data, draw):
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(changed) + 1)
        how = draw.randrange(5)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            del changed[at : at + draw.choice((1, 2, 16, 256))]
        elif how == 2:
            changed[at:at] = draw.choice(TOKENS)
        elif how == 3:
            changed[at : at + 1] = draw.choice(TOKENS)
        else:
            begin = draw.randrange(len(changed) + 1)
            changed[at:at] = changed[begin : begin + draw.choice((1, 8, 64))]
    return bytes(changed)


TREES = {
    name: json.loads(data.rpartition(SEAL)[0] + b"}" if is_sealed else data)
    for name, (_, data, is_sealed, _) in KINDS.items()
    if name not in BYTES_ALONE
}
TEXTS = {name: json.dumps(tree) for name, tree in TREES.items()}
NAMES = [name for name, (_, _, _, share) in KINDS.items() for _ in range(share)]


def make(seed, number):
    """Return what trial ``number`` runs: the kind, the level and the input."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choice(NAMES)
    _, good, is_sealed, _ = KINDS[name]
    if draw.random() < 0.5 or name in BYTES_ALONE:
        data = mutate_bytes(good.rpartition(SEAL)[0] + b"}" if is_sealed else good, draw)
        if is_sealed:
            if draw.random() < 0.1:
                return name, "unsealed bytes", mutate_bytes(good, draw)
            return name, "sealed bytes", reseal(data)
        return name, "bytes", data
    tree = mutate_tree(json.loads(TEXTS[name]), draw)
    data = json.dumps(tree, separators=(",", ":")).encode()
    return name, "tree", reseal(data) if is_sealed else data


# -- the campaign


def _alarm(signal_number, frame):
    raise Slow


def _status_bytes(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1]) * 1024


def limit_memory():
    """Let every allocation beyond the allowed bytes fail, and so come out as an error."""
    limit = _status_bytes("VmSize") + OVER_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_one(name, data):
    """Run one input; return its outcome, and what is wrong with that ("" for nothing)."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        KINDS[name][0](data)
        return "accepted", ""
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, ""
    except (Exception, Slow) as error:
        return "VIOLATION", "".join(traceback.format_exception(error, limit=-6))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def write_case(folder, seed, number, name, data, text):
    path = folder / f"fuzz-{seed}-{number}.json"
    case = {"kind": name, "seed": seed, "trial": number, "data": base64.b64encode(data).decode()}
    path.write_text(json.dumps(case | {"error": text}, indent=1))
    return path


def campaign(arguments):
    outcomes = Counter()
    print(f"seed {arguments.seed}, {arguments.trials:,} trials", flush=True)
    started_s = told_s = time.monotonic()
    number = resident = 0
    start_bytes = _status_bytes("VmRSS")
    while number < arguments.trials:
        name, level, data = make(arguments.seed, number)
        outcome, text = run_one(name, data)
        outcomes[name, level, outcome] += 1
        if outcome == "VIOLATION":
            path = write_case(arguments.folder, arguments.seed, number, name, data, text)
            print(f"{text}\ntrial {number} ({name}, {level}): replay with --replay {path}")
            return 1
        number += 1
        now_s = time.monotonic()
        if now_s - told_s > PROGRESS_S:
            told_s = now_s
            resident = max(resident, _status_bytes("VmHWM") - start_bytes)
            print(f"{number:,} trials, {number / (now_s - started_s):,.0f} a second", flush=True)
        if arguments.seconds and now_s - started_s > arguments.seconds:
            break
    seconds = time.monotonic() - started_s
    for key, count in sorted(outcomes.items()):
        print(f"{count:>10,}  {', '.join(key)}")
    resident = max(resident, _status_bytes("VmHWM") - start_bytes)
    print(f"{number:,} trials in {seconds:.0f} s, {number / seconds:,.0f} a second, no violation")
    print(
        f"{time.process_time():.0f} s of processor time, peak memory grew {resident / MIB:.0f} MiB"
    )
    return 0


def replay(path):
    case = json.loads(path.read_text())
    outcome, text = run_one(case["kind"], base64.b64decode(case["data"]))
    print(text or outcome)
    return int(outcome == "VIOLATION")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0, help="end after that time")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--replay", type=Path, help="run one recorded case again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _alarm)
    for name, (run, data, _, _) in KINDS.items():
        run(data)  # imports and caches are there before anything is counted
        run_one(name, b"{")
    limit_memory()
    return replay(arguments.replay) if arguments.replay else campaign(arguments)


if __name__ == "__main__":
    sys.exit(main())
