"""Run the reader's file on ranks: real processes with a gloo group, ended if they hang.

A `Starter` is one process that imports torch once and forks the ranks. A rank writes what it found
to a file when it is done. A rank that hangs writes its stacks on a signal.
"""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardwise_labs.course import FOLDER, TRAINERS, labs, without_marks
from shardwise_labs.launcher import join_ranks

STACKS_S = 3.0  # for a rank to write its stacks
GRACE_S = 2.0  # for the other ranks once one has failed


@dataclass
class Verdict:
    """One target on one rank: met or not, in words."""

    target: str
    met: bool
    text: str = ""


@dataclass
class Outcome:
    """What one rank found in one file, or how it ended."""

    rank: int
    num_ranks: int
    file: str
    verdicts: list[Verdict] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    error: str = ""  # an exception of the reader's code, or the line in which the rank hangs
    target: str = ""  # what was being checked then
    is_waiting: bool = False


@dataclass(frozen=True)
class Job:
    """Files to run or check on each of these numbers of ranks."""

    lab: int
    files: tuple[str, ...]
    num_ranks: tuple[int, ...]
    is_check: bool
    hang_s: float


def run_job(job: Job) -> list[Outcome]:
    """Run a job in a process of its own; return the outcomes by number of ranks, file and rank."""
    with Starter() as starter:
        return starter.run(job)


class Starter:
    """A process that has imported torch, and forks the ranks of one job after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
        )
        command = [sys.executable, "-m", "shardwise_labs.ranks"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, job: Job) -> list[Outcome]:
        """Run a job; return the outcomes by number of ranks, file and rank."""
        with tempfile.TemporaryDirectory(prefix="lab-") as folder:
            Path(folder, "job.json").write_text(json.dumps(asdict(job)))
            assert self._process.stdin is not None
            print(folder, file=self._process.stdin)
            results = Path(folder, "results.json")
            while not results.exists():
                if (code := self._process.poll()) is not None:
                    raise RuntimeError(f"the ranks did not start (exit code {code})")
                time.sleep(0.01)
            return [_outcome(facts) for facts in json.loads(results.read_text())]

    def __enter__(self) -> "Starter":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _outcome(facts: dict[str, object]) -> Outcome:
    outcome = Outcome(**facts)  # type: ignore[arg-type]
    outcome.verdicts = [Verdict(**verdict) for verdict in outcome.verdicts]  # type: ignore[arg-type]
    outcome.rows = [(label, value) for label, value in outcome.rows]
    return outcome


def _main() -> None:
    import torch
    import torch._dynamo  # the first step of an optimizer imports it
    import torch.distributed.nn.functional  # keeps the group that exists when it is imported

    torch.set_num_threads(1)
    gc.freeze()  # ranks collect garbage often, and need not look at what is imported
    for line in sys.stdin:
        _do_job(Path(line.rstrip("\n")))


def _do_job(folder: Path) -> None:
    facts = json.loads((folder / "job.json").read_text())
    job = Job(**{**facts, "files": tuple(facts["files"]), "num_ranks": tuple(facts["num_ranks"])})
    write_solutions(folder / "solutions")
    importlib.import_module(f"shardwise_labs.lab{job.lab:02d}.check")  # once, not on each rank
    found: list[Outcome] = []
    for num_ranks in job.num_ranks:
        found += _run_group(job, num_ranks, folder)
        if any(outcome.error for outcome in found):
            break
    written = folder / "results.json.new"
    written.write_text(json.dumps([asdict(outcome) for outcome in found]))
    written.rename(folder / "results.json")


def write_solutions(folder: Path) -> None:
    """Write the trainers that the checks measure with."""
    folder.mkdir(exist_ok=True)
    for name, lab in TRAINERS.items():
        text = (FOLDER / lab / "solution.py").read_text(encoding="utf-8")
        (folder / name).write_text(without_marks(text))


def _run_group(job: Job, num_ranks: int, folder: Path) -> list[Outcome]:
    fork = multiprocessing.get_context("fork")
    scratch = Path(tempfile.mkdtemp(dir=folder))
    count = 1 if labs()[job.lab].starts_ranks else num_ranks
    ranks = [
        fork.Process(target=_run_rank, args=(job, rank, num_ranks, folder, scratch), daemon=True)
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + job.hang_s * len(job.files)
    has_failed = False
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        time.sleep(0.02)
        failed = [process for process in ranks if process.exitcode not in (None, 0)]
        if failed and not has_failed:
            has_failed, end = True, min(end, time.monotonic() + GRACE_S)
    _stop(ranks, scratch)
    return [
        _found(job, file, rank, num_ranks, scratch, ranks[rank].exitcode)
        for file in job.files
        for rank in range(count)
    ]


def _stop(ranks: Sequence[BaseProcess], scratch: Path) -> None:
    stacks = [scratch / f"{rank}.stacks" for rank, each in enumerate(ranks) if each.is_alive()]
    waiting = [process for process in ranks if process.is_alive()]
    for process in waiting:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGUSR1)  # it writes its stacks
    end = time.monotonic() + STACKS_S
    while waiting and time.monotonic() < end:
        time.sleep(0.1)
        if all(path.exists() and path.stat().st_size for path in stacks):
            break
    if waiting:
        time.sleep(0.2)  # the last of them may be writing
    for process in waiting:
        process.kill()
    for process in ranks:
        process.join()


def _found(
    job: Job, file: str, rank: int, num_ranks: int, scratch: Path, exit_code: int | None
) -> Outcome:
    path = scratch / f"{Path(file).stem}.{rank}.json"
    if path.exists():
        return _outcome(json.loads(path.read_text()))
    outcome = Outcome(rank, num_ranks, file)
    kept = scratch / f"{Path(file).stem}.{rank}.kept"
    if kept.exists():  # the rank did not end
        outcome = _outcome(json.loads(kept.read_text()))
    stacks = scratch / f"{rank}.stacks"
    text = stacks.read_text() if stacks.exists() else ""
    folder = re.escape(str(Path(file).parent))
    match = re.search(rf'File "{folder}/([^"]+)", line (\d+) in (.+)', text)
    where = f"line {match[2]} of {match[1]}, in {match[3]}" if match else ""
    if exit_code in (-signal.SIGSEGV, -signal.SIGBUS):
        outcome.error = f"the process crashed: was memory read that is freed? {where}".rstrip()
    elif text:
        outcome.error, outcome.is_waiting = where or "outside of your file", True
    else:
        outcome.error = "its process has ended"
    return outcome


def _run_rank(job: Job, rank: int, num_ranks: int, folder: Path, scratch: Path) -> None:
    with open(scratch / f"{rank}.stacks", "w") as stacks:
        faulthandler.enable(file=stacks, all_threads=False)  # for crashes
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if not labs()[job.lab].starts_ranks:
            join_ranks(scratch, rank, num_ranks, timedelta(minutes=30))
        outcomes = [_judge(job, Path(file), rank, num_ranks, folder, scratch) for file in job.files]
        for outcome in outcomes:
            path = scratch / f"{Path(outcome.file).stem}.{rank}.json"
            path.write_text(json.dumps(asdict(outcome)))
    code = 1 if len(outcomes) == 1 and outcomes[0].error else 0
    sys.stdout.flush()
    os._exit(code)  # without a farewell that others would wait for


def _judge(job: Job, path: Path, rank: int, num_ranks: int, folder: Path, scratch: Path) -> Outcome:
    from shardwise_labs.judge import Judge
    from shardwise_labs.reader import describe, forbidden_imports, load
    from shardwise_labs.words import WrongAnswer

    judge = Judge(rank, num_ranks, path, folder / "solutions")
    outcome = Outcome(rank, num_ranks, str(path), judge.verdicts)

    def keep() -> None:
        outcome.target = judge.target
        new = scratch / f"{path.stem}.{rank}.kept.new"
        new.write_text(json.dumps(asdict(outcome)))
        new.rename(new.with_suffix(""))

    judge.keep = keep
    module = importlib.import_module(f"shardwise_labs.lab{job.lab:02d}.check")
    try:
        if said := forbidden_imports(path, labs()[job.lab].uses_engine):
            raise WrongAnswer(said)
        judge.theirs = load(path)
        (module.check if job.is_check else module.run)(judge)
    except (Exception, SystemExit) as error:
        outcome.error = describe(error, path.parent)
    outcome.target = judge.target
    outcome.rows, outcome.facts = judge.rows, judge.facts
    return outcome


if __name__ == "__main__":
    _main()
