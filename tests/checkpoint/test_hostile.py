"""Hostile checkpoints: on every way in only CheckpointError, no code run, no memory on a claim."""

import contextlib
import io
import os
import pickle
import shutil
import sys
import tracemalloc
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

import shardwise
from hostile import CASES, NAME, PARTS, Target, build, extra, save_good
from ranks import run_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.verify import check_quickly, verify
from shardwise.errors import CheckpointError

FILES = Files()
MIB = 1 << 20
OVER_BYTES = 64 * MIB
# Each copy of a file that is passed on as text costs its size again; only two cases are so large.
COPIES = 4
FUTURE = "a_format_of_the_future"
COMMANDS_EVERY = 16  # they read what verify reads, and take longer than all the others

# -- what happens behind the scenes

FORBIDDEN = (
    "pickle.find_class",
    "exec",
    "compile",
    "code.__new__",
    "import",
    "marshal.loads",
    "marshal.load",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "socket.__new__",
    "socket.connect",
    "socket.bind",
    "webbrowser.open",
    "urllib.Request",
)


@dataclass
class Watch:
    """An audit hook, which cannot be removed: it looks only while ``inside`` is set."""

    inside: str = ""
    seen: list[str] = field(default_factory=list)

    def hook(self, event, args):
        if not self.inside:
            return
        if event in FORBIDDEN:
            if event == "import" and args[0] in sys.modules:
                return
            self.seen.append(f"{event} {args!r:.200}")
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(args[0]))
            above = os.path.dirname(self.inside)  # a run's own folder is synced in it
            if not f"{path}/".startswith(f"{self.inside}/") and path != above:
                self.seen.append(f"open {path}")

    @contextlib.contextmanager
    def on(self, folder):
        self.seen = []
        self.inside = os.path.abspath(folder)
        try:
            yield self.seen
        finally:
            self.inside = ""


# -- the ways in


def scramble(model, optimizer):
    """Let nothing be right by accident before a load."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(9)
    model.loader.order = torch.tensor(9)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(9.0)
    optimizer.state.clear()
    torch.default_generator.manual_seed(9)  # torch.manual_seed walks the stack for each device


def state_of(model, optimizer):
    """Copy everything that a load sets."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return (value.to_local() if hasattr(value, "to_local") else value).detach().tolist()
        return value

    state = {name: plain(value) for name, value in model.named_parameters()}
    state |= {name: plain(value) for name, value in model.named_buffers()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            state[f"{name}.{key}"] = plain(value)
    for number, group in enumerate(optimizer.param_groups):
        state |= {f"{number}.{k}": plain(v) for k, v in group.items() if k != "params"}
    return state | {"order": plain(model.loader.order), "draw": torch.rand(3).tolist()}


def _plain_extra(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain_extra(member) for key, member in value.items()}
    return value


def ways_of(model, optimizer):
    """Return the ways to load: each gives the state and the user's values, or None."""

    def seen(loaded):
        return loaded and (state_of(model, optimizer), _plain_extra(loaded.extra))

    def load_this_one(folder):
        return seen(shardwise.load(folder, model, optimizer))

    def load_the_newest(folder):
        return seen(shardwise.load(folder.parent, model, optimizer))

    def load_the_step(folder):
        return seen(shardwise.load(folder.parent, model, optimizer, step=3))

    def load_the_runs(folder):
        with shardwise.Checkpoints(folder.parent, model, optimizer) as checkpoints:
            return seen(checkpoints.load())

    return [load_this_one, load_the_newest, load_the_step, load_the_runs]


def read_all(folder):
    """Read everything that a converter could ask of a checkpoint."""
    checkpoint = Checkpoint(FILES, folder)
    try:
        for info in checkpoint.tensors:
            checkpoint.read(info, 0, info.numel)
        _ = checkpoint.optimizer, checkpoint.extra, checkpoint.tied, checkpoint.step
        for rank in range(checkpoint.manifest.num_ranks):
            checkpoint.values_of(rank)
    finally:
        checkpoint.close()
    return "read"


def verified(folder):
    found = verify(FILES, folder)
    if not found.ok:
        raise CheckpointError("; ".join(map(str, found.findings)))
    return "verified"


def quick(folder):
    check_quickly(FILES, folder)
    return "checked"


def commands(folder):
    """Run the commands; what they print is tested elsewhere."""
    for name in ("inspect", "verify"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = _commands().main([name, str(folder)], standalone_mode=False)
        if code:
            raise CheckpointError(said.getvalue())
    return "shown"


@cache
def _commands():
    """Build the commands; typer evaluates the annotations of its functions for that."""
    import typer

    from shardwise.cli.ckpt import ckpt

    return typer.main.get_command(ckpt)


def misbehaves(folder):
    """Do what no way in may do; to see that it would be seen."""
    eval("1 + 1")
    pickle.loads(pickle.dumps(Path))
    Path(__file__).read_bytes()
    del bytearray(3 * OVER_BYTES)[:]
    raise ValueError("an accident")


# -- the test


@dataclass
class Report:
    """What came of one case: the error of each way in, and everything that is wrong with it."""

    name: str
    errors: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def _virtual_peak_bytes():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmPeak"))
    return int(line.split()[1]) * 1024


def _allowed_bytes(run):
    size = sum(path.stat().st_blocks * 512 for path in run.rglob("*") if path.is_file())
    return OVER_BYTES + (COPIES * size if size > MIB else 0)


def _try(case, way, folder, report, watch, good, allowed, traced=True):
    """Call a way in; if not ``traced``, which costs as much again, only huge memory is noticed."""
    name = way.__name__
    virtual = _virtual_peak_bytes()
    if traced:
        tracemalloc.start()
    outcome = None
    try:
        with watch.on(folder.parent) as seen:
            outcome = way(folder)
    except CheckpointError as error:
        report.errors[name] = str(error)[:1000]
        inner = error.__cause__
        # `on_all_ranks` tells all ranks of any error; an accident among them is still an accident.
        if inner is not None and not isinstance(inner, CheckpointError | OSError):
            report.wrong.append(f"{name}: {type(inner).__name__}: {inner}"[:300])
    except Exception as error:
        report.wrong.append(f"{name}: raised {type(error).__name__}: {error}"[:300])
        report.errors[name] = ""
    report.wrong += [f"{name}: {event}" for event in seen]
    peak = tracemalloc.get_traced_memory()[1] if traced else 0
    tracemalloc.stop()
    if peak > allowed or _virtual_peak_bytes() - virtual > allowed:
        report.wrong.append(f"{name}: {peak} bytes at its peak, {allowed} allowed")
    if name in report.errors or name in ("quick",):
        return
    if name.startswith("load"):
        if case.expected in ("refused", "unfit") and outcome is not None:
            report.wrong.append(f"{name}: loaded")
        if outcome is not None and outcome != good:
            report.wrong.append(f"{name}: other values than were saved")
    elif name in ("verified", "commands") and case.expected in ("refused", "found"):
        report.wrong.append(f"{name}: found nothing")


def attack_all(rank, world_size, scratch, every=False):
    """Load the good checkpoint by every way, then each hostile one; the first report is a probe's.

    To load it and to verify it is tried on each, the other ways in turn; one of the ways, in turn,
    has its memory traced. With ``every``, as `make soak` does it, all are tried and traced on each.
    """
    root = Path(scratch)
    warnings.simplefilter("ignore")  # a damaged newest checkpoint is warned of, rightly
    model, optimizer = build(rank)
    this_one, *further = loads = ways_of(model, optimizer)
    own = root / "good" / NAME
    found = []
    for way in loads:
        scramble(model, optimizer)
        found.append(way(own))
    good = found[0]
    assert all(one == good for one in found) and good[1] == _plain_extra(extra())
    for way in (read_all, verified, quick, commands):
        way(own)
    watch = Watch()
    sys.addaudithook(watch.hook)
    reports = [Report("probe")]
    _try(CASES[0], misbehaves, own, reports[0], watch, good, OVER_BYTES)
    for number, case in enumerate(CASES):
        report = Report(case.name)
        run = root / case.name
        shutil.copytree(root / "good", run)
        case.attack(Target(run / NAME))
        others = [further[number // 3 % len(further)], read_all, quick]
        drawn = others if every or case.name == FUTURE else [others[number % 3]]
        ways = [this_one, verified, *drawn]
        if number % COMMANDS_EVERY == 0:
            ways.append(commands)
        allowed = _allowed_bytes(run)
        for turn, way in enumerate(ways):
            scramble(model, optimizer)
            traced = every or turn == (number + number // 3 + number // 9) % len(ways)
            _try(case, way, run / NAME, report, watch, good, allowed, traced)
        reports.append(report)
        shutil.rmtree(run)
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What came of the whole corpus, the probe first."""
    return attack(tmp_path_factory.mktemp("hostile"))


def attack(scratch, every=False):
    """Try the whole corpus."""
    run_ranks(save_good, 2, str(scratch / "good"))
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 30
    (found,) = run_ranks(attack_all, 1, str(scratch), every)
    assert names == [report.name for report in found[1:]]
    return found


def test_a_hostile_checkpoint_gives_an_error_and_nothing_else(reports):
    wrong = [f"{report.name}: {line}" for report in reports[1:] for line in report.wrong]
    assert not wrong, "\n".join(wrong)


def test_code_that_misbehaves_would_have_been_seen(reports):
    wrong = "\n".join(reports[0].wrong)
    for word in ("compile", "exec", "pickle.find_class", f"open {__file__}", "at its peak"):
        assert word in wrong, (word, wrong)
    assert "raised ValueError: an accident" in wrong


def test_an_unknown_format_is_named_with_the_version_that_wrote_it(reports):
    report = next(r for r in reports if r.name == FUTURE)
    for way in ("load_this_one", "read_all", "verified", "quick"):
        assert "format 3; this version reads formats 1 and 2" in report.errors[way], report.errors
        assert f"saved by shardwise '{shardwise.__version__}'" in report.errors[way]


def test_an_error_names_the_file_that_is_wrong(reports):
    for report in reports[1:]:
        if report.name.startswith("a_file_that_"):
            text = report.errors["load_this_one"]
            part = next(name for what, name in PARTS.items() if report.name.endswith(what))
            assert part in text, (report.name, text)
