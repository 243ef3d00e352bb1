"""Hostile files for every command that reads some: runs, YAML, JSON, pickles.

Run it with a seed and a number of trials; each writes a file or a folder as an attacker would, and
calls the commands that read it, within limits of time and memory. A command may succeed or print
one error; anything else is printed, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "monitor"))

from records import write_record
from shardwise.cli.main import app

LIMIT_S = 20.0  # of processor time; each is to take two, and machines are shared
OVER_BYTES = 200 << 20
MOST_CHARS = 20_000  # of what is said; a report of a run has some thousand
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
BAD = [
    *(None, True, -1, 0, 1 << 62, 10**400, 0.5, -1e308, 1e999, float("nan"), "", "x" * 100_000),
    *(ESCAPES, "../../etc/passwd", [], {}, [[]], {"a": {}}, [1] * 2000, {"": ""}),
]


class Slow(BaseException):
    """A command took more than its time."""


def spots_of(tree):
    """Yield (container, key) of every place in a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from spots_of(tree[key])


def spoil(tree, draw):
    """Change one place of a tree: another value, another name, or nothing there."""
    container, key = draw.choice(list(spots_of(tree)))
    how = draw.randrange(8)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[draw.choice((ESCAPES, "-1", "9" * 5000, "a" * 9999))] = container.pop(key)
    else:
        container[key] = draw.choice(BAD)


def spoil_run(run, draw):
    """Change one line of one file of a run, or its bytes."""
    folder = run / "observed"
    path = folder / draw.choice(("run.json", "steps.jsonl", "steps.jsonl", "rank-0.jsonl"))
    how = draw.randrange(20)
    if how == 0:
        path.write_bytes(
            draw.choice((b"", b"\xff\0", b"[" * 100_000, b"1\n" * 9, b"[" * 9 + b"\n"))
        )
    elif how == 1:
        path.unlink()
        draw.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")))()
    elif path.name == "run.json":
        facts = json.loads(path.read_text())
        spoil(facts, draw)
        path.write_text(json.dumps(facts))
    else:
        lines = path.read_text().splitlines()
        number = draw.randrange(len(lines))
        line = json.loads(lines[number])
        spoil(line, draw)
        lines[number] = json.dumps(line)
        path.write_text("\n".join(lines) + "\n")


def anchors(levels, width):
    """Return YAML whose last key stands for ``width`` to the power of ``levels`` values."""
    rows = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels + 1)]
    return "\n".join(["a0: &a0 [x]", *rows, f"optimizer_options: {{betas: *a{levels}}}"])


KEY_FILES = {
    "a few levels of anchors": anchors(4, 9),
    "an anchor bomb": anchors(12, 9),
    "a chain of anchors": anchors(300, 1),
    "an anchor in itself": "stage: &a [*a]",
    "nesting": "units: " + "[" * 5000,
    "digits": "steps: " + "9" * 5000,
    "hex digits": "steps: 0x" + "f" * 5000,
    "a huge value": "stage: " + "x" * 30_000,
    "a huge key": "x" * 1000 + ": 1",
    "a huge file": "a: 1\n" * 1_000_000,
    "many keys": "".join(f"k{i}: 1\n" for i in range(2000)),
    "many values": "units: [" + "a," * 15_000 + "]",
    "a key twice": "stage: 1\nstage: 2",
    "escapes": json.dumps({"stage": ESCAPES, ESCAPES: 1}),
    "a wrong tag": 'steps: !!int ""',
    "an object": "steps: !!python/object/apply:os.system [true]",
    "no text": "\0\xff",
    "comment keys": "{" + ",".join(f'"//{i}": 1' for i in range(300_000)) + "}",
    "a key twice in JSON": '{"zero_optimization": {"stage": 1, "stage": 2}}',
    "nesting in JSON": '{"a":' * 50_000,
    "lists in JSON": '{"fp16": [' + "[]," * 1_000_000 + "0]}",
    "digits in JSON": '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
    "a huge value in JSON": json.dumps(
        {"model_type": "x" * 2_000_000, "hidden_size": "y" * 999999}
    ),
    "infinity": '{"model_type": "llama", "hidden_size": Infinity, "train_batch_size": NaN}',
}


def say(arguments, environment=None):
    """Run a command; return what is wrong with how it went, "" for nothing."""
    out = io.StringIO()
    os.environ.update(environment or {})
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            warnings.catch_warnings(action="ignore"),
        ):
            app(arguments, standalone_mode=False)
    except SystemExit as error:
        if error.code not in (0, 1, 2, None):
            return f"exit code {error.code}"
    except (Exception, Slow) as error:
        if type(error).__module__.startswith(("click", "typer")):
            return ""
        return "".join(traceback.format_exception(error, limit=-4))[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for name in environment or {}:
            del os.environ[name]
    said = out.getvalue()
    if bad := {c for c in said if not c.isprintable() and c not in "\n\t"}:
        return f"{bad} reach the terminal: {said[-300:]!r}"
    return f"{len(said)} characters: {said[:300]}" if len(said) > MOST_CHARS else ""


def surfaces_of_run(run):
    """Yield the commands that read a run."""
    yield ["doctor", str(run)]
    yield ["doctor", "--json", str(run)]
    yield ["top", "--once", str(run)]
    yield ["top", "--json", str(run)]
    yield ["report", str(run), "--trace", str(run / "trace.json"), "--output", str(run / "r.html")]


def surfaces_of_file(yaml, as_json, run):
    """Yield the commands that read a file of keys or of bytes, under two names."""
    yield ["train", str(yaml)]
    yield ["train", "--deepspeed", str(as_json)]
    yield ["convert", str(yaml)]
    yield ["convert", str(as_json)]
    yield ["plan", str(yaml)]
    yield ["plan", str(as_json)]
    yield ["plan", "gpt2", "--calibration", str(as_json)]
    yield ["ckpt", "inspect", str(yaml.parent)]
    yield ["ckpt", "import", str(as_json), str(yaml.parent / "imported")]
    yield ["report", str(run), "--output", str(run / "r.html")]  # beside its config.yaml


def trials(seed, count):
    """Write hostile files, and yield what was done, and each command that reads them."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        run = write_record(folder / "run", num_steps=12)
        yield "RANK", ["train"], {"RANK": "abc", "WORLD_SIZE": "2"}
        yield "WORLD_SIZE", ["train"], {"RANK": "0", "WORLD_SIZE": "9" * 5000}
        named = write_record(folder / f"run{ESCAPES}", num_steps=12)
        for command in (*surfaces_of_run(named), ["doctor", str(named / "none")]):
            yield "escapes in a path", command, {}
        for command in surfaces_of_file(named / "none.yaml", named / "none.json", named):
            yield "escapes in a path", command, {}
        for name, text in KEY_FILES.items():
            yaml, as_json = folder / "run" / "config.yaml", folder / "keys.json"
            for path in (yaml, as_json):
                path.write_text(text, encoding="latin-1" if text.isascii() else "utf-8")
            for command in surfaces_of_file(yaml, as_json, run):
                yield name, command, {}
        for number in range(count):
            draw = random.Random(f"{seed}/{number}")
            run = write_record(folder / f"run{number}", num_steps=12)
            spoil_run(run, draw)
            for command in surfaces_of_run(run):
                yield f"run {seed}/{number}", command, {}


def _alarm(signal_number, frame):
    raise Slow


def limit_memory():
    """Let allocations beyond the allowed bytes fail."""
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmSize:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + OVER_BYTES, now + OVER_BYTES))


def main(seed, count):
    signal.signal(signal.SIGPROF, _alarm)
    with tempfile.TemporaryDirectory() as root:  # imports are no cost of a file
        run = write_record(Path(root, "run"), num_steps=12)
        for command in (*surfaces_of_run(run), ["plan", "gpt2"]):
            assert not say(command), say(command)
        say(["ckpt", "import", root, root + "/imported"])
    limit_memory()
    wrong = slowest = 0
    for name, command, environment in trials(seed, count):
        began_s = time.process_time()
        problem = say(command, environment)
        now_s = time.process_time() - began_s
        slowest = max(slowest, now_s)
        if now_s > 2:
            print(f"{name}: {' '.join(command[:2])}: {now_s:.1f} s", flush=True)
        if problem:
            wrong += 1
            print(f"{name}: {' '.join(command[:2])}: {problem}\n", flush=True)
    print(f"{wrong} wrong, the slowest command took {slowest:.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
