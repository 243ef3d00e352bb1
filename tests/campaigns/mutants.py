"""Small defects in the source, one at a time: `make soak CAMPAIGN=mutants TRIALS=80 SEED=0`.

Each trial copies the package, puts one defect into it by the seed, and runs the tests of the room.
A defect that no test finds is printed with its file, line and text. The report is JSON.
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
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"
TESTS = {  # the tests that should find a defect of a room, the quickest first
    "layout": ["test_layout.py", "engine/test_scenarios.py", "test_traffic_memory.py"],
    "comm": [
        "engine/test_scenarios.py",
        "test_traffic_memory.py",
        "engine/test_encodings.py",
    ],
    "tensor": ["test_shard_tensor.py", "test_shard_tensor_sweep.py", "engine/test_scenarios.py"],
    "unit": ["engine/test_scenarios.py", "test_traffic_memory.py", "engine/test_stream_order.py"],
    "engine": ["engine/test_scenarios.py", "engine/test_passes.py", "engine/test_stream_order.py"],
    "offload": ["test_offload_disk.py", "engine/test_offload_files.py"],
    "step": ["engine/test_overlap.py", "engine/test_device_steps.py", "engine/test_matrices.py"],
    "checkpoint": ["checkpoint/test_save_load.py", "checkpoint/test_damage.py"],
}
WAITS = ("wait", "finish", "finish_unshard", "finish_read", "finish_steps", "wait_stream", "join")


@dataclass(frozen=True)
class Mutant:
    """One defect: in ``file``, at ``line``, ``before`` is replaced by ``after``."""

    kind: str
    file: str
    line: int
    before: str
    after: str


def sites_of(tree):
    """Yield (kind, node, what makes the node to put in its place)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
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
    def __init__(self, place, made):
        self._place, self._made = place, made

    def visit(self, node):
        here = (getattr(node, "lineno", -1), getattr(node, "col_offset", -1), type(node))
        return self._made if here == self._place else super().generic_visit(node)


def put(mutant_seed, package):
    """Put one defect into a copy of the package, and return it."""
    draw = random.Random(mutant_seed)
    files = [path for room in TESTS for path in sorted((package / room).glob("*.py"))]
    kind = draw.choice(("divisor", "slice", "wait", "lock", "flag", "state"))
    while True:
        path = draw.choice(files)
        tree = ast.parse(path.read_text())
        sites = [(node, make) for found, node, make in sites_of(tree) if found == kind]
        if sites:
            break
    node, make = draw.choice(sites)
    place = node.lineno, node.col_offset, type(node)
    before, made = ast.unparse(node), make()
    after = ast.unparse(ast.fix_missing_locations(made))
    changed = _Replace(place, made).visit(tree)
    path.write_text(ast.unparse(ast.fix_missing_locations(changed)))
    name = path.relative_to(package).as_posix()
    return Mutant(kind, name, place[0], before.split("\n")[0], after.split("\n")[0])


def is_found(mutant, package, limit_s):
    """Return the first test that fails with the defect, "(no end)", or "" if all pass."""
    env = os.environ | {"PYTHONPATH": str(package.parent)}
    for file in TESTS[mutant.file.split("/")[0]]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        # The project's own setting has the source, before PYTHONPATH.
        command += ["-o", f"pythonpath={package.parent} labs tests examples docs"]
        try:
            done = subprocess.run(
                [*command, str(ROOT / "tests" / file)],
                env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "(no end)"
        if done.returncode:
            failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            return failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"
    return ""


def main():
    """Run the trials; the exit code is 0 if every defect was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for seed in range(asked.seed, asked.seed + asked.trials):
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "shardwise"
            shutil.copytree(SOURCE, package)
            mutant, began = put(seed, package), time.monotonic()
            found = is_found(mutant, package, asked.limit_s)
        rows.append({"seed": seed, **asdict(mutant), "found_by": found})
        verdict = found or "NOT FOUND"
        where = f"{mutant.file}:{mutant.line} {mutant.before} -> {mutant.after}"
        print(
            f"{seed} {mutant.kind} {where}: {verdict} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))
    num = sum(bool(row["found_by"]) for row in rows)
    print(f"{num} of {len(rows)} defects found")
    return int(num < len(rows))


if __name__ == "__main__":
    sys.exit(main())
