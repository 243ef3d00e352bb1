"""Small defects in the source, one at a time: `make soak CAMPAIGN=mutants TRIALS=80 SEED=0`.

Each trial draws a defect by its seed. At first the suite runs once on a copy of the package in
which the places of all of them note the files of tests that reach them. Then each trial puts its
defect into another copy and runs these files, those that end soonest first. A defect that no test
finds is printed with its file, line and text, and so is one that no test reaches.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"
ROOMS = "layout", "comm", "tensor", "unit", "engine", "offload", "step", "checkpoint"
KINDS = "divisor", "slice", "wait", "lock", "flag", "state"
WAITS = ("wait", "finish", "finish_unshard", "finish_read", "finish_steps", "wait_stream", "join")
SOON_S = 60.0  # files that end within it, all together, are tried first
ABOUT_SOURCE = (
    "tests/test_architecture.py",
    "tests/test_docs.py",
)  # of the checkout, not of the copy
NOTE = """\
import os

seen = set()

def reached(seed):
    line = f"{seed} {os.environ.get('PYTEST_CURRENT_TEST', '').partition('::')[0]}\\n"
    if line not in seen:
        seen.add(line)
        with open(__file__ + ".txt", "a") as file:
            file.write(line)
"""


@dataclass(frozen=True)
class Mutant:
    """One defect: in ``file``, at ``line``, ``before`` is replaced by ``after``."""

    seed: int
    kind: str
    file: str
    line: int
    before: str
    after: str


def sites_of(tree):
    """Yield (kind, node, what makes the node to put in its place)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
            if not _is_path(node):
                yield "divisor", node, lambda n=node: ast.BinOp(n.left, n.op, _plus_one(n.right))
        elif isinstance(node, ast.Slice) and (node.upper is not None or node.lower is not None):
            yield "slice", node, lambda n=node: _shifted(n)
        elif isinstance(node, ast.Expr) and _called(node.value) in WAITS:
            yield "wait", node, ast.Pass
        elif isinstance(node, ast.With) and "lock" in ast.unparse(node.items[0].context_expr):
            yield "lock", node, lambda n=node: ast.If(ast.Constant(True), n.body, [])
        elif isinstance(node, ast.Call) and _called(node) == "any":
            yield "flag", node, lambda n=node: ast.Call(ast.Name("all"), n.args, [])
        elif isinstance(node, ast.FunctionDef) and node.name.startswith(("is_", "has_")):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    value = inner.value
                    yield "state", inner, lambda v=value: ast.Return(ast.UnaryOp(ast.Not(), v))


def _is_path(node):
    """Tell whether a quotient is a path: adding one to its end fails wherever it is reached."""
    text = ast.unparse(node)
    return any(part in text for part in ("folder", "path", "parent", "name", "root"))


def _called(node):
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func).rpartition(".")[2]


def _plus_one(node):
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _shifted(node):
    if node.upper is not None:
        return ast.Slice(node.lower, _plus_one(node.upper), node.step)
    return ast.Slice(_plus_one(node.lower), node.upper, node.step)


class _Replace(ast.NodeTransformer):
    """Replace the nodes at some places, by what ``made`` has for each."""

    def __init__(self, made):
        self._made = made

    def visit(self, node):
        place = place_of(node)
        kept = super().generic_visit(node)
        return self._made[place](kept) if place in self._made else kept


def place_of(node):
    """Return what tells a node of a file from all others."""
    places = "lineno", "col_offset", "end_lineno", "end_col_offset"
    return *(getattr(node, name, -1) for name in places), type(node)


def rewrite(path, made):
    """Replace nodes of a file, by their places."""
    changed = _Replace(made).visit(ast.parse(path.read_text()))
    path.write_text(ast.unparse(ast.fix_missing_locations(changed)))


def draw(seed, package):
    """Return the defect of a seed, with the place of its node and what makes the other one."""
    chance = random.Random(seed)
    files = [path for room in ROOMS for path in sorted((package / room).glob("*.py"))]
    kind = chance.choice(KINDS)
    while True:
        path = chance.choice(files)
        tree = ast.parse(path.read_text())
        sites = [(node, make) for found, node, make in sites_of(tree) if found == kind]
        if sites:
            break
    node, make = chance.choice(sites)
    before, made = ast.unparse(node), make()
    after = ast.unparse(ast.fix_missing_locations(made))
    name = path.relative_to(package).as_posix()
    lines = (text.split("\n")[0] for text in (before, after))
    return Mutant(seed, kind, name, node.lineno, *lines), place_of(node), made


def noted(seeds):
    """Return what makes a node note the tests that reach it, and then do its work."""
    calls = [f"__import__('reached_by').reached({seed})" for seed in seeds]

    def after_note(value):
        return ast.Subscript(ast.Tuple([*map(_parsed, calls), value]), ast.Constant(-1))

    def make(node):
        if isinstance(node, ast.Return):
            return ast.Return(after_note(node.value))
        if isinstance(node, ast.stmt):
            return [*(ast.Expr(_parsed(call)) for call in calls), node]
        if not isinstance(node, ast.Slice):
            return after_note(node)
        if node.upper is not None:
            return ast.Slice(node.lower, after_note(node.upper), node.step)
        return ast.Slice(after_note(node.lower), None, node.step)

    return make


def _parsed(text):
    return ast.parse(text, mode="eval").body


def copy_to(folder):
    """Copy the package into a folder, and return it."""
    package = Path(folder) / "shardwise"
    shutil.copytree(SOURCE, package)
    return package


def run_tests(package, limit_s, *arguments):
    """Run pytest on the copy; return its exit code and output, or None if it did not end."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    # The project's own setting has the source, before PYTHONPATH.
    command += ["-o", f"pythonpath={package.parent} labs tests examples docs", *arguments]
    env = os.environ | {"PYTHONPATH": str(package.parent)}
    try:
        return subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None


def reached_by(drawn, limit_s):
    """Run the suite once.

    Return the files that reach each seed's place, those that end soonest first, the seconds of each
    file, and the tests that fail without a defect.
    """
    with tempfile.TemporaryDirectory() as folder:
        package, table = copy_to(folder), Path(folder) / "times.xml"
        note = package.parent / "reached_by.py"
        note.write_text(NOTE)
        by_file = defaultdict(lambda: defaultdict(list))
        for mutant, place, _ in drawn:
            by_file[mutant.file][place].append(mutant.seed)
        for file, places in by_file.items():
            rewrite(package / file, {place: noted(seeds) for place, seeds in places.items()})
        others = [f"--ignore={file}" for file in ABOUT_SOURCE]
        done = run_tests(package, limit_s, f"--junitxml={table}", *others, "tests")
        if done is None:
            sys.exit(f"the suite did not end within {limit_s:g} s; give --limit-s")
        seconds, failing = defaultdict(float), []
        for case in ElementTree.parse(table).getroot().iter("testcase"):
            path = case.get("classname").replace(".", "/") + ".py"
            file = next(ROOT.glob(path), None)
            if file is not None:
                name = file.relative_to(ROOT).as_posix()
                seconds[name] += float(case.get("time"))
                if case.find("failure") is not None or case.find("error") is not None:
                    failing.append(f"{name}::{case.get('name')}")
        reached = defaultdict(set)
        lines = Path(f"{note}.txt").read_text().splitlines()
        for seed, _, file in (line.partition(" ") for line in lines):
            if file in seconds:
                reached[int(seed)].add(file)
    ordered = {seed: sorted(files, key=seconds.__getitem__) for seed, files in reached.items()}
    return ordered, seconds, failing


def find(package, files, seconds, failing, limit_s):
    """Return the first test that fails with the defect, "(no end)", or "" if all pass."""
    total, soon = 0.0, []
    for file in files:
        total += seconds[file]
        if total <= SOON_S or not soon:
            soon.append(file)
    known = [f"--deselect={test}" for test in failing]
    for part in (soon, [file for file in files if file not in soon]):
        done = run_tests(package, limit_s, "-x", *known, *part) if part else None
        if part and done is None:
            return "(no end)"
        if done is not None and done.returncode not in (0, 5):  # 5: all are deselected
            failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            return failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"
    return ""


def main():
    """Run the trials; the exit code is 0 if every defect was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    drawn = [draw(seed, SOURCE) for seed in range(asked.seed, asked.seed + asked.trials)]
    reached, seconds, failing = reached_by(drawn, asked.limit_s)
    if failing:
        print(f"left out, as they fail without a defect: {', '.join(failing)}", flush=True)
    rows = []
    for mutant, place, made in drawn:
        files, found, began_s = reached.get(mutant.seed, []), "", time.monotonic()
        if files:
            with tempfile.TemporaryDirectory() as folder:
                package = copy_to(folder)
                rewrite(package / mutant.file, {place: lambda _, made=made: made})
                found = find(package, files, seconds, failing, asked.limit_s)
        rows.append({**asdict(mutant), "files": files, "found_by": found})
        verdict = found or ("NOT FOUND" if files else "NOT REACHED")
        where = f"{mutant.file}:{mutant.line} {mutant.before} -> {mutant.after}"
        print(
            f"{mutant.seed} {mutant.kind} {where}: {verdict} by {len(files)} files "
            f"({time.monotonic() - began_s:.0f} s)",
            flush=True,
        )
        if asked.json is not None:
            asked.json.write_text(json.dumps(rows, indent=1))
    num = sum(bool(row["found_by"]) for row in rows)
    print(f"{num} of {len(rows)} defects found")
    return int(num < len(rows))


if __name__ == "__main__":
    sys.exit(main())
