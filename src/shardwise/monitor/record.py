"""What is kept of an observed run: its folder, and the lines and values in it.

Note [The folder of a run]
~~~~~~~~~~~~~~~~~~~~~~~~~~
``OUTPUT/observed/run.json`` says what runs (`RunFacts`), written once by rank 0; ``steps.jsonl``
has a line for each few steps, every figure over all ranks, by rank 0; ``rank-N.jsonl`` what only
that rank knows: timelines and memory of single steps. All of it is read by people's own tools, so
keys keep their meaning; ``format`` counts up when one does not.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.monitor.lines import read_lines
from shardwise.monitor.metrics import OverRanks

FORMAT = 1
FOLDER = "observed"


@dataclass(frozen=True)
class UnitFacts:
    """One unit of the model; bytes in the master dtype, padding summed over the ranks."""

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


@dataclass(frozen=True)
class RunFacts:
    """What runs: said once, by rank 0. ``degrees`` are the sizes of the mesh's axes, by name.

    ``peak_flops`` is what the device can do in the dtype that is computed in, None where that is
    not known; ``flops_per_token`` what the products with this rank's weights need in a forward and
    backward pass. ``hosts`` are by rank.
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
    activation_checkpointing: str = ""
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

    ``values`` are what the user's loop has logged, of rank 0. ``at_s`` counts from the start.
    """

    step: int
    num_steps: int
    at_s: float
    metrics: Mapping[str, OverRanks]
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """A run as it was kept. ``lines`` of ranks are as they were written."""

    path: Path
    facts: RunFacts
    steps: tuple[StepLine, ...]
    by_rank: Mapping[int, tuple[Mapping[str, Any], ...]]

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
    for path in folder.glob("rank-*.jsonl"):
        if int(path.stem.removeprefix("rank-")) >= num_ranks:
            path.unlink()


def read_run(path: str | Path) -> RunRecord:
    """Read what was kept of a run, also of one that goes on; a line cut short is left out.

    ``path`` is the run's output, or the folder in it.

    **Raises** ConfigError where there is none, or where another version has written it.
    """
    found = Path(path)
    folder = found if found.name == FOLDER else found / FOLDER
    try:
        facts = _read_facts(json.loads((folder / "run.json").read_text(encoding="utf-8")), folder)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{found}: no observed run, as there is no {folder / 'run.json'}. `with "
            "shardwise.observe(model, optimizer, output=...)` and `shardwise train` write one"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / 'run.json'}: not the facts of a run ({error})") from error
    steps = tuple(_read_step(line) for line in read_lines(folder / "steps.jsonl"))
    by_rank = {
        int(file.stem.removeprefix("rank-")): tuple(read_lines(file))
        for file in sorted(folder.glob("rank-*.jsonl"), key=lambda f: int(f.stem[5:]))
    }
    return RunRecord(found, facts, steps, by_rank)


def _read_facts(values: Any, folder: Path) -> RunFacts:
    if values["format"] != FORMAT:
        raise ConfigError(
            f"{folder / 'run.json'}: format {values['format']}, and this version reads {FORMAT}"
        )
    units = tuple(UnitFacts(**unit) for unit in values["units"])
    return RunFacts(**{**values, "units": units, "hosts": tuple(values["hosts"])})


def _read_step(line: Mapping[str, Any]) -> StepLine:
    metrics = {name: OverRanks(**value) for name, value in line["metrics"].items()}
    values = line.get("values", {})
    return StepLine(line["step"], line["num_steps"], line["at_s"], metrics, values)
