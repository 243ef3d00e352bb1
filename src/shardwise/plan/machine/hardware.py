"""What a cluster consists of: accelerators, links, hosts and nodes, as frozen values with sources.

Bandwidths are one way and decimal (1 GB/s = 1e9 bytes per second), as datasheets print them;
memory is in bytes. Figures that are not known are absent, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from shardwise.errors import ConfigError
from shardwise.quantities import check_whole

DTYPE_ALIASES: Mapping[str, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp64": "float64",
}
"""Names of precisions, as the names of their compute dtypes."""

MAX_RANKS = 1 << 20
_MAX_FIGURE = 1e18  # no bandwidth, rate or capacity of one machine comes near it


def canonical_dtype(name: str) -> str:
    """Return the dtype's name for a dtype or precision, e.g. ``bfloat16`` for ``bf16``."""
    return DTYPE_ALIASES.get(name, name)


@dataclass(frozen=True)
class Accelerator:
    """One device. ``memory_bytes`` is what its driver reports, ``nominal`` what it is sold as.

    ``peak`` is the datasheet's dense FLOP/s by dtype (and ``tf32``), ``matmul`` the best that a
    matmul of any shape was measured at, by dtype. ``family`` groups variants of one chip.
    ``asynchronous``: the host issues operations ahead of the device. ``link``, ``host_link`` and
    ``host`` name the catalogue's defaults.
    """

    name: str
    family: str
    memory_bytes: int
    nominal_memory_bytes: int
    peak: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    source: str
    matmul: Mapping[str, float] = field(default_factory=dict, hash=False)
    power_watts: int | None = None
    asynchronous: bool = True
    link: str = "pcie4"
    host_link: str = "pcie4"
    host: str = "server-ddr4"

    def __post_init__(self) -> None:
        _check_figures(self, f"accelerator {self.name!r}")
        for rates in (self.peak, self.matmul):
            for dtype, rate in rates.items():
                _check(f"accelerator {self.name!r}", f"FLOP/s in {dtype}", rate)

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for a dtype or precision; None where it has none."""
        return self.peak.get(canonical_dtype(dtype))

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak at which matmuls of a dtype run.

        A device without units for a 16-bit type computes it in float32 (bfloat16 on a V100).

        **Raises** ConfigError for another dtype that the device has no figure for.
        """
        name = canonical_dtype(dtype)
        if name in ("float16", "bfloat16") and name not in self.peak:
            name = "float32"
        if name not in self.peak:
            raise ConfigError(
                f"dtype {dtype!r}: {self.name} has no unit for it; it has {', '.join(self.peak)}"
            )
        return self.peak[name]


@dataclass(frozen=True)
class Link:
    """What ranks send over, one way. See Note [Ring and tree] in ``links`` for its use.

    ``latency_s`` is a step of a small message, ``bulk_latency_s`` one of the protocol that reaches
    full bandwidth; ``efficiency`` the share of ``bandwidth_bytes_per_s`` that large collectives
    reach. ``curve`` is (message bytes, bus bytes per second) of an all-reduce as published, over
    ``curve_ranks`` = (ranks per node, nodes); ``curve_inner_latency_s`` the step inside its nodes.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    bulk_latency_s: float
    efficiency: float
    source: str
    curve: tuple[tuple[float, float], ...] = ()
    curve_ranks: tuple[int, int] = (8, 1)
    curve_inner_latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_figures(self, f"link {self.name!r}")
        if self.efficiency > 1:
            raise ConfigError(f"link {self.name!r}: efficiency={self.efficiency}, expected <= 1")
        for size, rate in self.curve:
            _check(f"link {self.name!r}", "curve", min(size, rate))
        times = [size / rate for size, rate in self.curve]
        if times != sorted(times):
            raise ConfigError(f"link {self.name!r}: curve has a larger message that took less time")

    def scaled(self, factor: float) -> Link:
        """Return the link with so many times the bandwidth.

        A message of ``factor`` times the bytes then takes the time that it took before.
        """
        _check(f"link {self.name!r}", "factor", factor)
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor,
            curve=tuple((size * factor, rate * factor) for size, rate in self.curve),
        )

    @cached_property
    def achieved_bytes_per_s(self) -> float:
        """Return the bandwidth of large messages."""
        return self.curve[-1][1] if self.curve else self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Host:
    """The host of a node, with all its sockets: memory, cores, drives, and each device's link.

    ``nvme_bytes`` is the space of the drives, None where it is not known.
    ``dram_bytes_per_s`` counts both directions, as memory controllers do. ``device_link`` is that
    of one device; the drives' bandwidth is shared by all ranks of the node.
    """

    name: str
    memory_bytes: int
    dram_bytes_per_s: float
    cores: int
    device_link: Link
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    source: str
    nvme_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_figures(self, f"host {self.name!r}")


@dataclass(frozen=True)
class Node:
    """Accelerators behind one host: ``intra`` is one rank's link to the others of its node.

    ``inter`` is one NIC; ``num_nics`` of them serve the node's ranks in equal shares, and together
    where a collective has all ranks of the node in it.
    """

    name: str
    accelerator: Accelerator
    num_accelerators: int
    intra: Link
    inter: Link
    num_nics: int
    host: Host
    source: str

    def __post_init__(self) -> None:
        where = f"node {self.name!r}"
        check_whole(self.num_accelerators, f"{where}: num_accelerators", 1024)
        check_whole(self.num_nics, f"{where}: num_nics", 1024)

    @property
    def nics_per_rank(self) -> float:
        """NICs that one rank has for itself when all ranks of the node send."""
        return self.num_nics / self.num_accelerators


@dataclass(frozen=True)
class Cluster:
    """So many nodes of one kind."""

    node: Node
    num_nodes: int = 1

    def __post_init__(self) -> None:
        check_whole(self.num_nodes, "cluster: num_nodes", MAX_RANKS)
        check_whole(self.num_ranks, "cluster: number of ranks", MAX_RANKS)

    @property
    def num_ranks(self) -> int:
        """Number of accelerators in all."""
        return self.num_nodes * self.node.num_accelerators


def unknown(what: str, name: object, known: Mapping[str, str]) -> ConfigError:
    """Return the error for a name that is not in a table, with the nearest ones that are.

    ``known`` gives for each way to write a name the name itself.
    """
    near = get_close_matches(str(name).lower(), list(known), n=3, cutoff=0.5)
    names = dict.fromkeys(known[each] for each in near or known)
    found = "the nearest are" if near else "expected one of"
    return ConfigError(f"{what} {name!r} is not in the catalogue; {found} {', '.join(names)}")


def _check_figures(value: Any, where: str) -> None:
    """Refuse figures that are not above zero, not finite, or beyond anything that exists."""
    for each in fields(value):
        figure = getattr(value, each.name)
        if isinstance(figure, int | float) and not isinstance(figure, bool):
            if each.name.endswith("latency_s") and figure == 0:
                continue
            _check(where, each.name, figure)
    if not value.source.strip():
        raise ConfigError(f"{where}: source is empty; say where its figures are from")


def _check(where: str, what: str, figure: float) -> None:
    if not (math.isfinite(figure) and 0 < figure < _MAX_FIGURE):
        raise ConfigError(f"{where}: {what}={figure}, expected a number above 0, below 1e18")
