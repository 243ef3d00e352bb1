"""Imperfections of a simulated cluster: slow ranks and links, noise, failures.

Ranks are numbered as the engine's mesh numbers them: rank ``replica * num_shards + shard``, so the
ranks of one shard group are neighbours.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from shardwise.errors import ConfigError
from shardwise.quantities import check_whole
from shardwise.spelling import did_you_mean

LinkAxis = Literal["shard", "replicate"]
_MOST = 1 << 40  # of anything; larger numbers are typing errors


@dataclass(frozen=True)
class Straggler:
    """Ranks whose device and cores take ``slowdown`` times as long: one ``rank``, or a share.

    ``fraction`` of all ranks, rounded up, are picked by the scenario's seed.
    """

    slowdown: float
    rank: int | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class SlowLink:
    """Collectives that take ``factor`` times as long: those of one ``rank``, or of one group.

    ``group`` counts along ``axis``: shard group ``g`` is replica ``g``, replicate group ``g`` holds
    shard ``g`` of every replica.
    """

    factor: float
    rank: int | None = None
    axis: LinkAxis | None = None
    group: int | None = None


@dataclass(frozen=True)
class Failures:
    """Ranks that die: after ``mtbf_hours`` on average each, independent of one another.

    ``detect_s`` pass until the job knows it, ``restart_s`` until it runs again, loading aside. With
    tensor, pipeline or context parallelism one rank here stands for the whole group of devices.
    """

    mtbf_hours: float
    detect_s: float = 0.0
    restart_s: float = 0.0


@dataclass(frozen=True)
class Checkpoints:
    """The interval and the cost of saving the state.

    Training runs ``interval_s`` between two saves and stands still for ``stall_s`` in each; the
    checkpoint is durable ``cost_s`` after its save began, and takes ``load_s`` to read back.
    """

    interval_s: float
    stall_s: float = 0.0
    cost_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A cluster of ``num_shards x num_replicas`` data-parallel ranks and what goes wrong in it.

    ``jitter_sigma`` is the spread of the factor, 1 on average, by which each operation's time is
    multiplied on each rank (on each group, for a collective): sigma of the factor's logarithm.

    **Raises** ConfigError naming the field, the expected and the given value.
    """

    num_shards: int = 1
    num_replicas: int = 1
    num_steps: int = 1
    stragglers: tuple[Straggler, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    jitter_sigma: float = 0.0
    failures: Failures | None = None
    checkpoints: Checkpoints | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field, in their order."""
        for name in ("num_shards", "num_replicas", "num_steps"):
            check_whole(getattr(self, name), name, _MOST)
        for number, straggler in enumerate(self.stragglers):
            _check_straggler(f"stragglers[{number}]", straggler, self.num_ranks)
        for number, link in enumerate(self.slow_links):
            _check_slow_link(f"slow_links[{number}]", link, self)
        _check_number("jitter_sigma", self.jitter_sigma)
        for name, value in (("failures", self.failures), ("checkpoints", self.checkpoints)):
            for each in fields(value) if value is not None else ():
                above_zero = each.name in ("mtbf_hours", "interval_s")
                _check_number(f"{name}.{each.name}", getattr(value, each.name), above_zero)
        if (saves := self.checkpoints) is not None:
            if saves.cost_s < saves.stall_s:
                raise ConfigError(
                    f"checkpoints.cost_s={saves.cost_s}: expected at least stall_s="
                    f"{saves.stall_s}, since a checkpoint is not durable while training waits "
                    "for it"
                )
            if saves.interval_s + saves.stall_s < saves.cost_s:
                raise ConfigError(
                    f"checkpoints.interval_s={saves.interval_s}: a save would begin before the "
                    f"last one is durable (cost_s={saves.cost_s}); save less often"
                )
        check_whole(self.seed, "seed", _MOST, least=0)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.num_shards * self.num_replicas


def _check_straggler(field: str, straggler: Straggler, num_ranks: int) -> None:
    _check_number(f"{field}.slowdown", straggler.slowdown, least=1)
    if (straggler.rank is None) == (straggler.fraction is None):
        raise ConfigError(
            f"{field}: expected either rank= or fraction=, got rank={straggler.rank} and "
            f"fraction={straggler.fraction}; give one of them"
        )
    if straggler.rank is not None:
        check_whole(straggler.rank, f"{field}.rank", num_ranks - 1, least=0)
    if straggler.fraction is not None:
        _check_number(f"{field}.fraction", straggler.fraction, most=1)


def _check_slow_link(field: str, link: SlowLink, scenario: Scenario) -> None:
    _check_number(f"{field}.factor", link.factor, least=1)
    if (link.rank is None) == (link.group is None) or (link.axis is None) != (link.group is None):
        raise ConfigError(
            f"{field}: expected either rank=, or axis= and group=; got rank={link.rank}, "
            f"axis={link.axis!r}, group={link.group}"
        )
    if link.rank is not None:
        check_whole(link.rank, f"{field}.rank", scenario.num_ranks - 1, least=0)
    if link.group is not None:
        names, axis = get_args(LinkAxis), link.axis
        if axis not in names:
            hint = did_you_mean(str(axis), names)
            raise ConfigError(f"{field}.axis={axis!r}: expected {' or '.join(names)}{hint}")
        groups = scenario.num_replicas if axis == "shard" else scenario.num_shards
        check_whole(link.group, f"{field}.group", groups - 1, least=0)


def _check_number(
    field: str, value: object, above_zero: bool = False, least: float = 0, most: float = 1e300
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (above_zero and value == 0):  # type: ignore[operator]
        wanted = "above 0" if above_zero else f"{least} to {most:g}"
        raise ConfigError(f"{field}={value!r}: expected a number, {wanted}")
