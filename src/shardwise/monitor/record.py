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
from typing import Any

from shardwise.errors import ConfigError
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

    name: str
    class_name: str
    num_params: int
    numel: int
    full_bytes: int
    rank_bytes: int
    padding_bytes: int
    dtype: str
    layout: str
    home: str = ""
    num_modules: int = 0


@dataclass(frozen=True)
class RunFacts:
    """What runs: said once, by rank 0. ``degrees`` are the sizes of the mesh's axes, by name.

    ``peak_flops`` is what the device can do in the dtype that is computed in, None where that is
    not known; ``flops_per_token`` what the products with this rank's weights need in a forward and
    backward pass. ``hosts`` are by rank. ``unsharded_bytes`` are those of parameters that are
    trained and belong to no unit; ``reduces_units_alone``: as `fully_shard` does, whatever
    ``bucket_bytes`` is.
    """

    stage: int
    degrees: Mapping[str, int]
    num_ranks: int
    device: str
    device_bytes: int
    bucket_bytes: int
    prefetch_bytes: int | None
    units: tuple[UnitFacts, ...]
    hosts: tuple[str, ...] = ()
    peak_flops: float | None = None
    flops_per_token: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    started: str = ""
    optimizer: str = ""
    offload: str = ""
    unsharded_bytes: int = 0
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
    messages; the few longest, where the transport tells.
    """

    step: int
    num_steps: int
    at_s: float
    metrics: Mapping[str, OverRanks]
    values: Mapping[str, float | None] = field(default_factory=dict)
    waited_for: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    values_over_steps: Mapping[str, OverSteps] = field(default_factory=dict)
    metrics_over_steps: Mapping[str, OverSteps] = field(default_factory=dict)


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
    steps = tuple(read_step(line) for line in read_lines(folder / "steps.jsonl"))
    by_rank = {
        rank: tuple(read_lines(file) if newest is None else read_newest(file, KINDS, newest))
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
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] == FORMAT:
            units = tuple(UnitFacts(**unit) for unit in values["units"])
            return RunFacts(**{**values, "units": units, "hosts": tuple(values["hosts"])})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{run}: no observed run, as there is no {path}. `with "
            "shardwise.observe(model, optimizer, output=...)` and `shardwise train` write one"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not the facts of a run ({error})") from error
    raise ConfigError(
        f"{path}: format {values['format']}, and this version reads {FORMAT}; read it with the "
        "version that wrote it"
    )


def read_step(line: Mapping[str, Any]) -> StepLine:
    """Return a line of ``steps.jsonl`` as values."""
    metrics = {name: OverRanks(**value) for name, value in line["metrics"].items()}
    values = line.get("values", {})
    waited_for = {
        int(rank): {int(other): ms for other, ms in row.items()}
        for rank, row in line.get("waited_for", {}).items()
    }
    over_steps = [
        {name: OverSteps(**value) for name, value in line.get(key, {}).items()}
        for key in ("values_over_steps", "metrics_over_steps")
    ]
    return StepLine(
        line["step"], line["num_steps"], line["at_s"], metrics, values, waited_for, *over_steps
    )
