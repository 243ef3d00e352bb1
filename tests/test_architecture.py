"""What the source must look like: who imports whom, who says what, and how long a file may be."""

import ast
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import shardwise
from generate_pages import import_graph, imported_modules, rooms, tree_of

ROOT = Path(shardwise.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LONGER_FILES = {}  # path: the reason
# Lines of code per room, without docstrings, comments and blank lines, with about 3 % headroom. A
# higher budget takes a sentence in docs/decisions/0054-budgets-per-room.md.
BUDGETS = {
    "ground": 2600,
    "layout": 1010,
    "comm": 1630,
    "tensor": 2030,
    "unit": 2540,
    "engine": 2880,
    "codes": 355,
    "surface": 1170,
    "offload": 1290,
    "step": 1800,
    "optim": 920,
    "parallel": 1980,
    "check": 640,
    "hangs": 840,
    "plan": 6620,
    "bench": 560,
    "checkpoint": 5280,
    "convert": 1970,
    "monitor": 4800,
    "data": 300,
    "train": 2160,
    "preflight": 830,
    "interop": 4460,
    "cli": 2660,
}
COLLECTIVES = """
all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
broadcast_object_list gather gather_object irecv isend monitored_barrier recv reduce
reduce_scatter reduce_scatter_tensor scatter scatter_object_list send
"""
HOOKS = re.compile(r"register_(module_)?(full_)?(forward|backward)(_pre)?_hook")


def name_of(path):
    """Return the path inside the package, e.g. ``shard/tensor.py``."""
    return path.relative_to(ROOT).as_posix()


def dotted(node):
    """Return ``a.b.c`` for an attribute chain, else nothing."""
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def uses_of(path):
    """Yield (line, dotted name) of every attribute chain and imported name in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def places(paths, pattern):
    wanted = re.compile(pattern)
    return [
        f"{name_of(path)}:{line} {name}"
        for path in paths
        for line, name in uses_of(path)
        if wanted.search(name)
    ]


def functions():
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def test_the_reading_order_names_every_room_and_no_other():
    on_disk = {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    on_disk |= {p.stem for p in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert sorted(rooms()) == sorted(on_disk)


def test_a_room_imports_only_from_what_stands_above_it():
    order = {room: number for number, room in enumerate(rooms())}
    wrong = []
    for path in FILES:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for module in imported_modules(path):
            target = (*module.split("."), "")[1]
            # What is no room is a public name, from the package itself.
            if order.get(target, -1) > order[room]:
                wrong.append(f"{name_of(path)} imports {module}")
    assert not wrong


def test_no_room_below_the_recipe_imports_the_public_names():
    """They are imported late, so this would be a cycle that shows only on first use."""
    inner = [
        p for p in FILES if p.parent != ROOT and p.parts[len(ROOT.parts)] not in ("train", "cli")
    ]
    names = [f"{name_of(p)} imports {m}" for p in inner for m in imported_modules(p)]
    assert not [n for n in names if n.split(".")[-1] in shardwise.__all__ and n.count(".") < 3]


def test_inside_a_room_the_reading_order_is_the_import_order():
    """No two files import each other, directly or in a circle."""
    edges = import_graph()
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in set(edges) - {"shardwise"}:
        visit(name, ())


def test_only_the_device_file_says_torch_cuda():
    others = [p for p in FILES if name_of(p) != "device.py"]
    assert not places(others, r"^torch\.cuda\b")


def test_only_comm_calls_the_collectives_of_torch_distributed():
    others = [p for p in FILES if not name_of(p).startswith("comm/")]
    names = "|".join(COLLECTIVES.split())
    assert not places(others, rf"^(dist|torch\.distributed)\.({names})$")
    assert not places(others, r"distributed\._functional_collectives")


def test_only_the_hooks_file_registers_module_hooks():
    others = [p for p in FILES if name_of(p) != "engine/hooks.py"]
    assert not places(others, HOOKS.pattern)
    assert places([ROOT / "engine" / "hooks.py"], HOOKS.pattern)


def test_only_the_command_line_reads_the_environment():
    others = [p for p in FILES if not name_of(p).startswith("cli/")]
    assert not places(others, r"^os\.(environ|getenv)\b")


def test_no_file_prints_but_the_command_line():
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if not name_of(path).startswith(("cli/", "train/"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert not calls


def test_no_file_is_too_long_to_be_read_in_one_go():
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in FILES}
    too_long = {n: lines for n, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert set(too_long) == set(LONGER_FILES), too_long


def code_lines(path):
    """Return the lines of a file that hold code."""
    text, lines = path.read_text(), set()
    no_code = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if ast.get_docstring(node) is not None else None
            if first is not None:
                lines.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def test_each_room_stays_within_its_budget_of_code_lines():
    sizes = Counter()
    for path in FILES:
        parts = path.relative_to(ROOT).parts
        sizes[parts[0] if len(parts) > 1 else "ground"] += code_lines(path)
    assert sizes.keys() == BUDGETS.keys()
    over = {room: (lines, BUDGETS[room]) for room, lines in sizes.items() if lines > BUDGETS[room]}
    assert not over, "room: (lines, budget)"


def test_no_function_is_too_long_to_be_read_at_a_glance():
    lengths = [
        (f"{name_of(path)}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for path, node in functions()
    ]
    assert not [(where, lines) for where, lines in lengths if lines > MAX_FUNCTION_LINES]


def test_every_module_says_what_it_is_for():
    assert not [name_of(p) for p in FILES if not ast.get_docstring(tree_of(p))]


def test_every_public_function_and_class_has_a_docstring():
    missing = []
    for path in FILES:
        public = list(tree_of(path).body)
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                public += node.body
        missing += [
            f"{name_of(path)}:{node.lineno} {node.name}"
            for node in public
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
            and not any(
                dotted(d).endswith((".setter", ".deleter", "overload")) for d in node.decorator_list
            )
        ]
    assert not missing


def test_public_functions_are_described_by_an_imperative_line():
    for name in shardwise.__all__:
        thing = getattr(shardwise, name)
        first = (inspect.getdoc(thing) or "").splitlines()[0]
        assert first.endswith("."), f"{name}: {first}"


def test_public_names_are_sorted_and_there():
    assert shardwise.__all__ == sorted(shardwise.__all__)
    for name in shardwise.__all__:
        thing = getattr(shardwise, name)
        home = "shardwise" if inspect.ismodule(thing) else thing.__module__
        assert getattr(importlib.import_module(home), name) is thing
    assert set(shardwise.__all__) <= set(dir(shardwise))
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        _ = shardwise.shards


def test_every_cited_note_exists():
    texts = {name_of(p): p.read_text() for p in (*FILES, *ROOT.rglob("*.toml"))}
    titles = {
        match
        for text in texts.values()
        for match in re.findall(r"^[ #]*Note \[([^\]]+)\]$", text, re.MULTILINE)
    }
    for name, text in texts.items():
        for cited in re.findall(r"[Ss]ee Note\s+\[([^\]]+)\]", text):
            wanted = cited.removesuffix(" ...")
            assert any(title.startswith(wanted) for title in titles), f"{name}: Note [{cited}]"


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_importing_the_package_does_not_import_torch():
    assert run_python("import shardwise; print('torch' in sys.modules)") == "False"
    assert run_python("import shardwise.errors; print('torch' in sys.modules)") == "False"


def test_importing_the_command_line_does_not_import_torch():
    assert run_python("import shardwise.cli.main; print('torch' in sys.modules)") == "False"


CORE = ("layout", "comm", "tensor", "unit", "engine")
TRAINS_ALONE = """
import importlib.abc, sys

class NothingBelow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in BELOW:
            raise ImportError(f"the core has imported {name}")

sys.meta_path.insert(0, NothingBelow())
import torch, torch.distributed as dist
from torch import nn
from shardwise.comm.listener import WAITS, Listener
from shardwise.engine.api import shard
WAITS.attach(Listener)
x = torch.linspace(-1, 1, 20).view(4, 5)
dist.init_process_group("gloo", store=dist.FileStore(STORE, 2), rank=RANK, world_size=2)
for stage in range(4):
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    shard(model, stage=stage, units=nn.Linear)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), (stage, ours, theirs)
dist.destroy_process_group()
"""


def test_the_core_comes_before_all_that_stands_on_it():
    order = rooms()
    assert order[order.index("layout") : order.index("engine") + 1] == list(CORE)


def test_the_core_trains_without_any_room_below_it(tmp_path):
    order = rooms()
    below = {f"shardwise.{room}" for room in order[order.index("engine") + 1 :]}
    values = f"BELOW, STORE = {below!r}, {str(tmp_path / 'store')!r}"
    ranks = [
        subprocess.Popen([sys.executable, "-c", f"{values}; RANK = {rank}\n{TRAINS_ALONE}"])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
