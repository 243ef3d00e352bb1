"""Write the pages that are made from other files: files, errors, findings, names, decisions.

Run it after a change of the docstring of a module, an error, a finding or a public name, or after
a file or a decision was added or moved: ``make pages``, or ``python docs/generate_pages.py``.
tests/test_docs.py compares the committed pages with the source.

files.md lists rooms in the order of the table in ``shardwise.__doc__``. Inside a room a file stands
below all files that it imports.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from generate_accounting import accounting_data, accounting_page
from generate_api import api_page
from generate_bound import bound_page
from generate_findings import findings_page
from generate_mesh import mesh_page
from generate_optimizers import optimizers_page
from generate_owner import owner_page
from generate_step import step_page, step_picture

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "src" / "shardwise"
NOT_LISTED = ("__init__", "__main__")
FILES_INTRODUCTION = """# Files of the source

Rooms in reading order. In each room a file stands below those that it imports. `make pages` writes
this page from the first sentence of each docstring; [architecture.md](architecture.md) explains the
rooms.
"""
ERRORS_INTRODUCTION = """# Errors

Every exception that Shardwise raises on purpose, written by `make pages` from the source. Messages
say which rank, unit, file or setting is meant, what was expected, what came, and what to do.
[When something fails](how-to/when-something-fails.md) is about hangs, memory and disks.

| error | derives from | meaning | what to do | module |
|---|---|---|---|---|
"""
DECISIONS_INTRODUCTION = """# Decisions

What was decided, why, and what follows from it. `make pages` writes this list.

"""


@cache
def pages() -> dict[str, str]:
    """Return the text of each generated page by its name."""
    return {
        "files.md": files_page(),
        "errors.md": errors_page(),
        "findings.md": findings_page(),
        "decisions/README.md": decisions_page(),
        "api.md": api_page(),
        "account.md": accounting_page(),
        "site/data/accounting.json": accounting_data(),
        "bound.md": bound_page(),
        "mesh.md": mesh_page(),
        "owner.md": owner_page(),
        "how-to/optimizers.md": optimizers_page(),
        "step.md": step_page(),
        "step.svg": step_picture(),
    }


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def rooms() -> list[str]:
    """Return the rooms of the package in reading order, as its docstring lists them."""
    text = ast.get_docstring(tree_of(PACKAGE / "__init__.py"), clean=False) or ""
    table = re.findall(r"^    (\w[\w/, ]*?) {2,}\S", text, re.MULTILINE)
    return [name.strip() for line in table for name in line.replace("/", "").split(",")]


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the names that a file imports from the package, dotted.

    For type checking too, unless the types are of the same room: a unit has parameters, and each
    parameter has its unit.
    """
    tree = tree_of(path)
    room = module_name(path).rpartition(".")[0]
    for_types = {
        inner
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").rpartition(".")[0] == room
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types:
            assert node.level == 0, f"{path}: a relative import"
            if (node.module or "").split(".")[0] == "shardwise":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "shardwise")


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules of the package, each with the modules of the package that it imports."""
    paths = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    return {
        name: {m if m in paths else m.rpartition(".")[0] for m in imported_modules(path)}
        & set(paths) - {"shardwise"}
        for name, path in paths.items()
    }


def module_name(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def files_page() -> str:
    """Return files.md: a table of files for each room, in reading order."""
    text = FILES_INTRODUCTION
    for is_folder, names in groupby(rooms(), key=lambda room: (PACKAGE / room).is_dir()):
        if is_folder:
            for name in names:
                folder = PACKAGE / name
                text += f"\n## {name}/\n\n{first_sentence(folder / '__init__.py')}\n"
                text += _file_table(folder, _files_in_reading_order(folder))
        else:
            files = [PACKAGE / f"{name}.py" for name in names]
            title = "Ground" if text == FILES_INTRODUCTION else ", ".join(f.name for f in files)
            text += f"\n## {title}\n"
            text += _file_table(PACKAGE, files)
    return text


def _file_table(folder: Path, paths: list[Path]) -> str:
    rows = "".join(
        f"| [{path.relative_to(folder).as_posix()}](../{path.relative_to(DOCS.parent).as_posix()}) "
        f"| {first_sentence(path)} |\n"
        for path in paths
    )
    return f"\n| file | |\n|---|---|\n{rows}"


def _files_in_reading_order(folder: Path) -> list[Path]:
    """Return a room's files, each after those that it imports and close to them."""
    files = {module_name(path): path for path in sorted(folder.rglob("*.py"))}
    graph = {name: sorted(targets & set(files)) for name, targets in import_graph().items()}
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            for target in graph[name]:
                visit(target)
            order.setdefault(name)

    def closure(name: str) -> set[str]:
        return {name}.union(*map(closure, graph[name]))

    imported = {target for name in files for target in graph[name]}
    for name in sorted(set(files) - imported, key=lambda name: (-len(closure(name)), name)):
        visit(name)
    return [files[name] for name in order if files[name].stem not in NOT_LISTED]


def errors_page() -> str:
    """Return errors.md: a row for each exception, bases first."""
    errors = error_classes()
    rows = "".join(
        f"| `{node.name}` | {', '.join(f'`{base}`' for base in bases_of(node))} "
        f"| {' | '.join(_meaning_and_remedy(node))} | `{module}` |\n"
        for module, node in errors
    )
    return ERRORS_INTRODUCTION + rows


def decisions_page() -> str:
    """Return decisions/README.md: the title of each decision."""
    rows = ""
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows += f"- [{title}]({path.name})\n"
    return DECISIONS_INTRODUCTION + rows


def error_classes() -> list[tuple[str, ast.ClassDef]]:
    """Return ShardwiseError and all classes below it, with their modules."""
    known = {"ShardwiseError"}
    found = []
    for path in [PACKAGE / "errors.py", *sorted(PACKAGE.rglob("*.py"))]:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and known & {node.name, *bases_of(node)}:
                known.add(node.name)
                if (module_name(path), node) not in found:
                    found.append((module_name(path), node))
    return found


def bases_of(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases."""
    return [ast.unparse(base) for base in node.bases]


def _meaning_and_remedy(node: ast.ClassDef) -> tuple[str, str]:
    meaning, _, remedy = (ast.get_docstring(node) or "").partition("\n\n")
    return " ".join(meaning.split()), " ".join(remedy.split())


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line of Markdown."""
    paragraph = (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0]
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])", " ".join(paragraph.split()))[0]
    return sentence.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    for page_name, page_text in pages().items():
        (DOCS / page_name).write_text(page_text, encoding="utf-8")
