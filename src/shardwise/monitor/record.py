"""What is kept of an observed run: its folder, and the lines and values in it.

Note [The folder of a run]
~~~~~~~~~~~~~~~~~~~~~~~~~~
``OUTPUT/observed/run.json`` says what runs (`RunFacts`), written once by rank 0; ``steps.jsonl``
has a line for each few steps, every figure over all ranks, by rank 0; ``rank-N.jsonl`` what only
that rank knows: timelines and memory of single steps. All of it is read by people's own tools, so
keys keep their meaning; ``format`` counts up when one does not.
"""

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.keys import checked_value, read_json, shown
from shardwise.monitor.line_kinds import (
    MAX_RANKS,
    Amount,
    Count,
    Figure,
    Logged,
    Name,
    Rank,
    checked_line,
)
from shardwise.monitor.lines import read_lines, read_newest
from shardwise.monitor.metrics import OverRanks, OverSteps

FORMAT = 1
FOLDER = "observed"
KINDS = ("timeline", "memory")  # of the lines that ranks write of single steps


@dataclass(frozen=True)
class UnitFacts:
    """One unit of the model; bytes in the master dtype, padding summed over the ranks.

    ``num_modules`` hold its parameters themselves; 0 in a record of an earlier version.
    """

    name: Name
    class_name: Name
    num_params: Count
    numel: Count
    full_bytes: Count
    rank_bytes: Count
    padding_bytes: Count
    dtype: Name
    layout: Name
    home: Name = ""
    num_modules: Count = 0


@dataclass(frozen=True)
class RunFacts:
    """What runs: said once, by rank 0. ``degrees`` are the sizes of the mesh's axes, by name.

    ``peak_flops`` is what the device can do in the dtype that is computed in, None where that is
    not known; ``flops_per_token`` what the products with this rank's weights need in a forward and
    backward pass. ``hosts`` are by rank. ``unsharded_bytes`` are those of parameters that are
    trained and belong to no unit; ``reduces_units_alone``: as `fully_shard` does, whatever
    ``bucket_bytes`` is.
    """

    stage: Annotated[int, Field(ge=0, le=3)]
    degrees: Mapping[Name, Annotated[int, Field(ge=1, le=MAX_RANKS)]]
    num_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    device: Name
    device_bytes: Count
    bucket_bytes: Count
    prefetch_bytes: Count | None
    units: tuple[UnitFacts, ...]
    hosts: tuple[Name, ...] = ()
    peak_flops: Amount | None = None
    flops_per_token: Amount = 0.0
    versions: Mapping[Name, Name] = field(default_factory=dict)
    started: Name = ""
    optimizer: Name = ""
    offload: Name = ""
    unsharded_bytes: Count = 0
    reduces_units_alone: bool = False
    format: int = FORMAT

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters, in the master dtype."""
        return sum(unit.full_bytes for unit in self.units)

    @property
    def padding_share(self) -> float:
        """Padding as a share of the parameters' bytes."""
        return sum(u.padding_bytes for u in self.units) / (self.full_bytes or 1)


@dataclass(frozen=True)
class StepLine:
    """The figures of ``num_steps`` steps up to ``step``, over all ranks; means of the steps.

    ``values`` are what the user's loop has logged, of rank 0, each the last; ``values_over_steps``
    are those that were logged in these steps. ``metrics_over_steps`` are what rank 0 knows of every
    step: time, tokens, MFU. ``at_s`` counts from the start.
    ``waited_for[rank][other]`` are milliseconds of each step that a rank waits for another one's
    messages; the few longest, where the transport tells. ``bad_since[name][rank]`` is the first of
    the steps in which what a rank has logged was not finite, 0 where all of it was; of names that
    are bad on any rank, and of gradients by their metric's name.
    """

    step: Count
    num_steps: Annotated[int, Field(ge=1, le=1 << 62)]
    at_s: Amount
    metrics: Mapping[Name, OverRanks]
    values: Mapping[Name, Logged] = field(default_factory=dict)
    waited_for: Mapping[Rank, Mapping[Rank, Figure]] = field(default_factory=dict)
    bad_since: Mapping[Name, Mapping[Rank, Count]] = field(default_factory=dict)
    values_over_steps: Mapping[Name, OverSteps] = field(default_factory=dict)
    metrics_over_steps: Mapping[Name, OverSteps] = field(default_factory=dict)


def over_steps(lines: Iterable[StepLine], name: str) -> OverRanks | None:
    """Return a figure as it is in most of some steps; None where no step tells it.

    The ranks are those that have the extremes most often.
    """
    told = [line.metrics[name] for line in lines if name in line.metrics]
    told = [value for value in told if None not in (value.min, value.median, value.max)]
    if not told:
        return None
    return OverRanks(
        statistics.median(value.min for value in told),
        statistics.median(value.median for value in told),
        statistics.median(value.max for value in told),
        statistics.mode(value.min_rank for value in told),
        statistics.mode(value.max_rank for value in told),
    )


@dataclass(frozen=True)
class RunRecord:
    """A run as it was kept. ``lines`` of ranks are as they were written.

    ``idle_s``: how long nothing was written when it was read; None where nobody has looked.
    """

    path: Path
    facts: RunFacts
    steps: tuple[StepLine, ...]
    by_rank: Mapping[int, tuple[Mapping[str, Any], ...]]
    idle_s: float | None = None

    @property
    def last_words(self) -> Mapping[int, Mapping[str, Any]]:
        """By rank the line that says how it has ended; where none does, the line of its begin."""
        kinds = ("begin", "end")
        return {
            rank: line
            for rank, lines in self.by_rank.items()
            for line in lines
            if line.get("kind") in kinds
        }

    def lines(self, kind: str, rank: int | None = None) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the lines of one kind ("timeline", "memory"), with their ranks."""
        for each, lines in self.by_rank.items():
            if rank is None or each == rank:
                yield from ((each, line) for line in lines if line.get("kind") == kind)


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Write ``run.json`` in one piece."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "run.json.new"
    made.write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
    made.replace(folder / "run.json")


def forget_ranks(folder: Path, num_ranks: int) -> None:
    """Remove the lines of ranks that an earlier run had, and this one has not."""
    for rank, path in rank_files(folder):
        if rank >= num_ranks:
            path.unlink()


def read_run(path: str | Path, newest: int | None = None) -> RunRecord:
    """Read what was kept of a run, also of one that goes on; a line cut short is left out.

    ``path`` is the run's output, or the folder in it. With ``newest`` only the last so many lines
    of each of `KINDS` are kept of every rank, as all of a long run may be gigabytes.

    **Raises** ConfigError where there is none, or where another version has written it.
    """
    found, folder = Path(path), folder_of(path)
    facts = read_facts(folder, found)
    path = folder / "steps.jsonl"
    steps = tuple(read_step(line, path) for line in read_lines(path))
    by_rank = {
        rank: tuple(
            checked_line(line, file)
            for line in (read_lines(file) if newest is None else read_newest(file, KINDS, newest))
        )
        for rank, file in rank_files(folder)
    }
    written_s = max(file.stat().st_mtime for file in folder.iterdir())
    return RunRecord(found, facts, steps, by_rank, max(time.time() - written_s, 0.0))


def folder_of(path: str | Path) -> Path:
    """Return the folder that a run is observed in; ``path`` is it, or the run's output."""
    found = Path(path)
    return found if found.name == FOLDER else found / FOLDER


def rank_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of ranks' own lines, in rank order."""
    files = ((file.stem.removeprefix("rank-"), file) for file in folder.glob("rank-*.jsonl"))
    return sorted((int(rank), file) for rank, file in files if rank.isdecimal())


def read_facts(folder: Path, run: Path) -> RunFacts:
    """Return what runs, from ``run.json`` in a folder; ``run`` is what it was asked for as.

    **Raises** ConfigError where there is none, or where another version has written it.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise ConfigError(
            f"{run}: no observed run, as there is no {path}. `with "
            "shardwise.observe(model, optimizer, output=...)` and `shardwise train` write one"
        )
    values = read_json(path)
    format_number = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    if format_number != FORMAT:
        raise ConfigError(
            f"{path}: format {shown(format_number)}, and this version reads {FORMAT}; read it with "
            "the version that wrote it"
        )
    facts: RunFacts = checked_value(RunFacts, values, f"{path}: not the facts of a run")
    return facts


def read_step(line: Mapping[str, Any], path: object = "steps.jsonl") -> StepLine:
    """Return a line of ``steps.jsonl`` as values. **Raises** ConfigError for other types."""
    step: StepLine = checked_value(StepLine, line, f"{path}: step {shown(line['step'])}")
    return step
