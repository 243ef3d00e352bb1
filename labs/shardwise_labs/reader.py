"""The reader's file: load it, check its imports, and describe its exceptions by its own lines."""

import ast
import importlib.util
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType

from shardwise_labs.course import built_by
from shardwise_labs.words import WrongAnswer

BUILT_HERE = ("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.optim")


def forbidden_imports(path: Path, uses_engine: bool) -> str | None:
    """Return in words which imports a reader's file must not have; None if it has none."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            room = name.split(".")[0]
            if room == "shardwise_labs" or (room == "shardwise" and not uses_engine):
                return f"line {node.lineno} imports {name}: a lab uses torch and earlier labs only"
            if name.startswith(BUILT_HERE):
                return f"line {node.lineno} imports {name}, which is what this lab builds"
    return None


def load(path: Path, folder: Path | None = None) -> ModuleType:
    """Import a file under its own name; labs that it imports come from ``folder``, or beside it."""
    names = [name for name in sys.modules if name.startswith("lab") and name[3:5].isdigit()]
    for name in names:
        del sys.modules[name]
    linecache.checkcache()
    sys.path.insert(0, str(folder or path.parent))
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def member(module: ModuleType, name: str) -> object:
    """Return a function, class or constant of the reader's file; WrongAnswer if it is gone."""
    if not hasattr(module, name):
        raise WrongAnswer(f"the file has no `{name}`: is it spelled so?")
    return getattr(module, name)


def own_frames(error: BaseException, folder: Path) -> list[traceback.FrameSummary]:
    """Return the frames of an exception that are in files of the reader's folder."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if Path(frame.filename).parent == folder]


def describe(error: BaseException, folder: Path) -> str:
    """Return an exception of the reader's code with the lines of the reader's files only."""
    if isinstance(error, WrongAnswer):
        return str(error)
    name = type(error).__name__
    said = f"{name}: {error}".strip().rstrip(":")
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not Python: {error.msg}"
    frames = own_frames(error, folder)
    if isinstance(error, NotImplementedError) and "gap" in str(error) and frames:
        return f"{error} is still empty (line {frames[-1].lineno} of {_file(frames[-1])})"
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("lab"):
        return f"{error.name}.py is not in this folder: {built_by(str(error.name))}"
    lines = [f"line {f.lineno} of {_file(f)}, in {f.name}: {f.line}" for f in frames]
    if not frames:
        return f"the check cannot use what your code returned ({said})"
    return "\n".join(["your code raised", *(f"  {line}" for line in lines), f"  {said}"])


def _file(frame: traceback.FrameSummary) -> str:
    return Path(frame.filename).name
