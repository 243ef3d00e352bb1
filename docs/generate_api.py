"""Write api.md from the signatures and docstrings of the public names. `make pages` runs it.

No module is imported: names of libraries that are not installed are on the page too.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import indent

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src"
INTRODUCTION = """# API

The public names, with their signatures and docstrings; `make pages` writes this page from the
source. Errors are listed on [their own page](errors.md).
"""
# Modules in the order of the page. A module without names lists those that it imports for types.
MODULES: dict[str, tuple[str, ...]] = {
    "shardwise": (),
    "shardwise.config": ("Units", "Schedule"),
    "shardwise.check": (),
    "shardwise.debug": ("stats", "counting", "watch"),
    "shardwise.optim": (),
    "shardwise.parallel": (),
    "shardwise.interop": (),
    "shardwise.interop.accelerate": ("Accelerator",),
    "shardwise.interop.deepspeed": (),
    "shardwise.interop.lightning": (),
    "shardwise.interop.peft": ("load_adapter", "save_adapter"),
    "shardwise.interop.torchtitan": ("with_shardwise",),
    "shardwise.interop.transformers": (),
}
LONGEST_LINE = 76
Documented = ast.FunctionDef | ast.ClassDef | ast.Assign


def api_page() -> str:
    """Return api.md: a section for each module, and in it one for each name."""
    text = INTRODUCTION
    for module, names in MODULES.items():
        tree = tree_of(module)
        first_paragraph = _as_markdown(tree).partition("\n\n")[0]
        text += f"\n## {module}\n\n{first_paragraph}\n"
        found = {name: (module, name) for name in names} or dict(_imported_for_types(tree))
        for name, (home, name_there) in sorted(found.items(), key=lambda item: item[0].lower()):
            text += _section(module, name, *_definition(home, name_there))
    return text


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(_path_of(module).read_text(encoding="utf-8"))


def _path_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported_for_types(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the names that a package imports for types or lists, each with its module and name."""
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)] or [tree.body]
    for node in blocks[0]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "shardwise":
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)


def _definition(module: str, name: str) -> tuple[str, Documented]:
    """Return the module and the node that define a name, which other modules may import."""
    for node in reversed(tree_of(module).body):  # an overloaded function's last definition
        if isinstance(node, Documented) and name == getattr(node, "name", None):
            return module, node
        if isinstance(node, ast.Assign) and name == ast.unparse(node.targets[0]):
            return module, node
        names = node.names if isinstance(node, ast.ImportFrom) else ()
        if name in {alias.asname or alias.name for alias in names}:
            return _definition(node.module, name)
    raise LookupError(f"{module} does not define {name}")


def _section(module: str, name: str, home: str, node: Documented) -> str:
    """Return one name: its signature, its docstring, and those of a class's public methods."""
    lines = [_signature(node, name)]
    methods = []
    if isinstance(node, ast.ClassDef):
        lines += [f"    {ast.unparse(f)}" for f in node.body if isinstance(f, ast.AnnAssign)]
        public = (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_")
        methods = [m for m in public if ast.get_docstring(m)]
        inits = (m for m in node.body if getattr(m, "name", "") == "__init__")
        lines += [indent(_signature(m), "    ") for m in inits]
    path = _path_of(home).relative_to(DOCS.parent).as_posix()
    code = "\n".join(lines) + " ..." * (len(lines) == 1 and lines[0].endswith(":"))
    text = f"\n### {module}.{name}\n\n```python\n{code}\n```\n\n{_as_markdown(node)}\n"
    for method in methods:
        text += f"\n```python\n{_signature(method)}\n```\n\n{_as_markdown(method)}\n"
    return f"{text}\nSource: [{path}](../{path})\n"


def _signature(node: ast.stmt, name: str | None = None) -> str:
    """Return a class's or a function's first line, broken between parameters if it is long."""
    if isinstance(node, ast.ClassDef):
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        return f"class {name or node.name}{bases}:"
    if not isinstance(node, ast.FunctionDef):
        return ast.unparse(node)
    each: list[str] = []
    for part in ast.unparse(node.args).split(", "):
        if each and len(re.findall(r"[\[({]", each[-1])) > len(re.findall(r"[])}]", each[-1])):
            each[-1] += f", {part}"  # this comma is inside brackets
        else:
            each.append(part)
    each = [re.sub(r"^(\w+: .+)=", r"\1 = ", one) for one in each]
    head = f"def {name or node.name}("
    tail = (f") -> {ast.unparse(node.returns)}" if node.returns else ")") + ": ..."
    if len(line := head + ", ".join(each) + tail) <= LONGEST_LINE:
        return line
    return "\n    ".join([head, *(f"{one}," for one in each)]) + f"\n{tail}"


def _as_markdown(node: ast.Module | Documented) -> str:
    """Return a docstring as Markdown, without its notes on the inside."""
    docstring = "" if isinstance(node, ast.Assign) else ast.get_docstring(node) or ""
    text = re.split(r"^Note \[", docstring, flags=re.MULTILINE)[0]
    return text.strip().replace("``", "`").replace("::\n", ":\n")
